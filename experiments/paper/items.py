"""The paper's tables and figures by name: the runs of each, and what makes an outcome of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import theory

from paper import case_studies, comparisons, fig_theory, tables
from paper.outcome import Outcome, Table
from paper.study import Found, Study
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.terminal import console
from pfedafm_jax.runs.existing import Task

Tasks = Callable[[Study], dict[tuple[Any, ...], Task]]


@dataclass(frozen=True)
class Item:
    """A table or a figure; `also` are runs that it shows if they are there."""

    about: str
    tasks: Tasks
    draw: Callable[[Study, Found], Outcome | None]  # None: there is nothing to draw
    also: Tasks = lambda study: {}


def _accuracy(family: str, about: str) -> Item:
    tasks = partial(tables.accuracy_tasks, family=family)
    return Item(about, tasks, partial(tables.accuracy_table, family=family))


def _along(axis: case_studies.Axis) -> Item:
    tasks = partial(case_studies.along_tasks, axis=axis)
    return Item(axis.title, tasks, partial(case_studies.along, axis=axis))


def theory_task(study: Study) -> Task:
    """A training of its own, done where its folder has what was measured with these settings."""
    task = study.task("pfedafm", study.datasets[0], study.one_seed[0], variation="theory")
    return replace(task, state="done" if _measured(task) else "new")


def _measured(task: Task) -> dict[str, Any] | None:
    path = (task.folder or Path()) / "theory.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    return result if result.get("config") == json.loads(json.dumps(task.config.as_dict())) else None


def _theory(study: Study, found: Found) -> Outcome | None:
    """What the paper's assumptions and bound look like in a run."""
    task = theory_task(study)
    result = _measured(task)
    if result is None and study.only_finished:
        return None
    if result is None:
        result = theory.study(task.config, study.data_dir, console.print)
        path = (task.folder or Path()) / "theory.json"
        write_atomically(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    table = Table("", ("", "measured"), fig_theory.rows(result))
    return Outcome("The theory in a run", [table], fig_theory.figure(result))


def _nothing(study: Study) -> dict[tuple[Any, ...], Task]:
    return {}


_P, _C = comparisons, case_studies
_OURS = partial(_P.pair_tasks, methods=("pfedafm",))
ITEMS = {
    "table1": Item("sizes of the five networks", _nothing, tables.model_sizes),
    "table2": _accuracy("homo", "all methods, one architecture"),
    "table3": _accuracy("hetero", "all methods, five architectures"),
    "fig-convergence": Item("accuracy by round", _P.convergence_tasks, _P.convergence),
    "fig-individual": Item("each client, pFedAFM minus FedProto", _P.pair_tasks, _P.individual,
                           lambda study: _P.pair_tasks(study, study.scale.methods)),
    "fig-cost": Item("rounds, floats and FLOPs to 90 % and 50 %", _P.pair_tasks, _P.cost),
    "fig-pathological": _along(_C.CLASSES),
    "fig-dirichlet": _along(_C.GAMMA),
    "fig-mix-lr": _along(_C.MIX_RATE),
    "fig-mix-mean": Item("mean of the mix vector by round", _OURS, _C.mix_mean),
    "fig-ablation-models": Item("small, large and mixed model", _OURS, _C.parts),
    "fig-ablation-training": Item("end-to-end and iterative training", _C.training_tasks, _C.training),
    "fig-theory": Item("the assumptions and the bound in a run", _nothing, _theory),
}  # fmt: skip
