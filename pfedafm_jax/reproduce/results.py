"""The finished runs of a study, and what items read from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.records import read_rounds
from pfedafm_jax.reproduce import paper
from pfedafm_jax.reproduce.plan import Run, Study, Summary


@dataclass(frozen=True)
class Finished:
    """A finished run: its summary, and its rounds and clients, read when they are asked for."""

    folder: Path
    summary: Summary

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return read_rounds(self.folder)

    @cached_property
    def clients(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "clients.npz") as table:
            return dict(table)

    @property
    def judged_by(self) -> str:
        """The prediction that the method is judged by: the first one."""
        return next(iter(self.rounds[0]["accuracy"]))

    def accuracy_of_clients(self) -> np.ndarray:
        """Each client's accuracy at the end, `[clients]`."""
        return self.clients[f"all_clients/{self.judged_by}"][-1]


class Results:
    """Finished runs by their folder."""

    def __init__(self, summaries: Mapping[Path, Summary]):
        self._found = {folder: Finished(folder, summary) for folder, summary in summaries.items()}

    def get(self, run: Run) -> Finished | None:
        return self._found.get(run.folder)

    def all(self, runs: Iterable[Run]) -> list[Finished]:
        """Those of these runs that are finished."""
        return [finished for run in runs if (finished := self.get(run)) is not None]


def dataset_label(study: Study, dataset: str) -> str:
    """`CIFAR-10`, or what stands in its place."""
    config = study.run("pfedafm", dataset).config
    return paper.DATASETS.get(config.dataset, f"{config.dataset} {config.synthetic_classes}")


def rounds_of(runs: Sequence[Summary]) -> str:
    """How long runs were: `20`, or `20 to 40` where they differ."""
    lengths = sorted({summary["rounds"] for summary in runs})
    return "–" if not lengths else str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
