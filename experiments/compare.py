"""Methods side by side, same split and seeds: `python experiments/compare.py --config NAME
--methods all`."""

import argparse

from pfedafm_jax import cli, compare
from pfedafm_jax.methods import method_names
from pfedafm_jax.signals import Signals


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(method_names())
    parser.add_argument(
        "--methods",
        default="all",
        metavar="A,B,…",
        help=f"all (the paper's eight), or some of: {names}",
    )
    parser.add_argument(
        "--seeds", default="", metavar="0,1,…", help="several seeds give mean and deviation"
    )


def main(argv: list[str]) -> int:
    config, options = cli.parse(argv, "experiments/compare.py", __doc__ or "", add_options)
    first = options.start(config.devices)
    base = options.run_dir
    with Signals() as signals:
        compare(
            config,
            options.more.methods,
            cli.seeds(options.more.seeds),
            run_dir=base if options.more.run_dir else base.with_name(f"{base.name}-compare"),
            data_dir=options.data_dir,
            fresh=options.fresh,
            name=options.name,
            command=options.command,
            observers=options.observers() if first else [],
            signals=signals,
        )
    return 0


if __name__ == "__main__":
    cli.guarded(main)
