"""Networks that differ only in width as one architecture: parameters zero-padded to the widest.

A padded unit has zero weights and bias, so its output after ReLU is zero, and so are all
gradients that touch it; its decay and momentum are zero too. A padded network therefore computes
what the narrow one computes, and clients of different widths can be rows of one array.

A Flax module belongs to a family if its class defines

    widest(modules) -> module    a static method: a module at least as wide as all of these
    unfold(params) -> params     optional: gives every width its own axis, if an axis of a parameter
                                 combines several, as after flattening an image
    fold(params) -> params       the inverse of `unfold`
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.models.architecture import Architecture

Tree = Any


class ArchitectureGroup(NamedTuple):
    """The clients that one compiled program trains: of one architecture, or of one family."""

    architecture: Architecture  # that of the clients, or one that all members fit into
    members: tuple[int, ...]  # indices of architectures
    parts: tuple[str, ...] = ()  # the parts of a client's state that are padded


def architecture_groups(
    architectures: Sequence[Architecture], starts: Sequence[Tree]
) -> tuple[ArchitectureGroup, ...]:
    """The groups of these architectures, with families joined.

    Args:
        architectures: those of the clients.
        starts: for each, the initial state of a client, or its shapes.

    Returns:
        One group per family or single architecture. Parts of a state whose shapes differ between
        members must be extractor parameters; otherwise each architecture has its own group.
    """
    groups = []
    for extractor in dict.fromkeys(type(one.extractor) for one in architectures):
        numbers = [i for i, one in enumerate(architectures) if type(one.extractor) is extractor]
        members = [architectures[number] for number in numbers]
        wide = _widest(members)
        parts = _differing(members, [starts[number] for number in numbers]) if wide else None
        if wide is None or parts is None:
            groups += [ArchitectureGroup(architectures[number], (number,)) for number in numbers]
        else:
            groups.append(ArchitectureGroup(wide, tuple(numbers), parts))
    return tuple(groups)


def _widest(members: Sequence[Architecture]) -> Architecture | None:
    extractor, first = type(members[0].extractor), members[0]
    join = getattr(extractor, "widest", None)
    module = join([one.extractor for one in members]) if join and len(members) > 1 else None
    # A wider network would draw other random numbers for its dropout.
    if module is None or any(one.random for one in members):
        return None
    name = "+".join(one.name for one in members)
    sizes = first.image_shape, first.feature_size, first.num_classes, first.dtype
    return Architecture(name, module, first.header, *sizes)


def _shapes(tree: Tree) -> list[tuple]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _differing(members: Sequence[Architecture], starts: Sequence[Tree]) -> tuple[str, ...] | None:
    """Names of parts whose shapes differ; None if one of them is not extractor parameters."""
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


def widen(group: ArchitectureGroup, architecture: Architecture, state: Tree) -> Tree:
    """A client's state, padded to the architecture of its group."""
    return _reshaped(group, architecture, state, wide=True)


def narrow(group: ArchitectureGroup, architecture: Architecture, state: Tree) -> Tree:
    """The inverse of `widen`: a client's state without padding."""
    return _reshaped(group, architecture, state, wide=False)


def _reshaped(
    group: ArchitectureGroup, architecture: Architecture, state: Tree, wide: bool
) -> Tree:
    source, target = architecture, group.architecture
    if not wide:
        source, target = target, source

    def call(one: Architecture, name: str, params: Tree) -> Tree:  # `fold` or `unfold`, if defined
        return getattr(one.extractor, name, lambda params: params)(params)

    def fit(leaf: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if not wide:
            return lax.slice(leaf, [0] * leaf.ndim, shape.shape)
        return jnp.pad(leaf, [(0, b - a) for a, b in zip(leaf.shape, shape.shape, strict=True)])

    def part(params: Tree) -> Tree:
        shapes = jax.eval_shape(
            lambda key: call(target, "unfold", target.init_extractor(key)), jax.random.key(0)
        )
        return call(target, "fold", jax.tree.map(fit, call(source, "unfold", params), shapes))

    return {name: part(one) if name in group.parts else one for name, one in state.items()}
