"""Pretrained initial weights: from a tree or a safetensors file."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load

from pfedafm_jax.base.errors import PfedafmError, naming
from pfedafm_jax.base.files import read_bytes
from pfedafm_jax.base.trees import by_path
from pfedafm_jax.models.batch_stats import STATISTICS

Tree = Any
_KEPT: dict[str, dict[str, np.ndarray]] = {}  # by digest


def keep(source: str | Path | Tree) -> str:
    """Reads weights and keeps them for the process.

    Args:
        source: a `.safetensors` file with names like `Dense_0.kernel` or `params/Dense_0/kernel`,
            statistics under `batch_stats`; or a tree of them; or an NNX module or its state.

    Returns:
        Their digest, under which they are kept.
    """
    if isinstance(source, str | Path):
        with naming(f"pretrained {str(source)!r} is no file of safetensors"):
            leaves = load(read_bytes(Path(source)))
    else:
        leaves = by_path(_plain(source))
    named = {name.replace("/", ".").removeprefix("params."): leaf for name, leaf in leaves.items()}
    arrays = {name: np.asarray(named[name]) for name in sorted(named)}
    content = b"".join(
        f"{n} {a.dtype} {a.shape} ".encode() + a.tobytes() for n, a in arrays.items()
    )
    digest = hashlib.sha256(content).hexdigest()
    _KEPT[digest] = arrays
    return digest


def _plain(source: Tree) -> Tree:
    """An NNX module or its state as a tree like those of Linen."""
    if not isinstance(source, nnx.Module | nnx.State):
        return source
    parts: Any = nnx.split_state if isinstance(source, nnx.State) else nnx.state
    params, statistics, _ = parts(source, nnx.Param, nnx.BatchStat, ...)
    return {"params": nnx.to_pure_dict(params), STATISTICS: nnx.to_pure_dict(statistics)}


def placed(digest: str, variables: Tree, inside: str | None = None) -> Tree:
    """A module's variables by collection, or those of a part of it, replaced by the weights with
    this digest."""
    if inside is not None:
        own = placed(digest, {kind: part.get(inside, {}) for kind, part in variables.items()})
        return {kind: {**part, inside: own[kind]} for kind, part in variables.items()}
    given = _KEPT[digest]
    wanted = {name.removeprefix("params."): leaf for name, leaf in by_path(variables).items()}
    problems = [f"lack {name}" for name in sorted(wanted.keys() - given.keys())]
    problems += [f"have {name}, which it lacks" for name in sorted(given.keys() - wanted.keys())]
    problems += [
        f"have {name} {list(given[name].shape)} instead of {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in given and given[name].shape != leaf.shape
    ]
    if problems:
        more = " …" if len(problems) > 3 else ""
        raise PfedafmError(f"cannot start from these weights: they {', '.join(problems[:3])}{more}")
    leaves = [jnp.asarray(given[name], leaf.dtype) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)
