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
    """20 training and 4 test images with the sums to go with them, and writers for every form."""

    def __init__(self, official: Cifar):
        classes = official.num_classes
        draw = partial(np.random.default_rng(classes).integers, dtype=np.uint8)
        train = draw(256, size=(20, 32, 32, 3)), draw(classes, size=20)
        self.arrays = Arrays(*train, draw(256, size=(4, 32, 32, 3)), draw(classes, size=4))
        self.cifar = replace(official, sums=sums_of(self.arrays))

    def files(self, form: str) -> dict[str, bytes]:
        """The official files by name; `form` is "python" or "binary"."""
        archive, found = getattr(self.cifar, form), {}
        train, test = self.arrays[:2], self.arrays[2:]
        for names, images, labels in ((archive.train_files, *train), (archive.test_files, *test)):
            planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
            batches = np.array_split(np.arange(len(images)), len(names))
            for name, rows in zip(names, batches, strict=True):
                if form == "python":
                    found[name] = python_2_pickle(planes[rows], labels[rows], self.cifar.label_key)
                else:
                    coarse = np.full((len(rows), self.cifar.label_bytes - 1), 7, np.uint8)
                    columns = coarse, labels[rows, None], planes[rows]
                    found[name] = np.concatenate(columns, axis=1).tobytes()
        return found

    def write_folder(self, parent: Path, form: str) -> Path:
        folder = parent / getattr(self.cifar, form).folder
        folder.mkdir(parents=True)
        for name, content in self.files(form).items():
            (folder / name).write_bytes(content)
        return folder

    def write_archive(self, parent: Path, form: str, extra: dict[str, bytes] | None = None) -> Path:
        archive = getattr(self.cifar, form)
        content = {f"{archive.folder}/{name}": data for name, data in self.files(form).items()}
        return write_tar(parent / archive.file, {**(extra or {}), **content})

    def write_npm_package(self, path: Path) -> Path:
        batches = enumerate(np.split(self.arrays.train_images, 5), 1)
        content = {f"package/data_batch_{number}.png": _sheet(batch) for number, batch in batches}
        content["package/test_batch.png"] = _sheet(self.arrays.test_images)
        for part, labels in (
            ("train", self.arrays.train_labels),
            ("test", self.arrays.test_labels),
        ):
            content[f"package/{part}_lables.json"] = json.dumps(labels.tolist()).encode()
        return write_tar(path, content)


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
def stock_url(monkeypatch):
    """Make the stock TFDS builders believe that their archive is at another address."""

    def point(cifar: Cifar, url: str) -> None:
        from tensorflow_datasets.image_classification import cifar as stock

        cls = {"cifar10": stock.Cifar10, "cifar100": stock.Cifar100}[cifar.name]
        original = cls._cifar_info.fget
        replaced = property(lambda self: original(self)._replace(url=url))
        monkeypatch.setattr(cls, "_cifar_info", replaced)

    return point


_CLASS_NAMES = {
    "cifar10": {"batches.meta.txt": 10},
    "cifar100": {"coarse_label_names.txt": 20, "fine_label_names.txt": 100},
}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def tfds_folder(tiny, stock_url, tmp_path, tmp_path_factory):
    """A TFDS folder with tiny CIFAR prepared in it, downloaded from a local web server."""
    folder, archive = tmp_path_factory.mktemp("www"), tiny.cifar.binary
    names = {
        f"{archive.folder}/{file}": "\n".join(map(str, range(num))).encode()
        for file, num in _CLASS_NAMES[tiny.cifar.name].items()
    }
    tiny.write_archive(folder, "binary", names)
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
