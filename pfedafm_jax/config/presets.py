"""Named sets of settings that are laid over a configuration: `presets.toml`."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pfedafm_jax.base.errors import bad, known
from pfedafm_jax.config.config import Config, read_toml, updated


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The settings of every preset, by its name."""
    return read_toml(Path(__file__).with_suffix(".toml"))


def with_preset(config: Config, preset: str) -> Config:
    """`config` with a preset laid over it.

    >>> with_preset(Config(), "authors_code").method
    'pfedafm_released'
    """
    return updated(config, preset_settings(preset, config.dataset, config.architectures))


def preset_settings(preset: str, dataset: str, architectures: Sequence[str]) -> dict[str, Any]:
    """The settings of a preset, as a file has them.

    Args:
        preset: its name.
        dataset, architectures: of the settings that it is laid over; the released scripts differ
            between datasets and between one and several architectures.
    """
    if preset not in presets():
        raise bad("preset", preset, known(preset, presets()))
    settings = presets()[preset]
    if preset != "authors_code":
        return settings
    has_one_architecture = len(architectures) == 1
    return {
        **settings,
        "normalisation": "imagenet" if dataset == "cifar10" else "dataset",
        "shared_extractor": "cnn1" if has_one_architecture else "cnn5",
        "pfedafm_released": {"mix_learning_rate": 0.1 if has_one_architecture else 0.01},
    }
