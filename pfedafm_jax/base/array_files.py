"""Arrays in one file: safetensors, written whole or not at all, with a digest of every byte.

Every array that this program keeps for later stands in such a file: what a client keeps between two
visits, what the server sends, the numbers of a run so far. Beside the arrays a file has `about`,
JSON that says what they are. Any program reads the arrays (`safetensors.numpy.load_file`); only
ours also checks the digest. It is the sha256 of the file in which its own 64 digits are zeros.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from pfedafm_jax.base.errors import PfedafmError, reason
from pfedafm_jax.base.files import read_bytes, write_atomically

Arrays = dict[str, np.ndarray]  # by their path in a tree, such as `header.kernel`
About = dict[str, Any]  # JSON

SUFFIX = ".safetensors"
FORMAT = "pfedafm_jax arrays 1"
NO_DIGEST = b"0" * 64
BEFORE_DIGEST = b'"sha256":"'  # in no text of a header, where a quotation mark has a backslash
KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}
BEYOND_NUMPY = ("bfloat16",)  # types of JAX that numpy knows by name only


class DamagedFile(PfedafmError):
    """A file that is missing, or that is not what was written.

    Attributes:
        path: the file.
        why: what is wrong with it.
    """

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} cannot be used: {why}")
        self.path = path
        self.why = why


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], about: About, durable: bool = True
) -> None:
    """Writes a file of arrays; after a failure whatever was there before is unchanged.

    Args:
        path: the file; its folder is made where there is none.
        arrays, about: see `array_bytes`.
        durable: wait until it is on the disk; see `write_atomically`.
    """
    write_atomically(path, array_bytes(arrays, about), durable)


def array_bytes(arrays: Mapping[str, np.ndarray], about: About) -> bytes | bytearray:
    """The content of a file of arrays.

    Args:
        arrays: by name; any shape, also without values; numbers, truth values or bfloat16.
        about: what they are, as JSON.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in dense.items():
        if array.dtype.kind not in "biufc" and array.dtype.name not in BEYOND_NUMPY:
            raise PfedafmError(f"{name} is of type {array.dtype}, which no file of ours can hold")
    metadata = {"format": FORMAT, "about": json.dumps(about), "sha256": NO_DIGEST.decode()}
    content = bytearray(save(dense, metadata))
    place = _digest_place(content)
    content[place] = hashlib.sha256(content).hexdigest().encode()
    return content


def read_arrays(path: Path) -> tuple[Arrays, About]:
    """The arrays of a file, and what it says about them; `DamagedFile` names one that is missing or
    was altered."""
    content, about = _checked(path)
    try:
        return {name: _array(view) for name, view in deserialize(content)}, about
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise DamagedFile(path, f"it is no such file as this program writes ({error})") from error


def check_arrays(path: Path) -> About:
    """What a file says about its arrays; `DamagedFile`, as from `read_arrays`. Takes less time."""
    return _checked(path)[1]


def _checked(path: Path) -> tuple[bytes, About]:
    """A file's content and what it says, after its digest was checked."""
    try:
        content = read_bytes(path)
    except FileNotFoundError as error:
        raise DamagedFile(path, "it is missing") from error
    except OSError as error:
        raise DamagedFile(path, reason(error)) from error
    try:
        metadata = json.loads(content[8 : _header_end(content)])["__metadata__"]
        format = metadata["format"]
        about = json.loads(metadata["about"])
        place = _digest_place(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DamagedFile(path, "it has changed since it was written") from None
    found = hashlib.sha256(content[: place.start])
    found.update(NO_DIGEST)
    found.update(memoryview(content)[place.stop :])
    if content[place] != found.hexdigest().encode():
        raise DamagedFile(path, "it has changed since it was written (sha256)")
    if format != FORMAT:
        raise DamagedFile(path, f"it has the form {format!r}; this version reads {FORMAT!r}")
    return content, about


def _header_end(content: bytes | bytearray) -> int:
    """Where the numbers of a safetensors file begin."""
    return 8 + int.from_bytes(content[:8], "little")


def _digest_place(content: bytes | bytearray) -> slice:
    """Where the 64 digits are."""
    start = content.index(BEFORE_DIGEST, 8, _header_end(content)) + len(BEFORE_DIGEST)
    return slice(start, start + len(NO_DIGEST))


def _array(view: Mapping[str, Any]) -> np.ndarray:
    """An array as safetensors describes it."""
    letters = view["dtype"].rstrip("0123456789")
    bits = view["dtype"][len(letters) :]
    dtype = "bool" if letters == "BOOL" else KINDS[letters] + bits
    return np.frombuffer(view["data"], np.dtype(dtype)).reshape(view["shape"])
