"""Tables of runs: one row per run, or mean and deviation over seeds; formatted numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pfedafm_jax.results.run import Run, differing
from pfedafm_jax.results.select import grouped, labels

COLUMNS = {
    "best_mean_accuracy": "best",
    "last_ten_mean_accuracy": "last ten",
    "final_all_clients_accuracy": "all clients",
    "spread_over_clients": "spread",
    "floats_up_per_client": "floats up",
    "floats_down_per_client": "floats down",
    "flops_per_client_round": "FLOPs",
    "seconds": "seconds",
}
"""Columns of a comparison: name in `summary.json` → heading. Accuracies and spread are fractions;
floats and FLOPs are per client and round."""


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run, by its label: settings that differ, `finished`, the summary's numbers."""
    names = [name for name in differing(runs) if name not in ("method", "dataset")]
    rows = [
        {name: run.settings.get(name) for name in names}
        | {"finished": run.finished, **run.summary.as_dict()}
        for run in runs
    ]
    frame = pd.DataFrame(rows, index=pd.Index(labels(runs), name="run"))
    return frame.drop(columns=["config", "versions", "format"])


def over_seeds(runs: Sequence[Run], by: Sequence[str] = ("method",)) -> pd.DataFrame:
    """Mean and deviation over the runs that agree in `by`, one row per group, see `means`."""
    return means(grouped(runs, by)).rename_axis(", ".join(by))


def means(sets: Mapping[str, Sequence[Run]]) -> pd.DataFrame:
    """Mean and deviation over the runs of each set, one row per set.

    Columns are pairs: `("best_mean_accuracy", "mean")` and `(…, "deviation")` (NaN for one run) for
    all of `COLUMNS`, `("runs", "count")`, and `("diverged", "round")`, the first with NaN.
    """
    names = [*COLUMNS, "diverged_at_round"]
    rows = [
        {"group": label, **{name: getattr(run.summary, name) for name in names}}
        for label, found in sets.items()
        for run in found
    ]
    groups = pd.DataFrame(rows).astype(dict.fromkeys(names, float)).groupby("group", sort=False)
    frame: Any = groups[list(COLUMNS)].agg(["mean", "std"])
    frame = frame.rename(columns={"std": "deviation"})
    frame["runs", "count"] = groups.size()
    frame["diverged", "round"] = groups["diverged_at_round"].min()
    return frame


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and deviation over seeds; the deviation of one value, and the mean of none, is None."""
    known = [value for value in values if value is not None]
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return (float(np.mean(known)) if known else None), deviation


def cells(frame: pd.DataFrame) -> list[list[str]]:
    """Formats `means` for printing: accuracies in percent, floats and FLOPs with a unit."""

    def cell(name: str, value: float, deviation: float) -> str:
        if name.endswith(("accuracy", "over_clients")):
            return percent(value, deviation)
        return "–" if np.isnan(value) else f"{value:.0f}" if name == "seconds" else human(value)

    rows = []
    for label, row in frame.to_dict("index").items():
        first = row["diverged", "round"]
        note = "" if np.isnan(first) else f" (diverged at round {first:.0f})"
        numbers = (cell(name, row[name, "mean"], row[name, "deviation"]) for name in COLUMNS)
        rows.append([f"{label}{note}", *numbers])
    return rows


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with numbers right-aligned.

    >>> print(markdown(["method", "best"], [["FD", "91.68"]]), end="")
    | method | best |
    |---|---:|
    | FD | 91.68 |
    """
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    escaped = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in escaped]) + "\n"


def percent(value: float | None, deviation: float | None = None) -> str:
    """A fraction in percent; a dash for None and NaN.

    >>> percent(0.9168), percent(0.9168, 0.0041), percent(None)
    ('91.68', '91.68 ± 0.41', '–')
    """
    if value is None or np.isnan(value):
        return "–"
    wide = "" if deviation is None or np.isnan(deviation) else f" ± {100 * deviation:.2f}"
    return f"{100 * value:.2f}{wide}"


def human(number: float) -> str:
    """665048 → `665 k`; 9.4e11 → `940 G`.

    >>> human(665048), human(9.4e11), human(12)
    ('665 k', '940 G', '12')
    """
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            value = number / 10**power
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{number:.3g}"
