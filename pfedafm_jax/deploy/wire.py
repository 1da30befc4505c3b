"""What travels: a head, which is JSON, and a body, which is the bytes of a tree's arrays.

Both sides know the shapes, so a body has no other content and needs no format: leaves one after
another, in the order of `jax.tree`, as they lie in memory, numbers in little-endian order.
"""

from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.trees import num_bytes

Tree = Any
Head = dict[str, Any]


def pack(tree: Tree) -> bytes:
    """The leaves of a tree as one piece.

    >>> pack({"b": np.float32([1]), "a": np.uint8([7, 8])})
    b'\\x07\\x08\\x00\\x00\\x80?'
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return b"".join(leaf.astype(leaf.dtype.newbyteorder("<")).tobytes() for leaf in leaves)


def unpack(template: Tree, body: bytes) -> Tree:
    """`pack` undone, for a tree of these shapes; `ValueError` where it is of another size, or has a
    float that is not finite.

    >>> unpack({"a": np.zeros(2, np.uint8), "b": np.zeros(1, np.float32)}, b"\\7\\x08\\0\\0\\x80?")
    {'a': array([7, 8], dtype=uint8), 'b': array([1.], dtype=float32)}
    """
    if len(body) != num_bytes(template):
        raise ValueError(f"{len(body)} bytes of weights instead of {num_bytes(template)}")
    leaves, structure = jax.tree.flatten(template)
    found, start = [], 0
    for leaf in leaves:
        dtype, count = np.dtype(leaf.dtype), int(np.prod(leaf.shape))
        part = np.frombuffer(body, dtype.newbyteorder("<"), count, start).astype(dtype)
        if dtype.kind == "f" and not np.isfinite(part).all():
            raise ValueError("weights that are not finite")
        found.append(part.reshape(leaf.shape))
        start += count * dtype.itemsize
    return jax.tree.unflatten(structure, found)
