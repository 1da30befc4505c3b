"""Runs that nobody trained: records made by hand, written as the driver writes them."""

import numpy as np

from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Partition
from pfedafm_jax.results.records import FORMAT, Record, RunFolder, summarize
from pfedafm_jax.results.run import Run, read_run

PREDICTIONS = {"pfedafm": ["mixed", "small", "large"]}


def record(number, accuracy=0.5, *, everyone=None, floats=1, participants=(0, 1), **more):
    """A round with this mean accuracy; each of its numbers can be worked out in the head."""
    given = {name: more.pop(name) for name in ("seconds", "not_finite") if name in more}
    usual = {"seconds": 2.0, "not_finite": 0, "loss": 1 / number, "flops": 5, **given}
    return Record(
        round=number,
        mean_accuracy=accuracy,
        all_clients_accuracy=everyone,
        participants=list(participants),
        floats_up=floats,
        floats_down=2 * floats,
        more=more,
        **usual,
    )


def run_by_hand(
    records,
    folder=None,
    *,
    finished=True,
    last_accuracies=None,
    visits=None,
    nodes=False,
    **settings,
) -> Run:
    """A run with these records; in a folder it is written there and read back.

    `last_accuracies` `[clients]` are those of the last evaluation of all clients, `visits` arrays
    `[rounds, clients]`.
    """
    config = updated(Config(), settings)
    clients = config.num_clients
    about = {
        "format": FORMAT,
        "config": config.as_dict(),
        "command": "by hand",
        "versions": {"python": "3"},
        "devices": "none",
        "data": {"source": "by hand", "digest": "0" * 64},
        "predictions": PREDICTIONS.get(config.method, ["private"]),
        "architectures": list(config.architectures),
    }
    about |= {"nodes": True} if nodes else {}
    summary = summarize(records, about, last_accuracies, compile_seconds=1.5)
    scores = (
        np.zeros((0, clients)) if last_accuracies is None else np.asarray(last_accuracies)[None]
    )
    arrays = {
        "evaluation_rounds": np.full(len(scores), len(records)),
        "all_clients/accuracy": scores,
        "architecture": np.arange(clients) % len(config.architectures),
        "num_train": np.full(clients, 8),
        "num_test": np.full(clients, 2),
        **{f"visits/{name}": rows for name, rows in (visits or {}).items()},
    }
    if folder is None:
        return Run(about, list(records), summary, finished, arrays=arrays)
    writer, rows = RunFolder(folder), np.arange(10 * clients, dtype=np.int32).reshape(clients, 10)
    with writer.lock():
        writer.start(
            about, Partition(tuple(rows[:, :8]), tuple(rows[:, 8:]), tuple(rows[:, :0])), records
        )
        if finished:
            writer.finish(summary, records, arrays)
    return read_run(folder)
