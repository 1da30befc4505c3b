"""pFedAFM and the methods it is compared with: federated learning with different models, vectorized
in JAX."""

# ruff: noqa: E402 (what libraries say while they are imported is set before)
import logging
import os

# XLA's own lines ("Very slow compile?") would run through the progress bar; its errors are raised.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a cache that is read-only

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.base.version import VERSION
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

__version__ = VERSION

__all__ = [
    "Config",
    "Dataset",
    "Devices",
    "Experiment",
    "Partition",
    "PfedafmError",
    "Record",
    "Run",
    "Summary",
    "TrainedClient",
    "TrainedRun",
    "compare",
    "dataset_from_arrays",
    "describe",
    "export_client",
    "load_client",
    "load_data",
    "load_dataset",
    "load_run",
    "make_partition",
    "method_names",
    "read_run",
    "read_runs",
    "register_extractor",
    "register_method",
    "run",
    "setup_devices",
    "split",
    "token_ids",
    "updated",
    "with_preset",
]
