"""What is to be classified: arrays, a file of arrays, image files, a folder of them."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad, naming
from pfedafm_jax.base.files import reading
from pfedafm_jax.data.folders import SUFFIXES, images_of, opened, pixels_of
from pfedafm_jax.data.values import kept

Pictures = np.ndarray | str | Path | Sequence[str | Path]


def read_pictures(
    source: Pictures, wanted: jax.ShapeDtypeStruct, resize: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Images of one shape, checked, and a name for each.

    Args:
        source: an array `[num, …]`, such as uint8 `[num, height, width, channels]` (a single image,
            and grey images, may lack the first and the last axis), a `.npy` or `.npz` file (its
            `images`) with such an array, an image file, a folder (all images in it, in the order of
            their paths), or a list of image files.
        wanted: shape and dtype of one, `[1, …]`; files are converted to grey or RGB.
        resize: files to the height and width of it; otherwise others are refused.

    Returns:
        What was asked for, `[num, …]`, not normalised, and the files' names or the images' numbers.
    """
    shape = wanted.shape[1:]
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.suffix.lower() in (".npy", ".npz") and path.is_file():
            return _array(_loaded(path), wanted, str(path))
        source = _files(path)
    if isinstance(source, np.ndarray) or not all(isinstance(one, str | Path) for one in source):
        return _array(np.asarray(source), wanted, "images")
    if len(shape) != 3:
        accepted = f"an array {wanted.dtype} [num, {', '.join(map(str, shape))}]"
        raise bad("images", "image files", f"{accepted}, as the model was trained on")
    pictures = [_pixels(Path(file), wanted, resize) for file in source]
    empty = np.zeros((0, *shape), wanted.dtype)
    return np.stack(pictures) if pictures else empty, [str(file) for file in source]


def _loaded(path: Path) -> np.ndarray:
    with naming(f"{str(path)!r} cannot be read as a file of arrays"), reading(path) as file:
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        name = next((name for name in ("images", "x") if name in found.files), None)
        if name is None:
            held = ", ".join(found.files) or "nothing"
            raise PfedafmError(f"{str(path)!r} holds {held}; accepted: an array named images or x")
        return found[name]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise bad("images", str(path), "a .npy or .npz file, an image, or a folder of images")
    if not (found := images_of(path)):
        raise bad("images", str(path), f"a folder with files that end in {', '.join(SUFFIXES)}")
    return found


def _pixels(file: Path, wanted: jax.ShapeDtypeStruct, resize: bool) -> np.ndarray:
    height, width, channels = wanted.shape[1:]
    mode, size = "L" if channels == 1 else "RGB", (width, height) if resize else None
    pixels = pixels_of(opened(file), size, mode)
    found, accepted = f"{pixels.shape[1]}x{pixels.shape[0]}", f"{width}x{height}"
    if pixels.shape[-1] != channels:  # files are grey or RGB
        found, accepted = ("grey" if pixels.shape[-1] == 1 else "RGB"), f"{channels} channels"
    if pixels.dtype != wanted.dtype:
        found, accepted = str(pixels.dtype), str(wanted.dtype)
    if found != accepted:
        trained = "as the model was trained on"
        raise PfedafmError(f"{str(file)!r} is {found}; accepted: {accepted}, {trained}")
    return pixels


def _array(
    images: np.ndarray, wanted: jax.ShapeDtypeStruct, what: str
) -> tuple[np.ndarray, list[str]]:
    shape = wanted.shape[1:]
    if shape[-1] == 1 and images.shape[-len(shape) + 1 :] == shape[:-1]:
        images = images[..., None]
    if images.shape == shape:
        images = images[None]
    if images.shape[1:] == shape:
        found = kept(images, what)
        # Floats are rounded when they are normalised.
        if found.dtype == wanted.dtype or found.dtype.kind == wanted.dtype.kind == "f":
            return found, [str(number) for number in range(len(images))]
    raise PfedafmError(
        f"{what}: {images.dtype} {list(images.shape)}; accepted: {wanted.dtype} "
        f"[num, {', '.join(map(str, shape))}], as the model was trained on"
    )
