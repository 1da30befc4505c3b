"""Admits a newcomer to a trained run: `pfedafm join RUN --data mine.npz --out DIR`."""

import argparse

import jax

from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.data.sources.folder import read_own
from pfedafm_jax.inference.export import check_target, export_client
from pfedafm_jax.inference.opened import load_run
from pfedafm_jax.results.tables import percent
from pfedafm_jax.runs.progress import clean, console


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("pfedafm join", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    add("--data", required=True, metavar="PATH", help=".npz (images, labels) or a folder per class")
    add("--architecture", metavar="NAME", help="of its network (default: the run's first)")
    add("--visits", type=int, default=5, metavar="V", help="rounds of local training (default: 5)")
    add("--seed", type=int, default=0, help="of its start and its batches (default: 0)")
    add("--out", required=True, metavar="DIR", help="a new folder for its model, as of export")
    add("--plugin", action="append", default=[], metavar="FILE.py", help="as the run had it")
    asked = parser.parse_args(argv)
    check_target(asked.out)
    for file in asked.plugin:
        load_plugin(file)
    run = load_run(asked.run, console.print)
    images, labels, *tests = read_own(asked.data, run.classes, run.config.image_size)
    if not jax.tree.leaves(run.server):
        console.print(f"{type(run.method).title} shares nothing: the newcomer trains alone")

    def show(visit: int, accuracies: dict[str, float]) -> None:
        words = "  ".join(f"{name} {percent(value)} %" for name, value in accuracies.items())
        console.print(f"after {visit} visit{'s' * (visit != 1)}:  {words}")

    own = dict(zip(("test_images", "test_labels"), tests, strict=True)) if len(tests[0]) else {}
    options = {"seed": asked.seed, "log": show, **own}
    client = run.join(images, labels, asked.architecture, asked.visits, **options)
    for file in export_client(client, asked.out):
        console.print(f"  {clean(str(file))}  {file.stat().st_size / 1e6:.1f} MB")
    return 0
