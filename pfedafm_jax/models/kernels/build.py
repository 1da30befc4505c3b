"""Builds the native operations at first use, into the user's cache folder.

The name of a library's folder is a digest of everything that determines its content: source,
flags, compiler, JAX and the processor. The folder holds the library and its sha256, and is renamed
into place, so that several processes can build at the same time. Nothing is downloaded.
"""

import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import jax

from pfedafm_jax.base.files import read_bytes

SOURCES = [Path(__file__).with_name(name) for name in ("native.cc", "convolution.cc")]
HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-w", "-fno-math-errno")
COMPILERS = ("c++", "g++", "clang++")
FULL = os.strerror(errno.ENOSPC)
TIME_LIMIT = 300  # seconds; five is usual


class Unavailable(Exception):
    """The native operations cannot be built or loaded; the message says why and what to do."""


def load(cache: Path) -> tuple[ctypes.CDLL, str]:
    """Loads the native library, and builds it first if necessary.

    Args:
        cache: the folder of built libraries, created if necessary.

    Returns:
        The library and the digest in its folder's name.
    """
    compiler = _compiler()
    more = shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *FLAGS, *_flags_for_this_processor(compiler), *more]
    digest = _digest(command)
    folder = cache / f"native-{digest[:24]}"
    if not _is_whole(folder):
        _build(command, folder)
    try:
        return ctypes.CDLL(str(folder / "native.so")), digest
    except OSError as error:
        raise Unavailable(f"the built library cannot be loaded ({error})") from error


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX", "")
    for words in [shlex.split(chosen)] if chosen.strip() else [[name] for name in COMPILERS]:
        if shutil.which(words[0]):
            return words
    missing = f"CXX={chosen} is not found" if chosen.strip() else "there is no C++ compiler"
    raise Unavailable(f"{missing}; install one (Debian and Ubuntu: apt-get install g++)")


def _flags_for_this_processor(compiler: list[str]) -> list[str]:
    flags = ["-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"]
    if "clang" not in _run([*compiler, "--version"]).stdout:
        flags.append("-fno-predictive-commoning")  # it makes the first convolution spill registers
    return flags


def _digest(command: list[str]) -> str:
    parts = [
        *(source.read_text() for source in (HEADER, *SOURCES)),
        *command,
        _run([command[0], "--version"]).stdout,
        jax.__version__,
        metadata.version("jaxlib"),
        processor(),
        platform.machine(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def processor() -> str:
    """The processor's name and features, as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        found = {name.strip(): value.strip() for name, value in fields.items()}
        words = (found.get(name, "") for name in ("model name", "model", "flags", "Features"))
        return "\n".join(words)
    except (OSError, ValueError):
        return platform.processor()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{command[0]} failed ({error})") from error


def _is_whole(folder: Path) -> bool:
    """Whether a library exists, belongs to this user or root, and matches its sha256."""
    try:
        library, expected = folder / "native.so", read_bytes(folder / "sha256").decode()
        if hasattr(os, "getuid") and library.stat().st_uid not in (os.getuid(), 0):
            return False
        return hashlib.sha256(read_bytes(library)).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _build(command: list[str], folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as name:
            place = Path(name) / folder.name
            place.mkdir()
            library = place / "native.so"
            include = f"-I{jax.ffi.include_dir()}"
            result = _run([*command, include, *map(str, SOURCES), "-o", str(library)])
            if result.returncode != 0 or not library.is_file():
                lines = [line for line in result.stderr.splitlines() if "error" in line]
                lines = [line for line in result.stderr.splitlines() if FULL in line] + lines
                said = f"({(lines or ['it said nothing'])[0].strip()})"
                raise Unavailable(f"{command[0]} failed in {folder.parent} {said}")
            (place / "sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
            _put(place, folder)
    except OSError as error:
        reason = f"the cache folder {folder.parent} cannot be written ({error.strerror or error})"
        raise Unavailable(f"{reason}; set XDG_CACHE_HOME to one that can") from error


def _put(place: Path, folder: Path) -> None:
    """Renames a finished folder into place, unless another process has put a valid one there."""
    for _ in range(10):
        try:
            os.rename(place, folder)
            return
        except OSError:
            if _is_whole(folder):
                return
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            folder.unlink(missing_ok=True) if folder.is_file() else None
    raise OSError(f"{folder} cannot be replaced")
