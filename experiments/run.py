"""One run of one method: `python experiments/run.py --config hetero_cifar10`."""

import sys
from pathlib import Path

from pfedafm_jax import cli
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.runner import finished_summary, run_into

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config, options = cli.parse(sys.argv[1:], CONFIGS, "experiments/run.py", __doc__ or "")
    first = options.start(config.devices)
    finished = finished_summary(config, options.run_dir, options.fresh, writes=first)
    if finished:
        cli.console.print(f"[bold]{options.run_dir}[/bold] is finished already; --fresh starts over")
        cli.print_summary(finished, sorted(options.run_dir.glob("*.png")))
        return 0
    with Interruption() as interruption:
        experiment = Experiment(config, data_dir=options.data_dir, log=cli.console.print)
        cli.print_plan(experiment, options)
        with cli.console.status("compiling, up to a minute the first time"):
            experiment.compile()
        with cli.Watch(config.rounds) as watch:
            summary, pictures = run_into(
                options.run_dir,
                experiment,
                options.command,
                watch.show,
                resumed=watch.resume,
                fresh=options.fresh,
                interruption=interruption,
                log=cli.console.print,
            )
    cli.print_summary(summary, pictures)
    return 0


if __name__ == "__main__":
    cli.guarded(main)
