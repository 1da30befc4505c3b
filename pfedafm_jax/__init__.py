"""pFedAFM and the methods it is compared with: federated learning with different models, vectorized
in JAX."""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from pfedafm_jax.base.version import VERSION

# What libraries say while they are imported is set before. XLA's own lines ("Very slow compile?")
# would run through the progress bar; its errors are raised.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a cache that is read-only

__version__ = VERSION

if TYPE_CHECKING:
    from pfedafm_jax.base.errors import PfedafmError
    from pfedafm_jax.config.config import Config, updated
    from pfedafm_jax.config.presets import with_preset
    from pfedafm_jax.data import (
        Dataset,
        Partition,
        dataset_from_arrays,
        load_dataset,
        make_partition,
        token_ids,
    )
    from pfedafm_jax.data.load import load_data, split
    from pfedafm_jax.engine import Devices, setup_devices
    from pfedafm_jax.inference.client import TrainedClient
    from pfedafm_jax.inference.export import export_client, load_client
    from pfedafm_jax.inference.opened import TrainedRun, load_run
    from pfedafm_jax.methods import method_names, register_method
    from pfedafm_jax.models.architecture import describe, register_extractor
    from pfedafm_jax.results.records import Record, Summary
    from pfedafm_jax.results.run import Run, read_run, read_runs
    from pfedafm_jax.runs.drive import compare, run
    from pfedafm_jax.runs.experiment import Experiment

# Every public name and its module. A module is imported when one of its names is first used, so
# that the help of the command line does not wait for JAX.
_MODULES = {
    "Config": "config.config",
    "Dataset": "data",
    "Devices": "engine",
    "Experiment": "runs.experiment",
    "Partition": "data",
    "PfedafmError": "base.errors",
    "Record": "results.records",
    "Run": "results.run",
    "Summary": "results.records",
    "TrainedClient": "inference.client",
    "TrainedRun": "inference.opened",
    "compare": "runs.drive",
    "dataset_from_arrays": "data",
    "describe": "models.architecture",
    "export_client": "inference.export",
    "load_client": "inference.export",
    "load_data": "data.load",
    "load_dataset": "data",
    "load_run": "inference.opened",
    "make_partition": "data",
    "method_names": "methods",
    "read_run": "results.run",
    "read_runs": "results.run",
    "register_extractor": "models.architecture",
    "register_method": "methods",
    "run": "runs.drive",
    "setup_devices": "engine",
    "split": "data.load",
    "token_ids": "data",
    "updated": "config.config",
    "with_preset": "config.presets",
}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # asked for once only
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
