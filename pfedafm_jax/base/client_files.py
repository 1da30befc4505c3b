"""A client's state is one file, wherever it is: of a checkpoint, of a store on disk, of a node in a
federation, of an export.

    clients/000/client-000007-round-000035.safetensors    client 7 after its visit in round 35

A file is never changed. A later visit makes another one, and the earlier one is removed when no
checkpoint needs it. Folders hold a thousand clients each, so that none has a hundred thousand
entries.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedafm_jax.base.array_files import (
    SUFFIX,
    About,
    Arrays,
    DamagedFile,
    array_bytes,
    check_arrays,
    read_arrays,
)
from pfedafm_jax.base.files import flush, in_threads, is_unfinished, write_atomically

FILE_NAME = re.compile(r"client-(\d{6,})-round-(\d{6,})\.safetensors")
FOLDER_NAME = re.compile(r"\d{3,}")
CLIENTS_PER_FOLDER = 1000

Visit = tuple[int, int]  # a client, and the round of one of its visits


class ClientFile(NamedTuple):
    """What one file says of one client.

    Attributes:
        arrays: `client.…` is what the client keeps between visits; in a node's file and in an export
            also `server.…`, what it was sent last, so that the two predict without anything else.
        run: the run, or the federation, that it belongs to.
        client: its number; None: a newcomer, who has none.
        round: the round after which it was in this state.
        card: where it comes from (method, settings, data, accuracies), in a node's file and in an
            export; empty in a run's own files, beside which the run says all that.
    """

    arrays: Arrays
    run: str
    client: int | None
    round: int
    card: dict[str, Any]


def write_client(path: Path, state: ClientFile, durable: bool = True) -> None:
    """Writes a client's state to a file of any name; see `write_arrays`."""
    write_atomically(path, client_bytes(state), durable)


def client_bytes(state: ClientFile) -> bytes | bytearray:
    """The content of the file of a client's state."""
    about = {
        "kind": "client",
        "run": state.run,
        "client": state.client,
        "round": state.round,
        "card": state.card,
    }
    return array_bytes(state.arrays, about)


def read_client(path: Path) -> ClientFile:
    """Reads what `write_client` wrote; `DamagedFile` if it is missing, altered, or something else."""
    arrays, about = read_arrays(path)
    if about.get("kind") != "client":
        raise DamagedFile(path, "it holds no client's state")
    return ClientFile(arrays, about["run"], about["client"], about["round"], about["card"])


class ClientFiles:
    """The folder with the states of a run's clients, or of a node's one client.

    Args:
        folder: where they are; it is made with the first file.
        run: the run they belong to; files of another one are not taken for its own.

    Several threads and processes may use it at the same time, as long as no two write the same
    client.
    """

    def __init__(self, folder: str | Path, run: str):
        self.folder = Path(folder)
        self.run = run

    def path(self, client: int, t: int) -> Path:
        """The file of a client's state after its visit in round `t`."""
        group = f"{client // CLIENTS_PER_FOLDER:03d}"
        return self.folder / group / f"client-{client:06d}-round-{t:06d}{SUFFIX}"

    def write(
        self,
        client: int,
        t: int,
        arrays: Arrays,
        card: dict[str, Any] | None = None,
        durable: bool = True,
    ) -> None:
        """Writes a client's state after its visit in round `t`."""
        state = ClientFile(arrays, self.run, client, t, card or {})
        write_client(self.path(client, t), state, durable)

    def read(self, client: int, t: int) -> ClientFile:
        """Reads a client's state after its visit in round `t`; `DamagedFile` says which file is
        missing, was altered, or belongs to another client, round or run."""
        path = self.path(client, t)
        state = read_client(path)
        self._refuse_others(path, state._asdict(), client, t)
        return state

    def check(self, client: int, t: int) -> None:
        """Raises what `read` would, in less time."""
        path = self.path(client, t)
        self._refuse_others(path, check_arrays(path), client, t)

    def _refuse_others(self, path: Path, about: About, client: int, t: int) -> None:
        """Raises if a file is whole, but not the one that its name says."""
        run = about.get("run")
        if run != self.run:
            raise DamagedFile(path, f"it belongs to run {run}, not to {self.run}")
        visit = (about.get("client"), about.get("round"))
        if visit != (client, t):
            raise DamagedFile(path, f"it holds client {visit[0]} after round {visit[1]}")

    # ------------------------------------------------------------------------- many at a time

    def write_all(self, states: Mapping[int, Arrays], rounds: np.ndarray) -> None:
        """Writes many clients' states, several at a time; `flush` then makes them durable.

        Args:
            states: by client.
            rounds: the round of each client's last visit, int `[clients]`.
        """
        in_threads(
            lambda client: self.write(client, int(rounds[client]), states[client], durable=False),
            states,
        )

    def flush(self, visits: Sequence[Visit]) -> None:
        """Waits until the files of these visits are on the disk under their names."""
        paths = [self.path(client, t) for client, t in visits]
        in_threads(flush, paths)
        in_threads(flush, {path.parent for path in paths})

    def check_all(self, visits: Sequence[Visit]) -> None:
        """Checks the files of these visits, several at a time; raises `DamagedFile` for one that
        cannot be used."""
        in_threads(lambda visit: self.check(*visit), visits)

    def remove(self, visits: Iterable[Visit]) -> None:
        """Removes the files of these visits; one that is gone already is no error."""
        in_threads(lambda visit: self.path(*visit).unlink(missing_ok=True), visits)

    def visits(self) -> np.ndarray:
        """The visits that there are files of: int `[files, 2]`, client and round; unordered."""
        found = [
            (int(match[1]), int(match[2]))
            for entry in self._entries()
            if (match := FILE_NAME.fullmatch(entry.name))
        ]
        return np.array(found, np.int64).reshape(-1, 2)

    def remove_all_but(self, tables: Sequence[np.ndarray]) -> None:
        """Removes every client's file that none of these tables names, and what a killed process
        left unfinished. Files with names that are not ours stay.

        Args:
            tables: each int `[clients]`: the round of each client's file, 0 where it has none.
        """
        visits = self.visits()
        named = np.zeros(len(visits), bool)
        for table in tables:
            known = visits[:, 0] < len(table)
            named[known] |= table[visits[known, 0]] == visits[known, 1]
        self.remove([(int(client), int(t)) for client, t in visits[~named]])
        for entry in self._entries():
            if is_unfinished(entry.name):
                os.unlink(entry.path)

    def _entries(self) -> Iterator[os.DirEntry]:
        """All files in our folders; a folder that has the name of one is not ours."""
        if not self.folder.is_dir():
            return
        for folder in os.scandir(self.folder):
            if FOLDER_NAME.fullmatch(folder.name) and folder.is_dir():
                for entry in os.scandir(folder):
                    if not entry.is_dir(follow_symlinks=False):
                        yield entry


def visits_in(table: np.ndarray, clients: np.ndarray | None = None) -> list[Visit]:
    """The visits that a table names.

    Args:
        table: the round of each client's last visit, int `[clients]`, 0 where there was none.
        clients: only of these, int `[some]`.
    """
    some = np.arange(len(table)) if clients is None else np.asarray(clients, int)
    some = some[table[some] > 0]
    return list(zip(some.tolist(), table[some].tolist(), strict=True))
