"""The paper's number for a run's clients, classes and networks, where it has one."""

from pfedafm_jax.config import PAPER_COLUMNS, Config
from pfedafm_jax.reproduce.paper import ACCURACY

CLASSES = {"cifar10": 2, "cifar100": 10}  # classes a client sees in its tables
FAMILIES = {("cnn1",): "homo", ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5"): "hetero"}
TABLES = {"homo": "Table 2", "hetero": "Table 3"}


def paper_score(config: Config) -> tuple[str, float | None] | None:
    """The table and its accuracy (a share; None: "failure to converge") for these settings; None: it has no such run.

    Length, batch size and learning rates are left open: the paper's number is the best of a grid of them.

    >>> paper_score(Config())
    ('Table 3', 0.9568)
    """
    family = FAMILIES.get(config.architectures)
    cell = (config.num_clients, config.dataset)
    if (
        family is None
        or config.partition != "pathological"
        or CLASSES.get(config.dataset) != config.classes_per_client
        or PAPER_COLUMNS.get(config.num_clients) != config.participation
        or config.shared_extractor != "cnn5"
        or config.pfedafm.training != "iterative"
        or config.pfedafm.mix_fixed is not None
        or config.pfedafm.mix_scalar
        or cell not in ACCURACY[family].get(config.method, {})
    ):
        return None
    percent = ACCURACY[family][config.method][cell]
    return TABLES[family], None if percent is None else round(percent / 100, 6)
