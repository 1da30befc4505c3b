"""Data that no dataset can come from: damaged, endless, far too large, or that would run code."""

import io
import json
import os
import pickle
import random
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from pfedafm_jax import Partition, load_dataset
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.sources.cifar import CIFAR10


class Attack:
    def __reduce__(self):
        return os.mkdir, (str(Path(tempfile.gettempdir()) / "executed"),)


def zipped(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def header(shape, descr="|u1") -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (63 - (len(text) + 10) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def _dataset(draw: random.Random, place: Path) -> tuple[str, Path | None]:
    """(name, data_dir) of a source that no dataset can come from."""
    file, kind = place / "data.npz", draw.randrange(18)
    folder = place / "folder"
    labels = header((5,)) + bytes(5)
    if kind == 0:
        np.savez(file, images=np.array([Attack()], object), labels=np.zeros(1, int))
    elif kind == 1:
        zipped(file, images=header((draw.choice([10**6, 2**40, 2**62]), 32, 32, 3)), labels=labels)
    elif kind == 2:  # a bomb: what is declared is there, a thousand times the file
        number = draw.randrange(10**4, 10**5)
        zipped(file, images=header((number, 32, 32)) + bytes(1024 * number), labels=labels)
    elif kind == 3:
        np.savez(file, images=np.zeros((9, 8, 8), np.uint8), labels=np.arange(9) % 2)
        file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size - 1)])
    elif kind == 4:
        os.mkfifo(file)
    elif kind == 5:
        file.symlink_to(draw.choice(["/dev/zero", "/dev/random", "/proc/self/mem", str(file), "/"]))
    elif kind == 6:
        types = draw.choice(["|O", "<f8", "|V9", "<m8", "|S1000000", "[('a', 'O')]"])
        zipped(file, images=header((5, 8, 8), types) + bytes(320), labels=labels)
    elif kind == 7:
        objects = header((1,), "|O") + pickle.dumps([Attack()])
        file.write_bytes(draw.choice([b"", pickle.dumps(Attack()), draw.randbytes(900), objects]))
    if kind < 8:
        return f"npz:{file}", None
    if kind < 13:
        for name in ("a", "b"):
            (folder / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / name / "1.png")
        odd = folder / "a" / "2.png"
        if kind == 8:
            program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(executed) (w) file\n"
            odd.write_bytes(program)
        elif kind == 9:
            deep = draw.choice([np.full((8, 8), 300, np.uint16), np.full((8, 8), 2.5, np.float32)])
            Image.fromarray(deep).save(odd.with_suffix(".tif"))
        elif kind == 10:  # declares far more pixels than anybody has
            width = draw.choice([1_600, 60_000, 2**31 - 1])
            wide = struct.pack(">IIBBBBB", width, 60_000, 8, 2, 0, 0, 0)
            chunks = [(b"IHDR", wide), (b"IDAT", zlib.compress(bytes(10**6))), (b"IEND", b"")]
            pieces = [
                struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c))
                for n, c in chunks
            ]
            odd.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(pieces))
        elif kind == 11:
            odd.write_bytes((folder / "a" / "1.png").read_bytes()[: draw.randrange(8, 45)])
        else:
            suffix = draw.choice([".gif", ".ppm", ".webp", ".bmp"])
            odd.with_suffix(suffix).write_bytes(draw.randbytes(500))
        return f"folder:{folder}", None
    if kind == 13:
        for name in CIFAR10.python.files:
            data = draw.choice([Attack(), np.zeros((5, 3072), np.uint8)])
            batch = {b"data": data, b"labels": [0] * 5, b"x": Attack()}
            (place / name).write_bytes(pickle.dumps(batch, draw.choice([2, 4])))
        return "cifar10", place
    if kind == 14:
        version = place / "cifar10" / "3.0.2"
        version.mkdir(parents=True)
        about = {"name": "cifar10", "version": "3.0.2", "fileFormat": "array_record"}
        (version / "dataset_info.json").write_text(json.dumps(about))
        os.mkfifo(version / "features.json")
        return "cifar10", place
    if kind == 15:
        if draw.random() < 0.5:
            os.mkfifo(place / "cifar10.npz")  # in our cache
        else:
            (place / "cifar10.npz").symlink_to("/dev/zero")
        return "cifar10", None
    with tarfile.open(place / CIFAR10.python.file, "w:gz") as tar:
        for file in CIFAR10.python.files:
            name = f"{CIFAR10.python.folder}/{file}"
            member = tarfile.TarInfo(draw.choice([name, f"../{name}", f"/{name}"]))
            links = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
            member.type = draw.choice([tarfile.REGTYPE, *links])
            member.linkname, member.size = draw.choice(["/etc/passwd", "../x"]), 0
            content = pickle.dumps(Attack()) if member.isreg() else b""
            member.size = draw.choice([len(content), 2**40]) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content) if member.size == len(content) else None)
    return "cifar10", place


def hostile_source(draw: random.Random, place: Path) -> tuple[str, Callable[[], object]]:
    """A name, and what reads it: a dataset, a partition or a configuration."""
    if draw.random() < 0.2:
        path = place / "partition.npz"
        parts = ("train", "test", "validation")
        names = [f"{part}{end}" for part in parts for end in ("", "_sizes")]
        odd = [np.array([2**62]), np.array([-1]), np.array([Attack()], object), np.array([0.5])]
        plain = {name: np.zeros(1, int) for name in names}
        np.savez(path, **plain | {draw.choice(names): draw.choice(odd)})
        if draw.random() < 0.25:
            path.unlink()
            os.mkfifo(path)
        return str(path), lambda: Partition.load(path)
    if draw.random() < 0.1:
        (place / "deep.toml").write_text("x = " + draw.choice("[{") * 100_000)
        os.mkfifo(place / "pipe.toml")
        name = str(place / draw.choice(["deep.toml", "pipe.toml"]))
        return name, lambda: Config.load(name)
    name, where = _dataset(draw, place)
    return name, lambda: load_dataset(name, where, cache_dir=place, offline=True, log=print)
