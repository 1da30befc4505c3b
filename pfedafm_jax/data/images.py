"""Image files as pixels, and what is to be classified: arrays, a file of them, image files, a folder."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageOps

from pfedafm_jax.base.errors import PfedafmError, bad, naming
from pfedafm_jax.base.files import reading
from pfedafm_jax.data.arrays import kept

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


SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


# Other formats may run external programs to be decoded.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


GREY_MODES = ("1", "L", "LA")


DEEP_MODES = "IF"  # first letters of grey pictures with 16 bits and more, and of floats


def images_of(folder: Path) -> list[Path]:
    """The image files in a folder, at any depth, in the order of their names."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    return sorted(file for file in found if file.is_file())


def opened(path: Path) -> Image.Image:
    what = naming(f"{path} is not a readable image")
    with what, reading(path) as file, Image.open(file, formats=FORMATS) as image:
        if _drops_bits(image):
            found = f"{path} has colours of more than 8 bits ({image.mode})"
            raise PfedafmError(f"{found}; accepted: 8 bits per channel, or grey images")
        return ImageOps.exif_transpose(image)  # cameras store rotated images


def _drops_bits(image: Image.Image) -> bool:
    """Whether an image has more than 8 bits per channel; Pillow would drop the lower ones."""
    if image.mode[0] in DEEP_MODES:
        return False
    for codec, _, _, arguments in getattr(image, "tile", ()):  # the decoder's, with the bits
        if codec.startswith("ppm") and isinstance(arguments, tuple) and arguments[-1] > 255:
            return True
        if ";16" in str(arguments):
            return True
    return False


def pixels_of(image: Image.Image, size: tuple[int, int] | None, mode: str = "") -> np.ndarray:
    """A picture as uint8 [height, width, 1 or 3], or float32 [height, width, 1] of more than 8 bits.

    Args:
        size: width and height to resize it to.
        mode: Pillow's, of 8-bit pictures; by default grey ones stay grey and others are RGB.
    """
    if image.mode[0] in DEEP_MODES:
        image = Image.fromarray(np.asarray(image, np.float32))
    else:
        image = image.convert(mode or ("L" if image.mode in GREY_MODES else "RGB"))
    pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR) if size else image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def same_shape(images: Iterable[tuple[str, Image.Image]], image_size: int) -> np.ndarray:
    """(name, picture) pairs as [num, height, width, 1 or 3]: grey if all are, else RGB."""
    found: list[np.ndarray] = []
    first: tuple[str, str] | None = None
    for name, image in images:
        pixels = pixels_of(image, (image_size, image_size) if image_size else None)
        is_now = f"{pixels.shape[1]}x{pixels.shape[0]}"
        if pixels.dtype != np.uint8:
            is_now += " with more than 8 bits"
        first = first or (name, is_now)
        if is_now != first[1]:
            both = f"{first[0]} is {first[1]}, {name} is {is_now}"
            mend = "the run can make them one size: --image-size N (image_size in Python)"
            raise PfedafmError(f"images differ: {both}; {mend}")
        found.append(pixels)
    channels = max((pixels.shape[-1] for pixels in found), default=1)
    return np.stack([np.repeat(pixels, channels // pixels.shape[-1], axis=-1) for pixels in found])
