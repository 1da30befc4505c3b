"""Trees of arrays: dataclasses as pytrees, sizes, leaves by their path.

Of a dataclass, numbers are leaves and everything else is static: a program compiled for one
learning rate therefore runs with any other.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel

from pfedafm_jax.base.errors import START_OVER, PfedafmError


def register(kind: type, numbers: Callable[[type], Iterable[str]]) -> None:
    """Registers a dataclass, or a pydantic model, as a pytree.

    Args:
        kind: the class.
        numbers: given the class, returns the names of the fields that are leaves or trees of
            leaves; called at each flattening, since a class registers before its fields are known.
            A field that is None has no leaf: whether a number is given is part of the structure.
    """

    def flatten(one: Any) -> tuple[tuple, tuple]:
        names = tuple(numbers(kind))
        others = (name for name in field_names(kind) if name not in names)
        rest = tuple((name, getattr(one, name)) for name in others)
        return tuple(getattr(one, name) for name in names), (names, rest)

    def unflatten(structure: tuple, leaves: Iterable[Any]) -> Any:
        names, rest = structure
        values = dict(rest) | dict(zip(names, leaves, strict=True))
        # Without checks: leaves may be tracers.
        if issubclass(kind, BaseModel):
            return kind.model_construct(**values)
        one = object.__new__(kind)
        vars(one).update(values)
        return one

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)


def field_names(kind: type) -> list[str]:
    """The fields of a dataclass or of a pydantic model."""
    if issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return [field.name for field in dataclasses.fields(kind)]


def as_numbers(tree: Any) -> Any:
    """Settings as programs take them: seeds as uint32, all other numbers as float32."""

    def number(value: Any) -> np.ndarray:
        value = np.asarray(value)
        return np.asarray(value, np.uint32 if value.dtype.kind == "u" else np.float32)

    return jax.tree.map(number, tree)


def num_values(tree: Any) -> int:
    """How many numbers the arrays, or shapes, of a tree have."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """How many bytes they take."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def path_of(path: tuple) -> str:
    """A path as text, `header.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path."""
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


Tree = Any


Leaves = dict[str, np.ndarray]  # by their path, `header.kernel`


def named(tree: Tree) -> Leaves:
    """Copies of the leaves by path (the tree's own may be changed or donated later)."""
    return {name: np.array(leaf) for name, leaf in by_path(tree).items()}


def fitted(template: Tree, leaves: Leaves) -> Tree:
    """A tree like `template` from leaves by path; raises if a leaf does not fit."""
    expected = {name: (np.shape(leaf), leaf.dtype) for name, leaf in by_path(template).items()}
    if {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()} != expected:
        raise PfedafmError(f"the weights were written for other networks; {START_OVER}")
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in expected])
