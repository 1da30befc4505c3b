"""TensorFlow Datasets without TensorFlow: CIFAR, and other image classification datasets by name.

TFDS reads prepared datasets in the format array_record without TensorFlow. To prepare CIFAR it
needs TensorFlow only to unpack the archive and to encode the images: the builder below does that
with the standard library and Pillow, under the stock name, version and layout, so that a folder it
prepares is an ordinary TFDS folder. Other datasets are prepared by TFDS itself; where TensorFlow is
missing, and for folders in the older format TFRecord, the error says how to prepare one elsewhere.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from pfedafm_jax.base.errors import PfedafmError, naming
from pfedafm_jax.base.files import Log, read_bytes, reading
from pfedafm_jax.data.images import same_shape
from pfedafm_jax.data.sources.cifar import (
    IMAGE_BYTES,
    IMAGE_SIZE,
    Arrays,
    Cifar,
    channels_last,
    read_archive,
)
from pfedafm_jax.data.sources.folder import Found

REACH_SECONDS = 6.0
OWN_FEATURES = "tensorflow_datasets.core.features."  # the module of TFDS's own features


def default_dir() -> Path:
    """Where TFDS keeps its datasets by default."""
    return Path(os.path.expanduser(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"))


def find_prepared(name: str, root: Path, any_version: bool = False) -> Path | None:
    """The newest prepared version of a dataset (`cifar10`, or `name/config`) under `root`.

    `root` is the TFDS folder, the dataset's in it or a version of that, `any_version` anywhere.
    """
    infos = [root / "dataset_info.json"] if any_version or root.parent.name == name else []
    for folder in (root, root / name):
        if folder.name == name or folder != root:
            infos += sorted(folder.glob("*.*.*/dataset_info.json"), key=_version, reverse=True)
    return next((info.parent for info in infos if info.is_file()), None)


def _version(info: Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in info.parent.name.split("."))


# -------------------------------------------------------------------------------------------- CIFAR


def read_cifar(cifar: Cifar, folder: Path) -> Arrays:
    """The four arrays from a prepared folder, back in the official order."""
    with naming(f"{folder}: not a readable TFDS folder"):
        builder = _prepared(folder)
        return Arrays(*_split(builder, "train"), *_split(builder, "test"))


def download_cifar(cifar: Cifar, tfds_dir: Path) -> Arrays:
    """Download and prepare with TFDS under `tfds_dir`, then read."""
    builder = _builder(cifar, tfds_dir)
    return read_cifar(cifar, _prepare(builder, builder._cifar_info.url, cifar.name))


def _split(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a split in the official order, which is in the examples' ids.

    The checksums of the whole detect a missing or repeated example.
    """
    num = builder.info.splits[split].num_examples
    images, labels = np.zeros((num, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8), np.zeros(num, np.uint8)
    for example in _examples(builder, split):
        identity = example["id"]
        text = identity.decode() if isinstance(identity, bytes) else str(identity)
        at = int(text.removeprefix(f"{split}_"))
        images[at], labels[at] = example["image"], example["label"]
    return images, labels


def _builder(cifar: Cifar, tfds_dir: Path) -> Any:
    """A TFDS builder of the stock name and version that prepares without TensorFlow."""
    from tensorflow_datasets.image_classification import cifar as stock

    parent: Any = {"cifar10": stock.Cifar10, "cifar100": stock.Cifar100}[cifar.name]

    class WithoutTensorFlow(parent, skip_registration=True):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
        name = cifar.name

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            stock_info = self._cifar_info
            path = Path(str(dl_manager.download(stock_info.url)))
            files = (*stock_info.label_files, *stock_info.train_files, *stock_info.test_files)
            _, content = read_archive(path, replace(cifar.binary, files=files))
            for key, file in zip(stock_info.label_keys, stock_info.label_files, strict=True):
                self.info.features[key].names = content[file].decode().split()
            train = [content[file] for file in stock_info.train_files]
            test = [content[file] for file in stock_info.test_files]
            return {
                "train": self._generate_examples("train", train),
                "test": self._generate_examples("test", test),
            }

        def _generate_examples(self, split_prefix: str, filepaths: list[bytes]) -> Iterator[tuple]:
            label_keys = self._cifar_info.label_keys
            rows = np.frombuffer(b"".join(filepaths), np.uint8)
            rows = rows.reshape(-1, len(label_keys) + IMAGE_BYTES)
            labels = rows[:, : len(label_keys)].tolist()
            images = channels_last(rows[:, len(label_keys) :])
            for index, image in enumerate(images):
                example = dict(zip(label_keys, labels[index], strict=True))
                example["id"] = f"{split_prefix}_{index:05d}"
                # A Pillow image, since TFDS would need TensorFlow to encode an array.
                example["image"] = Image.fromarray(np.ascontiguousarray(image))
                yield index, example

    return WithoutTensorFlow(data_dir=str(tfds_dir), file_format="array_record")


# -------------------------------------------------------------------------------------- any dataset


def read_tfds(
    name: str, data_dir: Path | None, image_size: int = 0, *, offline: bool = False, log: Log
) -> Found:
    """The `train` and, if there is one, the `test` split of `mnist`, or `name/config`."""
    root = default_dir() if data_dir is None else data_dir
    with naming(f"tfds:{name} in {root}"):
        import tensorflow_datasets as tfds  # slow to import, and needed only here

        folder = find_prepared(name, root, any_version=True)
        folder = folder or _prepare_any(tfds, name, root, offline, log)
        builder = _prepared(folder)
        if builder.name != name.partition("/")[0]:
            raise PfedafmError(f"{folder} has the dataset {builder.name}, not {name}")
        image, label = _keys(builder, folder)
        splits = [split for split in ("train", "test") if split in builder.info.splits]
        if splits[:1] != ["train"]:
            present = ", ".join(builder.info.splits)
            raise PfedafmError(f"{folder} has the splits {present}; train is needed")
        labels: list[int] = []

        def pictures() -> Iterator[tuple[str, Image.Image]]:
            for split in splits:
                for number, example in enumerate(_examples(builder, split)):
                    labels.append(int(example[label]))
                    yield f"{split} image {number}", _picture(np.asarray(example[image]), folder)

        images, cut = same_shape(pictures(), image_size), builder.info.splits["train"].num_examples
        numbers, kind = np.array(labels, np.int32), builder.info.features[label]
    arrays = Arrays(images[:cut], numbers[:cut], images[cut:], numbers[cut:])
    return Found(arrays, kind.num_classes, f"the TFDS folder {folder}", tuple(kind.names))


def _prepare_any(tfds: Any, name: str, root: Path, offline: bool, log: Log) -> Path:
    """Has TFDS prepare a dataset; returns its folder. The error says how to do it elsewhere."""
    elsewhere = _how_to_prepare(name)
    if offline:
        missing = f"tfds:{name} is not prepared in {root}, and downloading is switched off"
        raise PfedafmError(f"{missing}. {elsewhere}")
    with naming(f"TFDS has no dataset {name!r}"):
        # By its class: `tfds.builder` would also open folders, before their features are checked.
        dataset, _, config = name.partition("/")
        builder_class = tfds.builder_cls(dataset)
        builder = builder_class(
            config=config or None, data_dir=str(root), file_format="array_record"
        )
    log(f"tfds:{name}: not in {root} yet, asking TFDS to download and prepare it")
    return _prepare(builder, next(iter(builder.url_infos), None), repr(name), f". {elsewhere}")


def _keys(builder: Any, folder: Path) -> tuple[str, str]:
    """Names of the image and the label in an example."""
    keys, features = builder.info.supervised_keys, builder.info.features
    image, label = keys if isinstance(keys, tuple) and len(keys) == 2 else ("image", "label")
    there = image in features and label in features
    if not there or not hasattr(features[label], "num_classes"):
        found = f"{folder} has {', '.join(features)}"
        raise PfedafmError(f"{found}; accepted: datasets of an image and its class")
    return image, label


def _picture(pixels: np.ndarray, folder: Path) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4):
        found = f"{folder} has images {pixels.dtype} {pixels.shape}"
        raise PfedafmError(f"{found}; accepted: 8-bit grey or colour images")
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


# ----------------------------------------------------------------------------------- what both need


def _prepare(builder: Any, url: str | None, name: str, advice: str = "") -> Path:
    """Downloads and prepares; returns the folder. Fails in seconds if the host is unreachable."""
    with naming(f"TFDS could not prepare {name}{advice}"):
        if url:  # TFDS silently retries an unreachable host for minutes
            _check_reachable(url)
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for our own results
            builder.download_and_prepare()
    return Path(str(builder.data_path))


def _check_reachable(url: str, seconds: float = REACH_SECONDS) -> None:
    """Raise unless the host of `url` answers a request for it within `seconds`."""
    import requests  # as TFDS does, so that the same proxies and certificates apply

    problem: list[str] = ["no answer"]

    def ask() -> None:
        try:
            with requests.head(url, timeout=seconds, allow_redirects=True) as answer:
                problem[0] = "" if answer.status_code < 500 else f"it answered {answer.status_code}"
        except Exception as error:
            problem[0] = type(error).__name__

    # In a thread, because name resolution has no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * seconds)
    if problem[0]:
        raise OSError(f"{urlsplit(url).hostname} cannot be reached ({problem[0]})")


def _prepared(folder: Path) -> Any:
    """TFDS's builder of a prepared folder."""
    import tensorflow_datasets as tfds  # slow to import, and needed only here

    logging.getLogger("absl").setLevel(logging.ERROR)  # it recommends packages
    for path in (path for path in folder.iterdir() if not path.is_dir()):
        with naming(f"{path} cannot be read"):
            reading(path).close()  # TFDS would wait for a pipe
    check_features(folder)
    return tfds.builder_from_directory(folder)


def check_features(folder: Path) -> None:
    """Raise unless all classes that a prepared folder's `features.json` names are TFDS's own.

    TFDS imports the modules of these classes, so that a folder from elsewhere could run anything.
    """
    path = folder / "features.json"
    if not path.is_file():
        return  # TFDS says that there are no features
    with naming(f"{path} cannot be read"):
        features = json.loads(read_bytes(path))
        class_names = list(_class_names(features))
    for class_name in class_names:
        if not class_name.startswith(OWN_FEATURES):
            raise PfedafmError(
                f"{path} names the class {class_name}, whose module TFDS would import and run; "
                f"accepted: TFDS's own features ({OWN_FEATURES}…). If you trust the folder, "
                "prepare it again with features of these, or save its images as an .npz file"
            )


def _class_names(node: Any) -> Iterator[str]:
    """All classes named anywhere in a features.json, in its present or its older form."""
    if isinstance(node, str) and node.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):  # TFDS also reads JSON inside of strings
            yield from _class_names(json.loads(node))
    elif isinstance(node, list):
        for item in node:
            yield from _class_names(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("pythonClassName", "python_class_name", "type") and isinstance(value, str):
                yield value
            else:
                yield from _class_names(value)


def _examples(builder: Any, split: str) -> Sequence[dict[str, Any]]:
    """The examples of a prepared split, decoded when they are asked for."""
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError as error:
        config = builder.info.config_name
        name = f"{builder.name}/{config}" if config else builder.name
        raise PfedafmError(
            f"{builder.data_path} is in the format {builder.info.file_format.value}, which TFDS "
            f"reads only with TensorFlow; accepted: array_record. {_how_to_prepare(name)}"
        ) from error


def _how_to_prepare(name: str) -> str:
    """What to type where TensorFlow is installed, and what to do with the result."""
    command = (
        'python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{name}', data_dir='FOLDER', file_format='array_record')"
        '.download_and_prepare()"'
    )
    return f"Where TensorFlow is installed, {command} prepares it; give that: --data-dir FOLDER"
