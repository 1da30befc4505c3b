"""Tiny stand-ins for CIFAR in every form it is published in; no network, no npm."""

import io
import json
import struct
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pfedafm_jax.data import cifar as cifar_module
from pfedafm_jax.data import tfds
from pfedafm_jax.data.cifar import CIFAR10, CIFAR100, Arrays, Cifar, sums_of


class Tiny:
    """A dataset of 20 training and 4 test images with the sums to go with it, and writers for every
    form."""

    def __init__(self, official: Cifar):
        rng = np.random.default_rng(official.num_classes)
        draw = partial(rng.integers, dtype=np.uint8)
        self.arrays = Arrays(
            draw(256, size=(20, 32, 32, 3)),
            draw(official.num_classes, size=20),
            draw(256, size=(4, 32, 32, 3)),
            draw(official.num_classes, size=4),
        )
        self.cifar = replace(official, sums=sums_of(self.arrays))

    def _batches(self, names: tuple[str, ...], images: np.ndarray, labels: np.ndarray):
        planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        return zip(
            names,
            np.array_split(planes, len(names)),
            np.array_split(labels, len(names)),
            strict=True,
        )

    def python_files(self) -> dict[str, bytes]:
        archive = self.cifar.python
        train, test = self.arrays[:2], self.arrays[2:]
        batches = [
            *self._batches(archive.train_files, *train),
            *self._batches(archive.test_files, *test),
        ]
        return {
            name: python_2_pickle(planes, labels, self.cifar.label_key)
            for name, planes, labels in batches
        }

    def binary_files(self) -> dict[str, bytes]:
        archive = self.cifar.binary
        train, test = self.arrays[:2], self.arrays[2:]
        files = {}
        for name, planes, labels in [
            *self._batches(archive.train_files, *train),
            *self._batches(archive.test_files, *test),
        ]:
            coarse = np.full((len(labels), self.cifar.label_bytes - 1), 7, np.uint8)
            files[name] = np.concatenate([coarse, labels[:, None], planes], axis=1).tobytes()
        return files

    def write_folder(self, parent: Path, form: str) -> Path:
        folder = parent / getattr(self.cifar, form).folder
        folder.mkdir(parents=True)
        for name, content in getattr(self, f"{form}_files")().items():
            (folder / name).write_bytes(content)
        return folder

    def write_archive(self, parent: Path, form: str, extra: dict[str, bytes] | None = None) -> Path:
        archive = getattr(self.cifar, form)
        content = {
            f"{archive.folder}/{name}": data
            for name, data in getattr(self, f"{form}_files")().items()
        }
        return write_tar(parent / archive.file, {**(extra or {}), **content})

    def write_npm_package(self, path: Path) -> Path:
        content = {}
        for number, batch in enumerate(np.split(self.arrays.train_images, 5), 1):
            content[f"package/data_batch_{number}.png"] = _sheet(batch)
        content["package/test_batch.png"] = _sheet(self.arrays.test_images)
        content["package/train_lables.json"] = json.dumps(
            self.arrays.train_labels.tolist()
        ).encode()
        content["package/test_lables.json"] = json.dumps(self.arrays.test_labels.tolist()).encode()
        return write_tar(path, content)


def python_2_pickle(planes: np.ndarray, labels: np.ndarray, label_key: bytes) -> bytes:
    """As in the published files: protocol 2 of Python 2, dtype('u1', 0, 1), raw strings instead of
    bytes objects."""

    def text(raw: bytes) -> bytes:
        return (
            b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<i", len(raw))
        ) + raw

    head = b"\x80\x02}q\x01(" + text(b"batch_label") + text(b"x") + text(label_key) + b"]q\x02("
    body = b"".join(b"K" + bytes([label]) for label in labels) + b"e" + text(b"data")
    body += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    shape = b"K" + bytes([len(labels)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return head + body + shape + dtype + b"\x89" + text(planes.tobytes()) + b"tbu."


def _sheet(images: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(images.reshape(len(images), 1024, 3)).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, content: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def tiny(request, monkeypatch) -> Tiny:
    """Tiny CIFAR-10 and CIFAR-100; `load_dataset` takes them for the real ones."""
    made = Tiny(request.param)
    monkeypatch.setitem(cifar_module.CIFARS, made.cifar.name, made.cifar)
    return made


@pytest.fixture
def tiny10(monkeypatch) -> Tiny:
    made = Tiny(CIFAR10)
    monkeypatch.setitem(cifar_module.CIFARS, "cifar10", made.cifar)
    return made


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path_factory):
    """No test sees the user's cache or TFDS folder, and none can reach the internet or run npm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path_factory.mktemp("tfds")))
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def serve(tmp_path_factory):
    """A local web server: (folder it serves, its address)."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    folder = tmp_path_factory.mktemp("www")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def stock_url(monkeypatch):
    """Make the stock TFDS builders believe that their archive is at another address."""

    def point(cifar: Cifar, url: str) -> None:
        from tensorflow_datasets.image_classification import cifar as stock

        cls = {"cifar10": stock.Cifar10, "cifar100": stock.Cifar100}[cifar.name]
        original = cls._cifar_info.fget
        monkeypatch.setattr(
            cls, "_cifar_info", property(lambda self: original(self)._replace(url=url))
        )

    return point


@pytest.fixture
def tfds_folder(tiny, serve, stock_url, tmp_path) -> Path:
    """A TFDS folder with tiny CIFAR prepared in it, through the download path."""
    folder, address = serve
    names = {
        f"{tiny.cifar.binary.folder}/{file}": "\n".join(map(str, range(num))).encode()
        for file, num in _CLASS_NAMES[tiny.cifar.name].items()
    }
    tiny.write_archive(folder, "binary", names)
    stock_url(tiny.cifar, f"{address}/{tiny.cifar.binary.file}")
    tfds.download_cifar(tiny.cifar, tmp_path / "tfds")
    return tmp_path / "tfds"


_CLASS_NAMES = {
    "cifar10": {"batches.meta.txt": 10},
    "cifar100": {"coarse_label_names.txt": 20, "fine_label_names.txt": 100},
}


@pytest.fixture
def as_tfrecord():
    """Rewrite a prepared array_record folder as the tfrecord folder that TFDS with TensorFlow would
    have made."""

    def convert(version: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordReader

        for path in sorted(version.glob("*.array_record-*")):
            reader = ArrayRecordReader(str(path))
            records = reader.read_all()
            reader.close()
            frames = [struct.pack("<Q", len(r)) + b"crc1" + r + b"crc2" for r in records]
            path.with_name(path.name.replace("array_record", "tfrecord")).write_bytes(
                b"".join(frames)
            )
            path.unlink()
        info = version / "dataset_info.json"
        info.write_text(info.read_text().replace("array_record", "tfrecord"))

    return convert
