"""One run of one method: `python experiments/run.py --config hetero_cifar10`."""

from pfedafm_jax import cli
from pfedafm_jax.run import run_all
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Task, look


def main(argv: list[str]) -> int:
    config, options = cli.parse(argv, "experiments/run.py", __doc__ or "")
    first = options.start(config.devices)
    standing = look(Task(config, options.run_dir), fresh=options.fresh)
    with Signals() as signals:
        run_all(
            [standing],
            data_dir=options.data_dir,
            name=options.name,
            command=options.command,
            observers=options.observers() if first else [],
            signals=signals,
        )
    return 0


if __name__ == "__main__":
    cli.guarded(main)
