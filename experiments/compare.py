"""Methods side by side on the same split and seeds: `python experiments/compare.py --config NAME --methods all`."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from pfedafm_jax import cli, plots
from pfedafm_jax.compare import collect, markdown
from pfedafm_jax.engine import setup_devices
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.records import RunFolder
from pfedafm_jax.runner import finished_summary, run_into

CONFIGS = Path(__file__).parent / "configs"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods", default="all", metavar="A,B,…", help=f"all, or some of: {', '.join(method_names())}"
    )
    parser.add_argument("--seeds", default="", metavar="0,1,…", help="several seeds give mean and deviation")


def main() -> int:
    config, options = cli.parse(sys.argv[1:], CONFIGS, "experiments/compare.py", __doc__ or "", add_options)
    methods = method_names() if options.more.methods == "all" else options.more.methods.split(",")
    for name in methods:
        find_method(name)
    try:
        seeds = [int(seed) for seed in options.more.seeds.split(",")] if options.more.seeds else [config.seed]
    except ValueError:
        raise PfedafmError(
            f"seeds = {options.more.seeds!r} cannot be used; accepted: whole numbers like 0,1,2"
        ) from None
    setup_devices(config.devices)
    base = Path(f"{options.run_dir}-compare") if options.more.run_dir is None else options.run_dir
    RunFolder(base).check()
    runs = []
    with cli.Watch(config.rounds, len(methods) * len(seeds)) as watch:
        for seed in seeds:
            dataset = partition = None
            for name in methods:
                settings = replace(config, method=name, seed=seed).check()
                run_dir = base / f"{name}-seed{seed}"
                summary = None if options.fresh else finished_summary(settings, run_dir)
                watch.next_run(find_method(name).title, done=summary is not None)
                if summary is None:
                    if dataset is None or partition is None:
                        dataset = load_data(settings, options.data_dir, cli.console.print)
                        partition = split(settings, dataset)
                    experiment = Experiment(settings, dataset, partition)
                    experiment.compile()
                    summary, _ = run_into(run_dir, experiment, options.command, watch.show)
                runs.append((name, seed, run_dir, summary))
    rows = collect([(name, summary) for name, _, _, summary in runs])
    cli.print_comparison(rows)
    curves = {find_method(name).title: [str(r[2]) for r in runs if r[0] == name] for name in methods}
    picture = plots.save(plots.compare_runs(curves, f"{config.dataset}, {options.name}"), base / "compare.png")
    (base / "compare.json").write_text(json.dumps(rows, indent=2) + "\n")
    (base / "compare.md").write_text(markdown(rows))
    for path in (picture, base / "compare.md", base / "compare.json"):
        cli.console.print(f"  {path}")
    return 0


if __name__ == "__main__":
    cli.guarded(main)
