"""Architectures of one family as one: parameters zero-padded to those of a member that holds all.

A padded unit has weights and bias of zero, so its output after ReLU is zero, and so are all
gradients that touch it; decay and momentum of zero are zero. Padded networks therefore compute what
the narrow ones compute, and clients of different widths can be rows of one array.

A Flax module belongs to a family if its class says so:

    widest(modules) -> module    one that holds all of these, a static method
    unfold(params) -> params     with an axis of its own for every width; needed where an axis of a
    fold(params) -> params       parameter is made of several, as after flattening an image; back
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.models import Architecture, measured

Tree = Any


class Kind(NamedTuple):
    """What one compiled program trains: clients of one architecture, or of one family of them."""

    architecture: Architecture  # its own, or one that holds all members
    members: tuple[int, ...]  # numbers of architectures
    parts: tuple[str, ...] = ()  # of a client's state that are padded


def kinds_of(architectures: Sequence[Architecture], starts: Sequence[Tree]) -> tuple[Kind, ...]:
    """The programs for these architectures, families joined; `starts` has a client's state each.

    Parts of a state that differ between members must be parameters of the extractor; where they are
    something else, every architecture has its own program.
    """
    kinds = []
    for extractor in dict.fromkeys(type(one.extractor) for one in architectures):
        numbers = [i for i, one in enumerate(architectures) if type(one.extractor) is extractor]
        members = [architectures[number] for number in numbers]
        wide = _widest(members)
        parts = _differing(members, [starts[number] for number in numbers]) if wide else None
        if wide is None or parts is None:
            kinds += [Kind(architectures[number], (number,)) for number in numbers]
        else:
            kinds.append(Kind(wide, tuple(numbers), parts))
    return tuple(kinds)


def _widest(members: Sequence[Architecture]) -> Architecture | None:
    extractor, first = type(members[0].extractor), members[0]
    join = getattr(extractor, "widest", None)
    module = join([one.extractor for one in members]) if join and len(members) > 1 else None
    if module is None:
        return None
    name = "+".join(one.name for one in members)
    sizes = first.image_shape, first.feature_size, first.num_classes
    return measured(name, module, first.header, *sizes)


def _shapes(tree: Tree) -> list[tuple]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _differing(members: Sequence[Architecture], starts: Sequence[Tree]) -> tuple[str, ...] | None:
    """Names of parts whose shapes differ; None where one is not an extractor's parameters."""
    own = [_shapes(jax.eval_shape(one.init_extractor, jax.random.key(0))) for one in members]
    names = tuple(
        name
        for name in starts[0]
        if any(_shapes(start[name]) != _shapes(starts[0][name]) for start in starts)
    )
    fits = all(
        _shapes(start[name]) == shapes
        for name in names
        for start, shapes in zip(starts, own, strict=True)
    )
    return names if fits else None


def widen(kind: Kind, architecture: Architecture, state: Tree) -> Tree:
    """A client's state as the program of its kind has it."""
    return _reshaped(kind, architecture, state, wide=True)


def narrow(kind: Kind, architecture: Architecture, state: Tree) -> Tree:
    """A client's own state again."""
    return _reshaped(kind, architecture, state, wide=False)


def _reshaped(kind: Kind, architecture: Architecture, state: Tree, wide: bool) -> Tree:
    source, target = architecture, kind.architecture
    if not wide:
        source, target = target, source

    def through(one: Architecture, name: str, params: Tree) -> Tree:
        return getattr(one.extractor, name, lambda params: params)(params)

    def fit(leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if not wide:
            return lax.slice(leaf, [0] * leaf.ndim, shape.shape)
        return jnp.pad(leaf, [(0, b - a) for a, b in zip(leaf.shape, shape.shape, strict=True)])

    def part(params: Tree) -> Tree:
        shapes = jax.eval_shape(
            lambda key: through(target, "unfold", target.init_extractor(key)), jax.random.key(0)
        )
        return through(target, "fold", jax.tree.map(fit, through(source, "unfold", params), shapes))

    return {name: part(one) if name in kind.parts else one for name, one in state.items()}
