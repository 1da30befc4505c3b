"""A node's private state: one file a round, each whole or not there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.array_files import SUFFIX, Arrays
from pfedafm_jax.base.client_files import ClientFile, read_client, write_client
from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.trees import by_path
from pfedafm_jax.results.records import RunFolder

Tree = Any
KEPT = 3  # states: a server that was killed goes back by two rounds at most


class States:
    """A client's private states in a folder, one file a round, each whole or not there.

    A file is a client's state as of a checkpoint, see `base.client_files`, with its card, and beside
    what the client keeps, `client.…`, what it was sent last, `server.…`.
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
        if any(self.place.glob("round-*.state")):
            raise PfedafmError(
                f"{self.place} has states of an earlier version, which this one does not read; choose "
                "another --state"
            )
        names = [path.stem.removeprefix("round-") for path in self.place.glob(f"round-*{SUFFIX}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, number: int) -> Path:
        """The file of the state after round `number`."""
        return self.place / f"round-{number:06d}{SUFFIX}"

    def write(self, number: int, card: dict[str, Any], client: Tree, server: Tree) -> None:
        """The state after round `number`; later ones, which no longer count, and old ones go.

        Args:
            card: where it comes from, as JSON; with the client's number and its federation.
            client: what the client keeps.
            server: what it was sent last.
        """
        leaves = by_path(jax.device_get({"client": client, "server": server}))
        arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        federation = card.get("federation", "")
        card = card | {"round": number}
        state = ClientFile(arrays, federation, card.get("client"), number, card)
        write_client(self.path(number), state)
        rounds = self.rounds()
        for old in {*rounds[:-KEPT], *(t for t in rounds if t > number)}:
            self.path(old).unlink(missing_ok=True)

    def read(self, number: int) -> tuple[dict[str, Any], Arrays]:
        """(card, weights by name) after round `number`; raises where the file is not as written."""
        state = read_client(self.path(number))
        return state.card, state.arrays
