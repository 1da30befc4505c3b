"""Runs of several methods as one table: mean and standard deviation over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pfedafm_jax.methods import find_method

COLUMNS = {
    "best": "best_mean_accuracy",
    "last": "last_mean_accuracy",
    "all clients": "final_all_clients_accuracy",
    "spread": "spread_over_clients",
    "floats up": "floats_up_per_client",
    "floats down": "floats_down_per_client",
    "FLOPs": "flops_per_client_round",
    "seconds": "seconds",
}
"""Column → key of a run's summary. Accuracies and spread are shares; floats and FLOPs are per client and round."""


@dataclass(frozen=True)
class Run:
    """One run of a comparison."""

    method: str
    seed: int
    summary: dict[str, Any]
    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods; `rows` is the table over seeds, `per_run` one for pandas, `curves` what plots draw."""

    runs: list[Run]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row a method, see `collect`."""
        return collect([(run.method, run.summary) for run in self.runs])

    def per_run(self) -> list[dict[str, Any]]:
        """One row a run, numbers only: `pd.DataFrame(comparison.per_run())`."""
        return [
            {"method": run.method, "seed": run.seed, **{name: run.summary[key] for name, key in COLUMNS.items()}}
            for run in self.runs
        ]

    def curves(self) -> dict[str, list[list[dict[str, Any]]]]:
        """The records of each method's runs, by its title: `plots.compare_records(comparison.curves())`."""
        found: dict[str, list[list[dict[str, Any]]]] = {}
        for run in self.runs:
            found.setdefault(find_method(run.method).title, []).append(run.records)
        return found


def collect(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows, one a method: each column as `{"mean", "deviation"}` over the method's runs, and where it diverged."""
    rows = []
    for name in dict.fromkeys(name for name, _ in runs):
        summaries = [summary for other, summary in runs if other == name]
        row: dict[str, Any] = {"method": find_method(name).title, "runs": len(summaries)}
        for column, key in COLUMNS.items():
            values = [summary[key] for summary in summaries if summary[key] is not None]
            row[column] = (
                {
                    "mean": float(np.mean(values)),
                    "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else None,
                }
                if values
                else None
            )
        diverged = [summary["diverged_at_round"] for summary in summaries if summary["diverged_at_round"] is not None]
        row["diverged"] = min(diverged) if diverged else None
        rows.append(row)
    return rows


def cell(column: str, value: dict[str, float] | None) -> str:
    """A number for people: accuracies in percent, floats and FLOPs with a unit."""
    if value is None:
        return "–"
    mean, deviation = value["mean"], value["deviation"]
    if column in ("best", "last", "all clients", "spread"):
        return f"{100 * mean:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")
    if column == "seconds":
        return f"{mean:.0f}"
    return human(mean)


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


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = ["| method | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        name = row["method"] + ("" if row["diverged"] is None else f" (diverged at round {row['diverged']})")
        lines.append(f"| {name} | " + " | ".join(cell(column, row[column]) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"
