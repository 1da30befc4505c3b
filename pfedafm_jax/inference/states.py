"""A node's private state: one file a round, each whole or not there."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import read_bytes, write_atomically
from pfedafm_jax.base.trees import by_path, filled
from pfedafm_jax.results.records import RunFolder

Tree = Any
MARK = b"pfedafm_jax node 1\n"
KEPT = 3  # states: a server that was killed goes back by two rounds at most


class States:
    """A client's private states in a folder, one file a round, each whole or not there.

    A file is a mark, the sha256 of what follows, and weights as safetensors whose metadata says
    where they come from: `client.…` is what the client keeps, `server.…` what it was sent last.
    """

    def __init__(self, place: str | Path):
        self.place = Path(place)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One node at a time."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(RunFolder(self.place).lock())
            except PfedafmError as error:
                words = "a folder that can be written and that no other node uses"
                raise bad("state", str(self.place), words) from error
            yield

    def rounds(self) -> list[int]:
        """After which rounds there is a state, the newest last."""
        names = [path.stem.removeprefix("round-") for path in self.place.glob("round-*.state")]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, number: int) -> Path:
        return self.place / f"round-{number:06d}.state"

    def write(self, number: int, card: dict[str, Any], client: Tree, server: Tree) -> None:
        """The state after round `number`; later ones, which no longer count, and old ones go."""
        leaves = filled(by_path(jax.device_get({"client": client, "server": server})))
        arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
        content = save(arrays, {"card": json.dumps(card | {"round": number})})
        digest = hashlib.sha256(content).hexdigest().encode()
        write_atomically(self.path(number), MARK + digest + b"\n" + content)
        rounds = self.rounds()
        for old in {*rounds[:-KEPT], *(one for one in rounds if one > number)}:
            self.path(old).unlink(missing_ok=True)

    def read(self, number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(card, weights by name) after round `number`; raises where the file is not as written."""
        path = self.path(number)
        try:
            content = read_bytes(path)
            mark, digest, rest = content[: len(MARK)], *content[len(MARK) :].split(b"\n", 1)
            if mark != MARK or hashlib.sha256(rest).hexdigest().encode() != digest:
                raise ValueError("it has changed since it was written")
            header = json.loads(rest[8 : 8 + int.from_bytes(rest[:8], "little")])
            return json.loads(header["__metadata__"]["card"]), load(rest)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise PfedafmError(f"the state {path} cannot be used: {error}") from error
