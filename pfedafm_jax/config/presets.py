"""Named sets of settings that override a configuration: `presets.toml`."""

from functools import cache
from pathlib import Path
from typing import Any

from pfedafm_jax.base.errors import bad, known
from pfedafm_jax.config.config import Config, read_toml, updated


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The presets: name → settings."""
    return read_toml(Path(__file__).with_suffix(".toml"))


def with_preset(config: Config, preset: str) -> Config:
    """`config` with a preset applied.

    >>> with_preset(Config(), "authors_code").method
    'pfedafm_released'
    """
    if preset not in presets():
        raise bad("preset", preset, known(preset, presets()))
    new = updated(config, presets()[preset])
    if preset != "authors_code":
        return new
    # The released scripts differ between datasets and between one and several architectures.
    alone = len(config.architectures) == 1
    own = {
        "normalisation": "imagenet" if config.dataset == "cifar10" else "dataset",
        "shared_extractor": "cnn1" if alone else "cnn5",
        "pfedafm_released": {"mix_learning_rate": 0.1 if alone else 0.01},
    }
    return updated(new, own)
