"""The paper's numbers as data: its tables, the numbers in its text, what it says its figures show.

Values that the paper shows only as curves or bars of a picture are not here: for those there is the
sentence that says what the picture shows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pfedafm_jax.results.records import Record

DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
METHODS = ("standalone", "lg_fedavg", "fd", "fedproto", "fml", "fedkd", "fedapen", "pfedafm")
MUTUAL = ("fml", "fedkd", "fedapen")  # the baselines of pFedAFM's own category, mutual learning
CONTROLS = ("fedper", "fedrep")  # not in the paper: a shared extractor, own headers, nothing else
COLUMNS = {10: 1.0, 50: 0.2, 100: 0.1}  # N: C, the three columns of its tables
TARGET_ACCURACY = {"cifar10": 0.9, "cifar100": 0.5}  # up to which it counts rounds and costs
CLASSES = {"cifar10": 2, "cifar100": 10}  # that a client sees in its tables
ARCHITECTURES = {"homo": ["cnn1"], "hetero": ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"]}
TABLES = {"homo": "Table 2", "hetero": "Table 3"}

MODEL_MEGABYTES = {"cnn1": 10.00, "cnn2": 6.92, "cnn3": 5.04, "cnn4": 3.81, "cnn5": 2.55}
"""Table 1, last row."""

_ = None  # "failure to converge" in the paper

# N = 10: CIFAR-10, CIFAR-100; N = 50: the same; N = 100: the same
_HOMOGENEOUS = {
    "standalone": (96.35, 74.32, 95.25, 62.38, 92.58, 54.93),
    "lg_fedavg": (96.47, 73.43, 94.20, 61.77, 90.25, 46.64),
    "fd": (96.30, _, _, _, _, _),
    "fedproto": (95.83, 72.79, 95.10, 62.55, 91.19, 54.01),
    "fml": (94.83, 70.02, 93.18, 57.56, 87.93, 46.20),
    "fedkd": (94.77, 70.04, 92.93, 57.56, 90.23, 50.99),
    "fedapen": (95.38, 71.48, 93.31, 57.62, 87.97, 46.85),
    "pfedafm": (96.81, 77.70, 96.58, 67.63, 95.67, 62.69),
}
_HETEROGENEOUS = {
    "standalone": (96.53, 72.53, 95.14, 62.71, 91.97, 53.04),
    "lg_fedavg": (96.30, 72.20, 94.83, 60.95, 91.27, 45.83),
    "fd": (96.21, _, _, _, _, _),
    "fedproto": (96.51, 72.59, 95.48, 62.69, 92.49, 53.67),
    "fml": (30.48, 16.84, _, 21.96, _, 15.21),
    "fedkd": (80.20, 53.23, 77.37, 44.27, 73.21, 37.21),
    "fedapen": (_, _, _, _, _, _),
    "pfedafm": (96.76, 77.30, 96.69, 67.95, 95.68, 61.60),
}
CELLS = tuple((column, dataset) for column in COLUMNS for dataset in DATASETS)

ACCURACY: dict[str, dict[str, dict[tuple[int, str], float | None]]] = {
    family: {method: dict(zip(CELLS, values, strict=True)) for method, values in table.items()}
    for family, table in (("homo", _HOMOGENEOUS), ("hetero", _HETEROGENEOUS))
}
"""Tables 2 (`homo`) and 3 (`hetero`): percent, the highest mean accuracy of participants over all
rounds and its grid of settings; None where the paper says "failure to converge"."""

MARGIN_BEST = {
    "homo": (0.34, 3.38, 1.33, 5.08, 3.09, 7.76),
    "hetero": (0.23, 4.71, 1.21, 5.24, 3.19, 7.93),
}
"""pFedAFM minus the best baseline, in the order of `CELLS`."""
MARGIN_MUTUAL = {
    "homo": (1.43, 6.22, 3.27, 10.01, 5.44, 11.70),
    "hetero": (16.56, 24.07, 19.32, 23.68, 22.47, 24.39),
}
"""pFedAFM minus the best baseline of its category."""

BETTER_CLIENTS = {"cifar10": 92.0, "cifar100": 93.0}
"""Percent of clients with a higher accuracy under pFedAFM than under FedProto, N = 100, Table 3."""
SEEN_CLASSES = {"cifar10": (2, 4, 6, 8, 10), "cifar100": (10, 30, 50, 70, 90, 100)}
GAMMAS = (0.1, 0.2, 0.3, 0.4, 0.5)
MIX_LEARNING_RATES = (0.001, 0.01, 0.1, 1.0)
MIX_SEEDS = 3
MIX_MEAN = {"cifar10": 0.0, "cifar100": 0.5}
"""What the mean of two clients' mix vectors comes close to."""


class Cost(NamedTuple):
    """What a run has spent."""

    rounds: int
    floats: int  # both directions, all participants
    flops: int  # all participants


def cost_to(target: float, records: Sequence[Record]) -> Cost | None:
    """What a run had spent when the mean accuracy of a round's participants first reached a target.

    None: it did not.
    """
    floats = flops = 0
    for record in records:
        floats += record.floats_up + record.floats_down
        flops += record.flops
        if record.mean_accuracy is not None and record.mean_accuracy >= target:
            return Cost(record.round, floats, flops)
    return None


def accuracy(family: str, method: str, column: int, dataset: str) -> float | None:
    """A cell of Table 2 or 3 in percent; None: the paper has none.

    >>> accuracy("hetero", "pfedafm", 100, "cifar10")
    95.68
    """
    return ACCURACY[family].get(method, {}).get((column, dataset))


def published(config: dict[str, Any]) -> tuple[str, float | None] | None:
    """The paper's number for a run with these settings, as a share (None: it did not converge).

    None where the paper has no such run. Length, batch size and learning rates are left open: its
    number is the best of a grid of them.

    >>> published({"method": "pfedafm"})
    """
    method, clients = config["method"], config.get("num_clients", 0)
    names = list(config.get("architectures", ()))
    family = next((key for key, value in ARCHITECTURES.items() if value == names), "")
    own = config.get("pfedafm", {}) if method == "pfedafm" else {}
    if (
        (clients, config.get("dataset")) not in ACCURACY.get(family, {}).get(method, {})
        or config["partition"] != "pathological"
        or config["classes_per_client"] != CLASSES[config["dataset"]]
        or config["participation"] != COLUMNS[clients]
        or config["shared_extractor"] != "cnn5"
        or own.get("training", "iterative") != "iterative"
        or own.get("mix_fixed") is not None
        or own.get("mix_scalar")
    ):
        return None
    percent = accuracy(family, method, clients, config["dataset"])
    return TABLES[family], None if percent is None else round(percent / 100, 6)
