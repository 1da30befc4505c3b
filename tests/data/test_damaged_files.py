"""Damaged files at random: each is used or refused, none ends in a traceback."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.data import Partition, load_dataset


@st.composite
def damages(draw):
    """A function that changes bytes."""
    kind = draw(st.sampled_from(["flip", "cut", "insert"]))
    at, bit = draw(st.floats(0, 1)), draw(st.integers(0, 7))

    def damaged(content: bytes) -> bytes:
        index = min(int(at * len(content)), len(content) - 1)
        before, after = content[:index], content[index:]
        if kind == "flip":
            return before + bytes([after[0] ^ (1 << bit)]) + after[1:]
        return before + (after[1 + bit :] if kind == "cut" else b"\x80" * (bit + 1) + after)

    return damaged


@given(damaged=damages())
@settings(max_examples=80, deadline=None)
def test_a_damaged_split_file_is_refused_or_harmless(damaged, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged-partition.npz"
    rows = tuple(np.arange(3 * client, 3 * client + 3, dtype=np.int32) for client in range(4))
    whole = Partition(rows, rows, tuple(row[:0] for row in rows))
    whole.save(path)
    path.write_bytes(damaged(path.read_bytes()))
    try:
        read = Partition.load(path)
    except PfedafmError as error:
        assert str(path) in str(error)
    else:
        assert len(read.train) == len(read.test) == len(read.validation)


@given(damaged=damages())
@settings(max_examples=150, deadline=None)
def test_damaged_json_of_users_is_refused_or_gives_rows(damaged, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "leaf" / "train" / "damaged.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {name: {"x": [[0.5, 1.0], [2.0, 3.0]], "y": [0, 1]} for name in ("ann", "bob")}
    content = {"users": ["ann", "bob"], "num_samples": [2, 2], "user_data": own}
    path.write_bytes(damaged(json.dumps(content).encode()))
    try:
        found = load_dataset(f"leaf:{path.parents[1]}")
    except PfedafmError as error:
        assert "leaf" in str(error)
    else:
        assert found.users is not None and len(found.images) == len(found.labels) == 4
