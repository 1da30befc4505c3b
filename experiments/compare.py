"""Methods side by side on the same split and seeds: `python experiments/compare.py --config NAME --methods all`."""

import argparse
import sys
from pathlib import Path

from pfedafm_jax import cli, compare_methods
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.methods import method_names


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        default="all",
        metavar="A,B,…",
        help=f"all (the paper's eight), or some of: {', '.join(method_names())}",
    )
    parser.add_argument("--seeds", default="", metavar="0,1,…", help="several seeds give mean and deviation")


def main() -> int:
    config, options = cli.parse(sys.argv[1:], "experiments/compare.py", __doc__ or "", add_options)
    try:
        seeds = [int(seed) for seed in options.more.seeds.split(",")] if options.more.seeds else None
    except ValueError:
        raise PfedafmError(
            f"seeds = {options.more.seeds!r} cannot be used; accepted: whole numbers like 0,1,2"
        ) from None
    observers = options.observers() if options.start(config.devices) else []
    base = Path(f"{options.run_dir}-compare") if options.more.run_dir is None else options.run_dir
    with Interruption() as interruption:
        compare_methods(
            config,
            options.more.methods,
            seeds,
            run_dir=base,
            data_dir=options.data_dir,
            fresh=options.fresh,
            name=options.name,
            command=options.command,
            interruption=interruption,
            observers=observers,
        )
    return 0


if __name__ == "__main__":
    cli.guarded(main)
