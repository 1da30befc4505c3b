"""Names in settings, looked up where all that has one can be seen: data, networks and methods."""

from pfedafm_jax.base.errors import bad, known
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.dataset import Dataset
from pfedafm_jax.data.load import check_data
from pfedafm_jax.methods import find_method
from pfedafm_jax.models.architecture import extractor_names


def check_names(config: Config, dataset: Dataset | None = None) -> Config:
    """Returns `config`, or raises `PfedafmError` for the first setting that cannot work.

    Called by whoever makes an `Experiment`, after plugins have registered what they have. If
    `dataset` is given, its name may be anything, and its classes and channels are checked.
    """
    check_data(config, dataset)
    find_method(config.method)
    names = extractor_names()
    for name in (*config.architectures, config.shared_extractor):
        if name not in names:
            setting = "shared_extractor" if name == config.shared_extractor else "architectures"
            raise bad(setting, name, known(name, names))
    return config
