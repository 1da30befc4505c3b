"""The paper's tables and figures by name: what each needs, and how it is drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pfedafm_jax.reproduce import ablations, case_studies, comparisons, tables
from pfedafm_jax.reproduce.outcome import Outcome
from pfedafm_jax.reproduce.plan import Run, Study
from pfedafm_jax.reproduce.results import Results


@dataclass(frozen=True)
class Item:
    """A table or a figure. `draw` gives None where there is nothing to draw; `also` are runs that it shows if they are
    there."""

    about: str
    runs: Callable[[Study], list[Run]]
    draw: Callable[[Study, Results], Outcome | None]
    also: Callable[[Study], list[Run]] = lambda study: []


def _accuracy(family: str, about: str) -> Item:
    def runs(study: Study) -> list[Run]:
        return [run for cell in tables.accuracy_runs(study, family).values() for _, run in cell]

    return Item(about, runs, partial(tables.accuracy_table, family=family))


def _uneven(about: str, points: case_studies.Points, run_at: case_studies.RunAt, title: str, axis: str) -> Item:
    return Item(
        about,
        partial(case_studies.uneven_runs, points=points, run_at=run_at),
        partial(case_studies.uneven, points=points, run_at=run_at, title=title, axis=axis),
    )


ITEMS = {
    "table1": Item("sizes of the five networks", lambda study: [], tables.model_sizes),
    "table2": _accuracy("homo", "all methods, one architecture"),
    "table3": _accuracy("hetero", "all methods, five architectures"),
    "fig-convergence": Item("accuracy by round", comparisons.convergence_runs, comparisons.convergence),
    "fig-individual": Item(
        "every client, pFedAFM minus FedProto",
        comparisons.pair_runs,
        comparisons.individual,
        also=comparisons.baseline_runs,
    ),
    "fig-cost": Item("rounds, communication and computation to 90 % and 50 %", comparisons.pair_runs, comparisons.cost),
    "fig-pathological": _uneven(
        "classes a client sees",
        case_studies.class_points,
        case_studies.class_run,
        "Number of classes that a client sees",
        "classes a client",
    ),
    "fig-dirichlet": _uneven(
        "Dirichlet shares of all classes",
        case_studies.gamma_points,
        case_studies.gamma_run,
        "Dirichlet shares of all classes",
        "gamma",
    ),
    "fig-mix-lr": Item("learning rate of the mix vector", case_studies.mix_rate_runs, case_studies.mix_rate),
    "fig-mix-mean": Item("mean of the mix vector by round", case_studies.mix_mean_runs, case_studies.mix_mean),
    "fig-ablation-models": Item("small, large and mixed model", case_studies.mix_mean_runs, ablations.parts),
    "fig-ablation-training": Item("end-to-end and iterative training", ablations.training_runs, ablations.training),
    "fig-theory": Item("the assumptions and the bound in a run", lambda study: [], ablations.theory_outcome),
}
