"""Tiny stand-ins for CIFAR in every form it is published in; no network, no npm."""

import hashlib
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

from pfedafm_jax.data.sources import cifar as cifar_module
from pfedafm_jax.data.sources import tfds
from pfedafm_jax.data.sources.cifar import CIFAR10, CIFAR100, Arrays, Cifar, sums_of

_CLASS_NAMES = {
    "cifar10": {"batches.meta.txt": 10},
    "cifar100": {"coarse_label_names.txt": 20, "fine_label_names.txt": 100},
}


class Tiny:
    """20 training and 4 test images in every published form, with the digests to go with them."""

    def __init__(self, official: Cifar):
        classes = official.num_classes
        draw = partial(np.random.default_rng(classes).integers, dtype=np.uint8)
        train = draw(256, size=(20, 32, 32, 3)), draw(classes, size=20)
        self.arrays = Arrays(*train, draw(256, size=(4, 32, 32, 3)), draw(classes, size=4))
        self.cifar = official
        python_files, binary_files = self.files("python"), self.files("binary")
        label_names = {
            file: "\n".join(map(str, range(count))).encode()
            for file, count in _CLASS_NAMES[official.name].items()
        }
        self.packed = {
            "python": tarred(official.python.folder, python_files),
            "binary": tarred(official.binary.folder, {**label_names, **binary_files}),
        }
        self.cifar = replace(
            official,
            python=replace(official.python, sha256=sha256_of(self.packed["python"])),
            binary=replace(official.binary, sha256=sha256_of(self.packed["binary"])),
            python_md5={file: md5_of(content) for file, content in python_files.items()},
            sums=sums_of(self.arrays),
        )

    def files(self, form: str) -> dict[str, bytes]:
        """The official files by name; `form` is "python" or "binary"."""
        *train_files, test_file = getattr(self.cifar, form).files
        batches = np.array_split(np.arange(20), len(train_files))
        content = {
            file: self._file(form, self.arrays.train_images[rows], self.arrays.train_labels[rows])
            for file, rows in zip(train_files, batches, strict=True)
        }
        content[test_file] = self._file(form, self.arrays.test_images, self.arrays.test_labels)
        return content

    def _file(self, form: str, images: np.ndarray, labels: np.ndarray) -> bytes:
        planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        if form == "python":
            return python_2_pickle(planes, labels, self.cifar.label_key)
        coarse = np.full((len(images), self.cifar.label_bytes - 1), 7, np.uint8)
        return np.concatenate((coarse, labels[:, None], planes), axis=1).tobytes()

    def write_folder(self, parent: Path) -> Path:
        """The folder that the python archive unpacks to."""
        folder = parent / self.cifar.python.folder
        folder.mkdir(parents=True)
        for name, content in self.files("python").items():
            (folder / name).write_bytes(content)
        return folder

    def write_archive(self, parent: Path, form: str) -> Path:
        path = parent / getattr(self.cifar, form).file
        path.write_bytes(self.packed[form])
        return path

    def npm_package(self) -> bytes:
        batches = enumerate(np.split(self.arrays.train_images, 5), 1)
        content = {f"data_batch_{number}.png": _sheet(batch) for number, batch in batches}
        content["test_batch.png"] = _sheet(self.arrays.test_images)
        content["train_lables.json"] = json.dumps(self.arrays.train_labels.tolist()).encode()
        content["test_lables.json"] = json.dumps(self.arrays.test_labels.tolist()).encode()
        return tarred("package", content)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def md5_of(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def python_2_pickle(planes: np.ndarray, labels: np.ndarray, label_key: bytes) -> bytes:
    """As in the published files: protocol 2 of Python 2, dtype('u1', 0, 1), raw strings instead of
    bytes objects."""

    def text(raw: bytes) -> bytes:
        short = len(raw) < 256
        return (b"U" + bytes([len(raw)]) if short else b"T" + struct.pack("<i", len(raw))) + raw

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


def tarred(folder: str, content: dict[str, bytes]) -> bytes:
    """A .tar.gz archive of files in a folder."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


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
def stock_url(monkeypatch):
    """Make the stock TFDS builders believe that their archive is at another address."""

    def point(cifar: Cifar, url: str) -> None:
        from tensorflow_datasets.image_classification import cifar as stock

        cls = {"cifar10": stock.Cifar10, "cifar100": stock.Cifar100}[cifar.name]
        original = cls._cifar_info.fget
        replaced = property(lambda self: original(self)._replace(url=url))
        monkeypatch.setattr(cls, "_cifar_info", replaced)

    return point


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def tfds_folder(tiny, stock_url, tmp_path, tmp_path_factory):
    """A TFDS folder with tiny CIFAR prepared in it, downloaded from a local web server."""
    folder, archive = tmp_path_factory.mktemp("www"), tiny.cifar.binary
    tiny.write_archive(folder, "binary")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stock_url(tiny.cifar, f"http://127.0.0.1:{server.server_address[1]}/{archive.file}")
    tfds.download_cifar(tiny.cifar, tmp_path / "tfds")
    yield tmp_path / "tfds"
    server.shutdown()
    server.server_close()
    thread.join()


def as_tfrecord(version: Path) -> None:
    """Rewrites a prepared array_record folder as TFDS with TensorFlow would have made it."""
    from array_record.python.array_record_module import ArrayRecordReader
    from tensorboardX.record_writer import RecordWriter  # with checksums of its own

    for path in sorted(version.glob("*.array_record-*")):
        reader = ArrayRecordReader(str(path))
        writer = RecordWriter(str(path.with_name(path.name.replace("array_record", "tfrecord"))))
        for record in reader.read_all():
            writer.write(record)
        reader.close()
        writer.close()
        path.unlink()
    info = version / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
