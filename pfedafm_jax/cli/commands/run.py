"""One run of one method: `pfedafm run --config hetero_cifar10`."""

from pfedafm_jax.cli.options import parse
from pfedafm_jax.runs.drive import run_all
from pfedafm_jax.runs.existing import Task, find_existing
from pfedafm_jax.runs.signals import Signals


def main(argv: list[str]) -> int:
    config, options = parse(argv, "run", __doc__ or "")
    with Signals() as signals:
        shared = options.start(config.devices)
        task = find_existing(Task(config, options.run_dir), fresh=options.more.fresh)
        run_all([task], signals=signals, **shared)
    return 0
