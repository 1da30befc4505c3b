"""One run of one method: `python experiments/run.py --config hetero_cifar10`."""

import sys

from pfedafm_jax import cli, run
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.observers import replay
from pfedafm_jax.runner import finished_summary


def main() -> int:
    config, options = cli.parse(sys.argv[1:], "experiments/run.py", __doc__ or "")
    first = options.start(config.devices)
    finished = finished_summary(config, options.run_dir, options.fresh, writes=first)
    observers = options.observers() if first else []
    if finished:  # said without loading anything
        replay(options.run_dir, observers)
        cli.console.print(f"[bold]{options.run_dir}[/bold] is finished already; --fresh starts over")
        cli.print_summary(finished, sorted(options.run_dir.glob("*.png")))
        return 0
    with Interruption() as interruption:
        run(
            config,
            run_dir=options.run_dir,
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
