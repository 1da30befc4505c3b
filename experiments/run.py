"""One run of one method: `python experiments/run.py --config hetero_cifar10`."""

import sys
from pathlib import Path

from pfedafm_jax import cli, plots
from pfedafm_jax.engine import setup_devices
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.records import RunFolder, same_settings

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    config, options = cli.parse(sys.argv[1:], CONFIGS, "experiments/run.py", __doc__ or "")
    setup_devices(config.devices)
    folder = RunFolder(options.run_dir).check()
    finished = folder.summary()
    if finished and not options.fresh and same_settings(config, finished["config"]):
        cli.console.print(f"[bold]{options.run_dir}[/bold] is finished already; --fresh starts over")
        cli.print_summary(finished, sorted(options.run_dir.glob("*.png")))
        return 0
    experiment = Experiment(config, data_dir=options.data_dir, log=cli.console.print)
    folder.start(experiment, options.command)
    cli.print_plan(experiment, options)
    with cli.console.status("compiling, about half a minute the first time"):
        experiment.compile()
    with cli.Watch(config.rounds) as watch:
        for record in experiment.rounds():
            folder.add(record)
            watch.show(record)
    summary = folder.finish(experiment)
    title = f"{experiment.federation.method.title}, {config.dataset}, N = {config.num_clients}, C = {100 * config.participation:g} %"
    cli.print_summary(summary, plots.draw_all(experiment, options.run_dir, title))
    return 0


if __name__ == "__main__":
    cli.guarded(main)
