"""LEAF's layout: `train/*.json` and `test/*.json`, with the samples and labels of each user.

A file holds `users` (names), `num_samples` and `user_data`: {name: {"x": samples, "y": labels}}. A
sample is a list of numbers, of lists of them and so on, or a text; labels are whole numbers, or
texts, which are then the names of the classes.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad, naming
from pfedafm_jax.base.files import read_bytes
from pfedafm_jax.data.images import SUFFIXES
from pfedafm_jax.data.sources.cifar import Arrays
from pfedafm_jax.data.sources.folder import Found, count_of

MAX_BYTES = 2**30  # of a file; as Python objects it takes several times as much memory
LONGEST_TEXT = 2**14
MAX_CLASSES = 100_000


class User(NamedTuple):
    """One user's data in one file."""

    where: str  # file and user, for messages
    name: str
    x: np.ndarray | list[str]
    y: list[Any]  # whole numbers, or texts


def read_leaf(path: Path, image_size: int = 0) -> Found:
    """All users of a folder; `image_size`: flat lists are images of this height and width."""
    with naming(f"folder {str(path)!r} cannot be read"):
        files = [sorted((path / part).glob("*.json")) for part in ("train", "test")]
        if not files[0]:
            accepted = "LEAF's folders, train/ and test/ with .json files"
            raise PfedafmError(f"{path} has no train/*.json; accepted: {accepted}")
    parts = [[user for file in found for user in users_of(file)] for found in files]
    everyone, cut = [*parts[0], *parts[1]], sum(len(user.y) for user in parts[0])
    first = everyone[0]
    for user in everyone:
        if _form(user) != _form(first):
            found = [f"{one.where} has {_form(one)}" for one in (first, user)]
            raise PfedafmError(f"{', '.join(found)}; all users must have the same form")
    if isinstance(first.x, list) and image_size:
        raise bad("image_size", image_size, f"0, for the texts of {path}")
    if isinstance(first.x, list):
        values = token_ids([text for user in everyone for text in user.x])
    else:
        values = np.concatenate([user.x for user in everyone])
    values = _as_images(values, image_size, path) if image_size else values
    given = [label for user in everyone for label in user.y]
    names = sorted(set(given)) if isinstance(first.y[0], str) else []
    number = {name: place for place, name in enumerate(names)}
    labels = np.array([number[one] for one in given] if names else given, np.int32)
    users = np.repeat([user.name for user in everyone], [len(user.y) for user in everyone])
    arrays = Arrays(values[:cut], labels[:cut], values[cut:], labels[cut:])
    source = f"{path}: {count_of(cut, len(labels) - cut, 'samples')} of {len(set(users))} users"
    return Found(arrays, int(labels.max()) + 1, source, tuple(names), users)


def token_ids(texts: Sequence[str], length: int = 0) -> np.ndarray:
    """Texts as token ids, their UTF-8 bytes: int32 [texts, length], from 1 to 255, then zeros.

    Args:
        length: texts are truncated or padded to it; by default that of the longest.

    >>> token_ids(["abc", "é"])
    array([[ 97,  98,  99],
           [195, 169,   0]], dtype=int32)
    """
    coded = [text.encode("utf-8", "replace") for text in texts]
    longest = length or max(map(len, coded), default=0)
    if not 0 < longest <= LONGEST_TEXT:
        raise PfedafmError(f"the longest text has {longest} bytes; accepted: 1 to {LONGEST_TEXT}")
    table = np.zeros((len(coded), longest), np.int32)
    for row, text in zip(table, coded, strict=True):
        row[: len(text)] = np.frombuffer(text[:longest], np.uint8)
    return table


def users_of(file: Path) -> Iterator[User]:
    """The users of one file, checked."""
    with naming(f"{file} cannot be read as JSON"):
        if file.stat().st_size > MAX_BYTES:
            raise PfedafmError(f"{file} has over {MAX_BYTES} bytes; split it by users")
        content = json.loads(read_bytes(file))
    names, data, sizes = (
        content.get(key) if isinstance(content, dict) else None
        for key in ("users", "user_data", "num_samples")
    )
    if not isinstance(names, list) or not names or not isinstance(data, dict):
        held = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise PfedafmError(f"{file} holds {held[:200]}; accepted: users, num_samples, user_data")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise PfedafmError(f"{file}: users must be texts, each of them once")
    odd = sorted(set(names) ^ set(data))
    if odd:
        raise PfedafmError(f"{file}: user {odd[0]!r} is in one of users and user_data only")
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != len(names)):
        raise PfedafmError(f"{file}: num_samples must have a number for each of {len(names)} users")
    for number, name in enumerate(names):
        where = f"user {name!r} of {file}"
        own = data[name] if isinstance(data[name], dict) else {}
        x, y = ([] if not isinstance(own.get(key), list) else own[key] for key in "xy")
        problem = ""
        if not x or "y" not in own:
            problem = "has no data; accepted: x and y, lists of samples and of their labels"
        elif not len(x) == len(y) == (sizes[number] if sizes else len(x)):
            problem = f"has {len(x)} samples, {len(y)} labels and other num_samples"
        elif not all(type(one) is str for one in y) and not all(
            type(one) is int and 0 <= one < MAX_CLASSES for one in y
        ):
            problem = (
                f"has labels that are neither all texts nor all below {MAX_CLASSES}, from 0 on"
            )
        if problem:
            raise PfedafmError(f"{where} {problem}")
        yield User(where, name, _samples(x, where), y)


def _samples(x: list[Any], where: str) -> np.ndarray | list[str]:
    """Samples as an array, or as texts."""
    if all(type(one) is str for one in x):
        if x[0].lower().endswith(SUFFIXES):
            accepted = "texts or numbers; for image files: folder:PATH with users/NAME/CLASS/"
            raise PfedafmError(f"{where} has names of files ({x[0]!r}); accepted: {accepted}")
        return x
    with naming(f"{where} has samples of different lengths"):
        values = np.array(x)
    if values.dtype.kind not in "biuf" or values.ndim < 2:
        raise PfedafmError(f"{where} has samples that are neither lists of numbers nor texts")
    if not np.isfinite(values).all():
        row = np.argwhere(~np.isfinite(values))[0][0]
        raise PfedafmError(f"{where} has a number that is not finite in sample {row}")
    return values


def _form(user: User) -> str:
    """A description of samples and labels."""
    samples = "texts" if isinstance(user.x, list) else f"samples {list(user.x.shape[1:])}"
    return f"{samples} with {'names' if isinstance(user.y[0], str) else 'numbers'} as labels"


def _as_images(values: np.ndarray, size: int, path: Path) -> np.ndarray:
    """Flat lists of pixels as [num, size, size, channels]; whole numbers are those of 0 to 255."""
    fine = values.dtype.kind == "f" or (values.min() >= 0 and values.max() <= 255)
    if not fine or values.ndim != 2 or values.shape[1] % size**2:
        found = f"{path} has samples {values.dtype} {list(values.shape[1:])}"
        raise PfedafmError(f"{found}; image_size {size} needs flat lists of {size} x {size} pixels")
    pixels = values if values.dtype.kind == "f" else values.astype(np.uint8)
    return pixels.reshape(len(values), size, size, -1)
