"""Methods that were run with several seeds: levels, and pFedAFM's differences to them.

Each seed has a split of its own, so that clients are paired within a seed that both methods have.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from paper.by_client import (
    best_round,
    change,
    everyone,
    late_clients,
    paired_p,
    span,
    stretches,
    visits,
    with_error,
)
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import markdown, mean_and_deviation, percent

OURS = "pfedafm"


def _by_method(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """The runs of each method that has several seeds, by seed."""
    found: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        found[run.config["method"]][run.config["seed"]] = run
    return {method: dict(sorted(own.items())) for method, own in found.items() if len(own) > 1}


def _over(values: Sequence[np.ndarray | float]) -> str:
    """Mean ± deviation over seeds of the means over what is finite."""
    if not all(np.isfinite(one).any() for one in values):
        return "–"
    means = [np.nanmean(one) for one in values]
    return f"{np.mean(means):+.2f} ± {np.std(means, ddof=1):.2f}"


def levels(runs: Sequence[Run]) -> str:
    """The accuracies of the first table for every seed, and their mean ± deviation over seeds."""
    rows = []
    for own in _by_method(runs).values():
        known = []
        for seed, run in own.items():
            one = run.summary
            values = one.best_mean_accuracy, one.last_ten_mean_accuracy
            known.append((*values, one.final_all_clients_accuracy, late_clients(run).mean() / 100))
            rows.append([run.title, f"{seed}", *map(percent, known[-1]), with_error(change(run))])
        cells = [percent(*mean_and_deviation(values)) for values in zip(*known, strict=True)]
        changes = [change(run) for run in own.values()]
        rows.append([rows[-1][0], "mean ± deviation", *cells, _over(changes)])
    heads = ["method", "seed", "best round", "last ten", "all clients", "late, all clients"]
    return markdown([*heads, "change in the last part"], rows) if rows else ""


def differences(runs: Sequence[Run]) -> str:
    """pFedAFM minus each other method: at the end by seed, then over the seeds that both have."""
    several = _by_method(runs)
    ours = several.pop(OURS, {})
    rows = []
    for own in several.values():
        pairs = {seed: (ours[seed], run) for seed, run in own.items() if seed in ours}
        if len(pairs) < 2:
            continue
        end = {seed: (everyone(a) - everyone(b))[-1] for seed, (a, b) in pairs.items()}
        late = [late_clients(a) - late_clients(b) for a, b in pairs.values()]
        *_, (rounds, _) = stretches(next(iter(ours.values())))
        seen = [(visits(a) - visits(b))[rounds] for a, b in pairs.values()]
        cells = [with_error(end[seed]) if seed in end else "–" for seed in ours]
        cells += [_over(list(end.values())), _over(late)]
        units = np.concatenate(late), [one.mean() for one in late]
        cells += [paired_p(unit) for unit in units]
        best = [best_round(a) - best_round(b) for a, b in pairs.values()]
        cells += [_over(seen), _over(best)]
        rows.append([f"pFedAFM − {next(iter(own.values())).title}", *cells])
    heads = ["points", *(f"seed {seed}, end" for seed in ours)]
    heads += ["all clients, end", "all clients, late", "p, units are clients", "p, units are seeds"]
    heads += ["participants, late", "best round"]
    return markdown(heads, rows) if rows else ""


def by_part(runs: Sequence[Run]) -> str:
    """pFedAFM minus each other method over all clients, by part of the run, a row for each seed."""
    several = _by_method(runs)
    ours = several.pop(OURS, {})
    parts = [span(part) for part, _ in stretches(next(iter(ours.values())))] if ours else []
    rows = []
    for own in several.values():
        for seed in sorted(own.keys() & ours.keys()):
            gap = everyone(ours[seed]) - everyone(own[seed])
            cells = [with_error(gap[evaluations]) for _, evaluations in stretches(own[seed])]
            rows.append([f"pFedAFM − {own[seed].title}", f"{seed}", *cells])
    return markdown(["all clients, points", "seed", *parts], rows) if rows else ""


def mixing(runs: Sequence[Run]) -> str:
    """pFedAFM's mixed prediction minus its small one over all clients, by part of the run and seed."""
    ours = _by_method(runs).get(OURS, {})
    gains = [everyone(run) - everyone(run, "small") for run in ours.values()]
    rows = []
    for part, evaluations in stretches(next(iter(ours.values()))) if ours else ():
        of_seeds = [gain[evaluations] for gain in gains]
        rows.append([span(part), *map(with_error, of_seeds), _over(of_seeds)])
    heads = ["all clients, mixed − small, points", *(f"seed {seed}" for seed in ours), "all seeds"]
    return markdown(heads, rows) if rows else ""
