"""Pictures to be classified: arrays, a file of arrays, image files, a folder of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from pfedafm_jax.data.folders import SUFFIXES, opened
from pfedafm_jax.errors import PfedafmError, naming
from pfedafm_jax.files import reading
from pfedafm_jax.settings import bad

Pictures = np.ndarray | str | Path | Sequence[str | Path]


def read_pictures(
    source: Pictures, image_shape: tuple[int, int, int], resize: bool = False
) -> tuple[np.ndarray, list[str]]:
    """Images of one shape, checked, and a name for each.

    Args:
        source: uint8 `[num, height, width, channels]` (a single image, and grey images, may lack
            the first and the last axis), a `.npy` or `.npz` file (its `images`) with such an array,
            an image file, a folder (all images in it, in the order of their paths), or a list of
            image files.
        image_shape: height, width and channels that are wanted; files are converted to grey or RGB.
        resize: files to this height and width; otherwise others are refused.

    Returns:
        uint8 `[num, height, width, channels]`, and the files' names or the images' numbers.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.suffix.lower() in (".npy", ".npz") and path.is_file():
            return _array(_loaded(path), image_shape, str(path))
        source = _files(path)
    if isinstance(source, np.ndarray) or not all(isinstance(one, str | Path) for one in source):
        return _array(np.asarray(source), image_shape, "images")
    pictures = [_pixels(Path(file), image_shape, resize) for file in source]
    empty = np.zeros((0, *image_shape), np.uint8)
    return np.stack(pictures) if pictures else empty, [str(file) for file in source]


def _loaded(path: Path) -> np.ndarray:
    with naming(f"{str(path)!r} cannot be read as a file of arrays"), reading(path) as file:
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        if "images" not in found.files:
            held = ", ".join(found.files) or "nothing"
            raise PfedafmError(f"{str(path)!r} holds {held}; accepted: an array named images")
        return found["images"]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise bad("images", str(path), "a .npy or .npz file, an image, or a folder of images")
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        raise bad("images", str(path), f"a folder with files that end in {', '.join(SUFFIXES)}")
    return found


def _pixels(file: Path, image_shape: tuple[int, int, int], resize: bool) -> np.ndarray:
    height, width, channels = image_shape
    image = opened(file).convert("L" if channels == 1 else "RGB")
    if resize:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if image.size != (width, height):
        raise PfedafmError(
            f"{str(file)!r} is {image.size[0]}x{image.size[1]}; accepted: {width}x{height}, as the "
            "model was trained on"
        )
    return np.asarray(image).reshape(image_shape)


def _array(
    images: np.ndarray, image_shape: tuple[int, int, int], what: str
) -> tuple[np.ndarray, list[str]]:
    if image_shape[-1] == 1 and images.shape[-2:] == image_shape[:2]:
        images = images[..., None]
    if images.shape == image_shape:
        images = images[None]
    if images.dtype != np.uint8 or images.shape[1:] != image_shape:
        raise PfedafmError(
            f"{what}: {images.dtype} {list(images.shape)}; accepted: uint8 (0 to 255) "
            f"[num, {', '.join(map(str, image_shape))}], as the model was trained on"
        )
    return images, [str(number) for number in range(len(images))]
