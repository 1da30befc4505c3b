"""Where the weights of a run are, and whose they are.

A run is two folders that belong together: `runs/NAME`, its records, and its weights, in
`checkpoints/NAME` beside `runs` where there is a folder `checkpoints`, as in this repository, else in
`runs/NAME/checkpoints`:

    run.json     whose weights these are: the run's id, as in the run's own `config.json`
    rounds/      checkpoints, see `checkpoints.py`
    clients/     clients' files, see `base/client_files.py`

Nothing is written to, or removed from, a folder that has other files and no `run.json`, nor one whose
`run.json` is of another run that has checkpoints there.
"""

import contextlib
import hashlib
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pfedafm_jax.base.errors import START_OVER, PfedafmError
from pfedafm_jax.base.files import is_unfinished, read_bytes, write_atomically

OWNER = "run.json"
ROUNDS = "rounds"
EARLIER_CHECKPOINT = re.compile(r"round-\d{6,8}(\.json)?")
FORMAT = "pfedafm_jax weights 1"
BESIDE_NUMBERS = 4096  # bytes of a file: what it says of its arrays, the rest of its last block
ELSEWHERE = "another --run-dir leaves it as it is"


class Owner(NamedTuple):
    """Whose weights a folder has, as its `run.json` says.

    Attributes:
        run: the run's id.
        run_folder: its other folder, relative to this one.
        identity: what a run must have in common with it to go on: settings, digests of data and split.
    """

    run: str
    run_folder: str
    identity: dict[str, Any]


class KnownRun(NamedTuple):
    """What a run's own folder, `runs/NAME`, says of it.

    Attributes:
        run: its id.
        rounds: how many rounds it has records of.
        every: rounds between two checkpoints; 0: none are written.
        weights: where its weights were written, relative to the run's folder.
    """

    run: str
    rounds: int
    every: int
    weights: str


class Place(NamedTuple):
    """The weights of a run as they were found.

    Attributes:
        folder: where they are, or will be.
        run: the run's id: a new one, or that of what goes on.
        state: `new`: there is nothing; `go on`: there are checkpoints; `start over`: there are none,
            as the run was stopped before its first, or asked for none, or `--fresh` gives them up.
    """

    folder: Path
    run: str
    state: Literal["new", "go on", "start over"]


def known_run(run_dir: str | Path) -> KnownRun | None:
    """What a run's own folder says of it; None if there is no run, or its `config.json` is damaged.

    The id is empty in a folder of an earlier version.
    """
    folder = Path(run_dir)
    try:
        about = json.loads(read_bytes(folder / "config.json"))
        every = int(about["config"]["checkpoint_every"])
        known = KnownRun(about.get("run", ""), 0, every, about.get("weights", "checkpoints"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    with contextlib.suppress(OSError):
        known = known._replace(rounds=read_bytes(folder / "rounds.jsonl").count(b"\n"))
    return known


def possible_places(run_dir: str | Path) -> list[Path]:
    """Where the weights of a run in this folder can be, the usual place first."""
    folder = Path(run_dir).absolute()
    inside = folder / "checkpoints"
    for parent in folder.parents:
        beside = parent.parent / "checkpoints"
        if parent.name == "runs" and beside.is_dir():
            return [beside / folder.relative_to(parent), inside]
    return [inside]


def usual_place(run_dir: str | Path) -> Path:
    """Where the weights of a new run in this folder go: `checkpoints/NAME` for `runs/NAME` if there is
    a folder `checkpoints` beside `runs`; else `checkpoints` in the run's own."""
    return possible_places(run_dir)[0]


def owner_of(folder: Path) -> Owner | None:
    """Whose weights a folder has; None if it is empty or not there; raises if it is not ours."""
    path = folder / OWNER
    if not path.exists():
        others = _others(folder)
        if others:
            earlier = ""
            if any(EARLIER_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir()):
                earlier = " (checkpoints of an earlier version look like that; none reads them)"
            raise PfedafmError(
                f"{folder} holds {others}, and no {OWNER} that says they are weights of a run of this "
                f"version{earlier}; nothing in it is touched. Move it away, or choose another "
                "--run-dir"
            )
        return None
    try:
        content = json.loads(read_bytes(path))
        found = Owner(content["run"], content["run_folder"], content["identity"])
        format = content["format"]
        intact = content["sha256"] == _digest(content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        found = None
        intact = False
        format = FORMAT
    if not intact or found is None:
        raise PfedafmError(
            f"{path} is damaged: it says whose weights are beside it, so nothing there is used or "
            f"touched. Move {folder} away, or choose another --run-dir"
        )
    if format != FORMAT:
        raise PfedafmError(f"{path} has the form {format!r}; this version reads {FORMAT!r}")
    return found


def rounds_saved(folder: Path) -> list[int]:
    """The rounds that a folder of weights has checkpoints of, oldest first; what is in them is not
    checked."""
    rounds = folder / ROUNDS
    if not rounds.is_dir():
        return []
    names = [path.name for path in rounds.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) >= 6)


def has_checkpoints(folder: Path) -> bool:
    """Whether there is a checkpoint, whole or not, in a folder of weights."""
    return bool(rounds_saved(folder))


def find_place(run_dir: str | Path, known: KnownRun | None, fresh: bool = False) -> Place:
    """Where the weights of a run are or will be, and what is to be done; called before any work.

    Changes nothing. Raises where going on or starting over would lose something.

    Args:
        run_dir: the run's folder, `runs/NAME`.
        known: what that folder says; None if there is no run in it.
        fresh: start over, whatever exists.
    """
    places = possible_places(run_dir)
    owners: dict[Path, Owner | None] = {}
    foreign: dict[Path, PfedafmError] = {}
    for folder in places:
        try:
            owners[folder] = owner_of(folder)
        except PfedafmError as error:
            foreign[folder] = error
    filled = {
        folder: owner.run
        for folder, owner in owners.items()
        if owner is not None and has_checkpoints(folder)
    }
    if known is not None:
        for folder, run in filled.items():
            if run == known.run:
                return _found(folder, run, fresh)
    if places[0] in foreign:
        raise foreign[places[0]]
    for folder, run in filled.items():
        if known is None:
            return _found(folder, run, fresh)
        raise PfedafmError(
            f"{folder} has the weights of another run than the one in {run_dir} ({run}, not "
            f"{known.run}); neither is touched. Move one of them away, or choose another --run-dir"
        )
    if known is None:
        return Place(places[0], new_run(), "new")
    if not known.run and known.rounds and not fresh:
        raise PfedafmError(
            f"{run_dir} was written by an earlier version, whose checkpoints this one does not read; "
            f"{START_OVER}, {ELSEWHERE}"
        )
    # A save may have been under way when the run was stopped, so one may be missing, but not two;
    # and none where the folder has lost even its mark.
    marked = any(owner is not None and owner.run == known.run for owner in owners.values())
    first_missed = 2 * known.every if marked else known.every
    if known.every > 0 and known.rounds >= first_missed and not fresh:
        raise PfedafmError(
            f"{run_dir} has done {known.rounds} rounds, and {missing_weights(run_dir, known)}; or "
            f"{START_OVER}"
        )
    return Place(places[0], new_run(), "start over" if known.rounds else "new")


def missing_weights(run_dir: str | Path, known: KnownRun) -> str:
    """The sentence for whoever needs a run's weights and does not find them: where they were written,
    where this looked, and which two folders belong together."""
    if known.every == 0:
        return "no weights of it were written (checkpoint_every = 0)"
    places = possible_places(run_dir)
    looked = " and in ".join(map(os.fspath, places))
    others = "".join(_whose(folder) for folder in places)
    return (
        f"its weights are not there (run {known.run}). They were written to {known.weights}, seen "
        f"from the run's folder; looked in {looked}{others}. The two folders belong together: put "
        f"that of the weights, with its {OWNER}, to {places[0]}"
    )


def _whose(folder: Path) -> str:
    """Says of a folder where weights are missed what else is there, if anything."""
    try:
        owner = owner_of(folder)
    except PfedafmError as error:
        return f" ({error})"
    return f" ({folder} has those of run {owner.run})" if owner and has_checkpoints(folder) else ""


def find_weights(run_dir: str | Path, known: KnownRun) -> Path:
    """The folder of a run's weights, to read them; raises with where it looked if there are none."""
    for folder in possible_places(run_dir):
        try:
            owner = owner_of(folder)
        except PfedafmError:
            continue  # not ours
        if owner is not None and owner.run == known.run and has_checkpoints(folder):
            return folder
    raise PfedafmError(
        f"{run_dir} has no weights to use: {missing_weights(run_dir, known)}. Those that "
        f"--drop-checkpoints removed are made again by the run's command; {START_OVER}"
    )


def claim(place: Place, run_dir: str | Path, identity: dict[str, Any]) -> None:
    """Marks a folder as the weights of a run, before anything else is written to it.

    Call it when the run's own files have the same id already: whoever is killed in between has then
    lost nothing.
    """
    folder = place.folder
    owner = owner_of(folder)
    if owner is not None and owner.run != place.run and has_checkpoints(folder):
        raise PfedafmError(f"{folder} has the weights of run {owner.run}; {ELSEWHERE}")
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if is_unfinished(entry.name):
            entry.unlink()
    content = {
        "format": FORMAT,
        "run": place.run,
        "run_folder": os.path.relpath(run_dir, folder),
        "identity": identity,
    }
    content["sha256"] = _digest(content)
    write_atomically(folder / OWNER, json.dumps(content, indent=2) + "\n")


def largest_size(
    client_bytes: float,
    server_bytes: float,
    num_clients: int,
    num_participants: int,
    rounds: int,
    every: int,
) -> int:
    """About how many bytes a run's weights take at most, for its plan.

    The last checkpoint has a file of every client visited; the one before and the best have other
    files of some of them: of those drawn in between, and at worst of all.

    Args:
        client_bytes: of a client's state, on average.
        server_bytes: of what the server sends.
        num_participants: clients drawn a round.
        every: rounds between two checkpoints.
    """
    visited = min(num_clients, num_participants * rounds)
    between = min(num_clients, num_participants * every)
    being_written = between
    files = 2 * visited + between + being_written
    return round(files * (client_bytes + BESIDE_NUMBERS) + 4 * (server_bytes + BESIDE_NUMBERS))


def new_run() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex[:16]


def _found(folder: Path, run: str, fresh: bool) -> Place:
    return Place(folder, new_run(), "start over") if fresh else Place(folder, run, "go on")


def _others(folder: Path) -> str:
    """What a folder without `run.json` holds, if anything; hidden files do not count."""
    if not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _digest(content: dict[str, Any]) -> str:
    said = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
