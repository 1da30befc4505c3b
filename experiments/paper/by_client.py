"""A finished run's accuracies client by client, in parts of the run, and the error of their mean."""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats  # comes with JAX, which needs it

from pfedafm_jax.results.run import Run

STRETCHES = 5  # parts of a run: the last has the late rounds


def visits(run: Run, prediction: str = "") -> np.ndarray:
    """Accuracy in percent of a client right after a visit, NaN without one: `[rounds, clients]`."""
    return 100 * run.clients[f"visits/accuracy{prediction and '/'}{prediction}"]


def everyone(run: Run, prediction: str = "") -> np.ndarray:
    """Accuracy in percent when all clients were evaluated: `[evaluations, clients]`."""
    return 100 * run.clients[f"all_clients/accuracy{prediction and '/'}{prediction}"]


def best_round(run: Run) -> float:
    """The best round's mean over its participants, in percent; NaN if no round has one."""
    return 100 * (run.summary.best_mean_accuracy or np.nan)


def stretches(run: Run) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The parts of a run: the rows of `visits` and those of `everyone` in each."""
    for rows in np.array_split(np.arange(run.summary.rounds), STRETCHES):
        yield rows, np.flatnonzero(np.isin(run.clients["evaluation_rounds"], rows + 1))


def span(rows: np.ndarray) -> str:
    return f"{rows[0] + 1} to {rows[-1] + 1}"


def late_clients(run: Run) -> np.ndarray:
    """Each client's accuracy in percent, mean over the late evaluations of all: `[clients]`."""
    *_, (_, evaluations) = stretches(run)
    return everyone(run)[evaluations].mean(axis=0)


def change(run: Run) -> np.ndarray:
    """What the last part of a run changed in each client's accuracy, in points: `[clients]`."""
    *_, (_, before), (_, late) = stretches(run)
    if not (len(before) and len(late)):
        return np.full(everyone(run).shape[1], np.nan)
    return everyone(run)[late].mean(axis=0) - everyone(run)[before].mean(axis=0)


def standard_error(values: np.ndarray) -> float:
    """That of the mean of what is finite if clients, the last axis, are the units; NaN for one."""
    values = np.atleast_2d(values)
    known = np.isfinite(values)
    units = known.any(axis=0).sum()
    if units < 2:
        return np.nan
    of_clients = np.where(known, values - values[known].mean(), 0.0).sum(axis=0)
    return float(np.sqrt(units / (units - 1) * (of_clients**2).sum()) / known.sum())


def with_error(values: np.ndarray) -> str:
    """Mean of what is finite, and its standard error; one client has a mean only."""
    if not np.isfinite(values).any():
        return "–"
    error = standard_error(values)
    return (
        f"{values[np.isfinite(values)].mean():+.2f}{'' if np.isnan(error) else f' ± {error:.2f}'}"
    )


def paired_p(differences: np.ndarray | Sequence[float]) -> str:
    """p of a paired t-test, in double precision: the single one of accuracies ends at 1e-45."""
    return f"{stats.ttest_1samp(np.asarray(differences, np.float64), 0.0)[1]:.2g}"
