"""Settings as arguments of compiled programs: numbers are data, all else is structure.

A program that is compiled for one learning rate runs with any other.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax


def register(kind: type, numbers: Callable[[type], Iterable[str]]) -> None:
    """Makes a dataclass a pytree.

    Args:
        numbers: the names of its fields that are leaves, or trees of leaves; asked when one is
            needed. A field that is None has no leaf, so that a number that is not given is
            structure.
    """

    def flatten(one: Any) -> tuple[tuple, tuple]:
        names = tuple(numbers(kind))
        others = (f.name for f in dataclasses.fields(kind) if f.name not in names)
        rest = tuple((name, getattr(one, name)) for name in others)
        return tuple(getattr(one, name) for name in names), (names, rest)

    def unflatten(structure: tuple, leaves: Iterable[Any]) -> Any:
        names, rest = structure
        one = object.__new__(kind)  # nothing is checked again: leaves may be tracers
        vars(one).update(dict(rest), **dict(zip(names, leaves, strict=True)))
        return one

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)
