"""One run of one method: `pfedafm run --config hetero_cifar10`."""

from pfedafm_jax.cli.options import RunOptions, parse


def main(words: list[str]) -> int:
    """Trains, or resumes, the run that these words ask for."""
    asked = parse(words, "run", __doc__ or "", RunOptions)

    from pfedafm_jax.runs.drive import run_all
    from pfedafm_jax.runs.existing import Task, find_existing
    from pfedafm_jax.runs.signals import Signals

    with Signals() as signals:
        shared = asked.start()
        task = Task(asked.config, asked.run_dir)
        task = find_existing(task, fresh=asked.options.fresh)
        run_all([task], signals=signals, **shared)
    return 0
