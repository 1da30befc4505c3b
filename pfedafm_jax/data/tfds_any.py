"""Any image classification dataset of TensorFlow Datasets, by its name.

What is prepared is read without TensorFlow. TFDS needs TensorFlow to prepare most datasets; where it is missing, the
message says how to prepare one elsewhere.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pfedafm_jax.data import tfds_source
from pfedafm_jax.data.cifar import Arrays
from pfedafm_jax.data.own import Found, same_shape
from pfedafm_jax.errors import PfedafmError

Log = Callable[[str], None]


def read_tfds(name: str, data_dir: Path | None, image_size: int = 0, *, offline: bool = False, log: Log) -> Found:
    """The `train` and, where there is one, the `test` split of a dataset (`mnist`, or `name/config`)."""
    root = tfds_source.default_tfds_dir() if data_dir is None else data_dir
    folder = _prepared(name, root)
    try:
        import tensorflow_datasets as tfds  # slow to import, and needed only here

        if folder is None:
            folder = _prepare(tfds, name, root, offline, log)
        builder: Any = tfds.builder_from_directory(folder)
        image, label = _keys(builder, folder)
        splits = [split for split in ("train", "test") if split in builder.info.splits]
        if splits[:1] != ["train"]:
            raise PfedafmError(f"{folder} has the splits {', '.join(builder.info.splits)}; train is needed")
        labels: dict[str, list[int]] = {split: [] for split in splits}

        def pictures() -> Iterator[tuple[str, Image.Image]]:
            for split in splits:
                for number, example in enumerate(tfds_source.examples(builder, split)):
                    labels[split].append(int(example[label]))
                    yield f"{split} image {number}", _picture(np.asarray(example[image]), folder)

        images, cut = same_shape(pictures(), image_size), builder.info.splits["train"].num_examples
        classes = builder.info.features[label].num_classes
    except PfedafmError:
        raise
    except Exception as error:  # TFDS, array_record and Pillow raise many types on damaged input
        raise PfedafmError(f"tfds:{name} in {root}: {tfds_source.first_line(error)}") from error
    numbers = np.array(labels["train"] + labels.get("test", []), np.int32)
    arrays = Arrays(images[:cut], numbers[:cut], images[cut:], numbers[cut:])
    return Found(arrays, classes, f"the TFDS folder {folder}")


def _prepared(name: str, root: Path) -> Path | None:
    """The newest prepared version under a TFDS folder, or the given folder if it is such a version."""
    infos = sorted((root / name).glob("*.*.*/dataset_info.json"), key=tfds_source.version_key, reverse=True)
    return infos[0].parent if infos else root if (root / "dataset_info.json").is_file() else None


def _prepare(tfds: Any, name: str, root: Path, offline: bool, log: Log) -> Path:
    """Download and prepare with TFDS itself, for which most datasets need TensorFlow."""
    how = (
        f"prepare it where TensorFlow is installed (tfds build {name} --file_format=array_record, or "
        f"tfds.load({name!r})) and give that TFDS folder: --data-dir FOLDER"
    )
    if offline:
        raise PfedafmError(f"tfds:{name} is not prepared in {root}, and downloading is switched off; {how}")
    try:
        builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
    except Exception as error:
        raise PfedafmError(f"TFDS has no dataset {name!r} ({tfds_source.first_line(error)})") from error
    log(f"tfds:{name}: not in {root} yet, asking TFDS to download and prepare it")
    try:
        for url in list(builder.url_infos)[:1]:  # TFDS retries a host out of reach for minutes without a word
            tfds_source.check_reachable(url)
        with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to our own results
            builder.download_and_prepare()
    except (
        Exception
    ) as error:  # network, disk and checksum errors of TFDS have no common type, nor has a missing TensorFlow
        reason = str(error) if isinstance(error, PfedafmError) else tfds_source.first_line(error)
        raise PfedafmError(f"TFDS could not prepare {name!r} ({reason}); {how}") from error
    return Path(str(builder.data_path))


def _keys(builder: Any, folder: Path) -> tuple[str, str]:
    """Names of the image and the label in an example."""
    keys, features = builder.info.supervised_keys, builder.info.features
    names = keys if isinstance(keys, tuple) and len(keys) == 2 else ("image", "label")
    if not all(name in features for name in names) or not hasattr(features[names[1]], "num_classes"):
        raise PfedafmError(f"{folder} has {', '.join(features)}; accepted: datasets of an image and its class")
    return names[0], names[1]


def _picture(pixels: np.ndarray, folder: Path) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4):
        raise PfedafmError(f"{folder} has images {pixels.dtype} {pixels.shape}; accepted: 8-bit grey or colour images")
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
