"""Methods side by side, same split and seeds: `pfedafm compare --config NAME --methods paper,controls`."""

import argparse

from pfedafm_jax.cli.options import parse, seeds
from pfedafm_jax.methods import method_names
from pfedafm_jax.runs.drive import compare
from pfedafm_jax.runs.signals import Signals


def add_options(parser: argparse.ArgumentParser) -> None:
    add, names = parser.add_argument, ", ".join(method_names())
    known = f"paper (its eight), controls (four), all (every one), or some of: {names}"
    add("--methods", default="paper", metavar="A,B,…", help=known)
    add("--seeds", default="", metavar="0,1,…", help="several seeds give mean and deviation")


def main(argv: list[str]) -> int:
    config, options = parse(argv, "compare", __doc__ or "", add_options)
    more, base = options.more, options.run_dir
    base = base if more.run_dir else base.with_name(f"{base.name}-compare")
    with Signals() as signals:
        shared = options.start(config.devices) | {"run_dir": base, "fresh": more.fresh}
        compare(config, more.methods, seeds(more.seeds), signals=signals, **shared)
    return 0
