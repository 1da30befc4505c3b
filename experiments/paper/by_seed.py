"""Methods that were run with several seeds: levels, and pFedAFM's differences to them.

Each seed has a split of its own, so that clients are paired within a seed that both methods have.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy import stats  # comes with JAX, which needs it

from paper.by_client import everyone, late_clients, stretches, visits, with_error
from pfedafm_jax.results import Run
from pfedafm_jax.tables import markdown, mean_and_deviation, percent

OURS = "pfedafm"


def _by_method(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """The runs of each method that has several seeds, by seed."""
    found: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        found[run.config["method"]][run.config["seed"]] = run
    return {method: dict(sorted(own.items())) for method, own in found.items() if len(own) > 1}


def levels(runs: Sequence[Run]) -> str:
    """Mean ± deviation over seeds of the accuracies of the first table."""
    rows = []
    for own in _by_method(runs).values():
        summaries = [run.summary for run in own.values()]
        names = ("best_mean_accuracy", "last_ten_mean_accuracy", "final_all_clients_accuracy")
        known = [[getattr(one, name) for one in summaries] for name in names]
        known.append([late_clients(run).mean() / 100 for run in own.values()])
        cells = [percent(*mean_and_deviation(values)) for values in known]
        seeds = ", ".join(map(str, own))
        rows.append([next(iter(own.values())).title, seeds, *cells])
    heads = ["method", "seeds", "best round", "last ten", "all clients", "late, all clients"]
    return markdown(heads, rows) if rows else ""


def _over(values: Sequence[np.ndarray]) -> str:
    """Mean ± deviation over seeds of the means over what is finite."""
    means = [np.nanmean(one) for one in values]
    return f"{np.mean(means):+.2f} ± {np.std(means, ddof=1):.2f}"


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
        cells += [f"{stats.ttest_1samp(np.concatenate(late), 0.0)[1]:.2g}", _over(seen)]
        rows.append([f"pFedAFM − {next(iter(own.values())).title}", *cells])
    heads = ["points", *(f"seed {seed}, end" for seed in ours)]
    heads += ["all clients, end", "all clients, late", "p (paired t, late)", "participants, late"]
    return markdown(heads, rows) if rows else ""
