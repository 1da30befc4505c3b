"""CIFAR through TensorFlow Datasets, without TensorFlow.

TFDS itself needs TensorFlow to unpack CIFAR's archive and to encode its images, and for nothing else here. The
two builders below do those steps with the standard library and Pillow, under the stock name, version and
layout, so that a folder they prepare is an ordinary TFDS folder and the other way round.
"""

import contextlib
import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from pfedafm_jax.data.cifar import IMAGE_BYTES, IMAGE_SIZE, Arrays, Cifar
from pfedafm_jax.data.official import read_members
from pfedafm_jax.errors import PfedafmError

REACH_SECONDS = 6.0


def default_tfds_dir() -> Path:
    """Where TFDS keeps its datasets unless told otherwise."""
    return Path(os.path.expanduser(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"))


def find_prepared(cifar: Cifar, root: Path) -> Path | None:
    """The newest prepared version under `root`, which may be the TFDS folder, `cifar10/` in it or a version of that."""
    infos = [root / "dataset_info.json"] if root.parent.name == cifar.name else []
    for folder in (root, root / cifar.name):
        if folder.name == cifar.name:
            infos += sorted(folder.glob("*.*.*/dataset_info.json"), key=version_key, reverse=True)
    return next((info.parent for info in infos if os.path.isfile(info)), None)


def read_prepared(cifar: Cifar, folder: Path) -> Arrays:
    """The four arrays from a prepared folder in array_record or tfrecord form, back in the official order."""
    try:
        import tensorflow_datasets as tfds  # slow to import, and needed only here

        builder = tfds.builder_from_directory(folder)
        train = _split(builder, "train", cifar)
        test = _split(builder, "test", cifar)
    except PfedafmError:
        raise
    except Exception as error:  # TFDS, array_record and Pillow raise many types on damaged input
        raise PfedafmError(f"{folder}: not a readable TFDS folder ({first_line(error)})") from error
    return Arrays(*train, *test)


def download(cifar: Cifar, tfds_dir: Path) -> Arrays:
    """Download and prepare with TFDS under `tfds_dir`, then read. Fails within seconds if the host is out of reach."""
    try:
        builder = _builder(cifar, tfds_dir)
        # TFDS retries an unreachable host for minutes without a word, so it is left alone until the host answers.
        check_reachable(builder.archive_url)
        # TFDS reports on standard output, which belongs to our own results.
        with contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare()
    except PfedafmError:
        raise
    except Exception as error:  # network, disk and checksum errors of TFDS have no common type
        raise PfedafmError(f"TFDS could not prepare {cifar.name} ({first_line(error)})") from error
    return read_prepared(cifar, Path(str(builder.data_path)))


def check_reachable(url: str, seconds: float = REACH_SECONDS) -> None:
    """Raise unless the host of `url` answers a request for it within `seconds`."""
    import requests  # what TFDS downloads with: the same proxies and certificates apply

    problem: list[str] = ["no answer"]

    def ask() -> None:
        try:
            with requests.head(url, timeout=seconds, allow_redirects=True) as answer:
                problem[0] = "" if answer.status_code < 500 else f"it answered {answer.status_code}"
        except Exception as error:
            problem[0] = type(error).__name__

    # In a thread, because name resolution knows no timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * seconds)
    if problem[0]:
        raise PfedafmError(f"{urlsplit(url).hostname} cannot be reached ({problem[0]})")


def _split(builder: Any, split: str, cifar: Cifar) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a split. TFDS shuffles what it writes; the ids say where each example was."""
    num = builder.info.splits[split].num_examples
    images = np.zeros((num, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    labels = np.zeros(num, np.uint8)
    seen = np.zeros(num, bool)
    for example in examples(builder, split):
        identity = example["id"]
        text = identity.decode() if isinstance(identity, bytes) else str(identity)
        position = int(text.removeprefix(f"{split}_"))
        if not 0 <= position < num or seen[position]:
            raise PfedafmError(f"{builder.data_path}: unexpected example id {text!r} in split {split}")
        images[position], labels[position], seen[position] = example["image"], example["label"], True
    if not seen.all():
        raise PfedafmError(f"{builder.data_path}: split {split} lacks {num - int(seen.sum())} of its {num} examples")
    return images, labels


def examples(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    paths = [Path(str(path)) for path in builder.info.splits[split].filepaths]
    if any(".tfrecord" in path.name for path in paths):
        # TFDS reads this form only through TensorFlow, yet the framing is simple and the rest is TFDS's own.
        for path in paths:
            for record in _tfrecords(path):
                yield builder.info.features.deserialize_example_np(record)
    else:
        yield from builder.as_data_source(split=split)


def _tfrecords(path: Path) -> Iterator[bytes]:
    """Records of a TFRecord file: 8 bytes length, 4 bytes checksum, the record, 4 bytes checksum."""
    content = path.read_bytes()
    offset = 0
    while offset < len(content):
        # The checksums are left alone: all images are held against their official sums afterwards.
        start = offset + 12
        end = start + int.from_bytes(content[offset : offset + 8], "little")
        if end + 4 > len(content):
            raise PfedafmError(f"{path}: cut short at byte {len(content)}")
        yield content[start:end]
        offset = end + 4


def _builder(cifar: Cifar, tfds_dir: Path) -> Any:
    """A TFDS builder of the stock name and version that prepares without TensorFlow."""
    from tensorflow_datasets.image_classification import cifar as stock

    parent: Any = {"cifar10": stock.Cifar10, "cifar100": stock.Cifar100}[cifar.name]

    class WithoutTensorFlow(parent, skip_registration=True):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
        name = cifar.name

        @property
        def archive_url(self) -> str:
            return self._cifar_info.url

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            stock_info = self._cifar_info
            archive = Path(str(dl_manager.download(stock_info.url)))  # TFDS holds it against its own checksum
            with tarfile.open(archive) as tar:
                files = [*stock_info.label_files, *stock_info.train_files, *stock_info.test_files]
                content = read_members(tar, archive, [stock_info.prefix + file for file in files])
            for key, file in zip(stock_info.label_keys, stock_info.label_files, strict=True):
                names = content[stock_info.prefix + file].decode().split("\n")
                self.info.features[key].names = [name for name in names if name]
            parts = {"train": stock_info.train_files, "test": stock_info.test_files}
            return {
                split: self._generate_examples(f"{split}_", [content[stock_info.prefix + file] for file in files])
                for split, files in parts.items()
            }

        def _generate_examples(self, split_prefix: str, filepaths: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
            keys = self._cifar_info.label_keys
            rows = np.frombuffer(b"".join(filepaths), np.uint8).reshape(-1, len(keys) + IMAGE_BYTES)
            for index, row in enumerate(rows):
                pixels = row[len(keys) :].reshape(3, IMAGE_SIZE, IMAGE_SIZE).transpose(1, 2, 0)
                example: dict[str, Any] = {key: int(value) for key, value in zip(keys, row, strict=False)}
                example["id"] = f"{split_prefix}{index:05d}"
                example["image"] = Image.fromarray(np.ascontiguousarray(pixels))  # an array would need TensorFlow
                yield index, example

    return WithoutTensorFlow(data_dir=str(tfds_dir), file_format="array_record")


def version_key(info: Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in info.parent.name.split("."))


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
