"""Many runs one after another: finished ones are left alone, the others started or gone on with, watched, and recorded."""

import gc
import shutil
import time
from collections.abc import Callable, Sequence

import jax

from pfedafm_jax import cli
from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.errors import Interrupted, PfedafmError
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.methods import find_method
from pfedafm_jax.reproduce.plan import Standing, Summary, checkpoint_gigabytes, in_words
from pfedafm_jax.runner import checkpoint_folder, finished_summary, run_into


def carry_out(
    standings: Sequence[Standing],
    seconds_left: Callable[[Standing], float],
    *,
    data_dir: str | None = None,
    command: str = "",
    split_of: Callable[[Config, Dataset], Partition] = split,
    drop_checkpoints: bool = False,
) -> list[Summary]:
    """The summaries of these runs, in their order; those that are not `done` are run first.

    Folders are looked at and datasets loaded before the first run starts, so that what cannot work fails at once.
    """
    pending = [standing for standing in standings if standing.state != "done"]
    for standing in pending:
        finished_summary(standing.run.config, standing.run.folder, fresh=standing.state == "again")
    if not drop_checkpoints:
        _check_space(pending)
    datasets = {}
    for standing in pending:
        config = standing.run.config
        if _data_key(config) not in datasets:
            datasets[_data_key(config)] = load_data(config, data_dir, cli.console.print)
    summaries = {standing.run.folder: standing.summary for standing in standings if standing.summary is not None}
    estimates = [seconds_left(standing) for standing in pending]
    start, total = time.perf_counter(), sum(standing.run.config.rounds for standing in pending)
    with Interruption() as interruption, cli.Watch(max(1, total)) as watch:
        for number, standing in enumerate(pending):
            run, config = standing.run, standing.run.config
            before, left = sum(estimates[:number]), sum(estimates[number:])
            left *= (time.perf_counter() - start) / before if before else 1.0  # as fast as it went so far
            cli.console.print(f"[dim]run {number + 1} of {len(pending)}, about {in_words(left)} left[/dim]  {run.name}")
            watch.rounds, watch.every = config.rounds, max(1, config.rounds // 10)
            watch.next_run(find_method(config.method).title)
            dataset = datasets[_data_key(config)]
            experiment = Experiment(config, dataset, split_of(config, dataset))
            experiment.compile()
            summaries[run.folder], _ = run_into(
                run.folder,
                experiment,
                command,
                watch.show,
                resumed=watch.resume,
                fresh=standing.state == "again",
                interruption=interruption,
                log=cli.console.print,
            )
            if drop_checkpoints:
                Checkpoints(checkpoint_folder(run.folder)).clear()
            del experiment
            jax.clear_caches()  # every compiled program holds memory maps, of which a process may have only so many
            gc.collect()
            if interruption.signal_number is not None and number + 1 < len(pending):
                raise Interrupted("stopped between two runs; the same command goes on", interruption.signal_number)
    return [summaries[standing.run.folder] for standing in standings]


def _check_space(pending: Sequence[Standing]) -> None:
    """Raises where the checkpoints of all these runs would not fit on the disk."""
    for standing in pending[:1]:
        place = checkpoint_folder(standing.run.folder)
        while not place.exists():
            place = place.parent
        needed = sum(checkpoint_gigabytes(other.run.config) for other in pending)
        free = shutil.disk_usage(place).free / 1e9
        if needed > free:
            raise PfedafmError(
                f"{len(pending)} runs leave about {needed:.0f} GB of checkpoints, and {place} has {free:.0f} GB free; "
                "--drop-checkpoints removes those of a run when it is finished"
            )


def _data_key(config: Config) -> tuple[object, ...]:
    """What a dataset depends on."""
    if config.dataset != "synthetic":
        return (config.dataset,)
    return config.dataset, config.synthetic_classes, config.synthetic_samples, config.seed
