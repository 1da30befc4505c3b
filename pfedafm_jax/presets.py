"""Named sets of settings that override a configuration: `presets.toml`, and the paper's length."""

from functools import cache
from pathlib import Path
from typing import Any

from pfedafm_jax.config import Config, read_toml, updated
from pfedafm_jax.settings import bad, known

PAPER_COLUMNS = {10: 1.0, 50: 0.2, 100: 0.1}  # N: C, the three columns of the paper's tables


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


def paper_scale(config: Config, num_clients: int = 100) -> Config:
    """The paper's own length, T = 500 and E = 10 at a learning rate of 0.01, at one of its N."""
    if num_clients not in PAPER_COLUMNS:
        raise bad("paper", num_clients, "10, 50 or 100 clients (with C = 100 %, 20 %, 10 %)")
    share = {"num_clients": num_clients, "participation": PAPER_COLUMNS[num_clients]}
    return updated(config, {"rounds": 500, "local_epochs": 10, "learning_rate": 0.01, **share})
