"""What is read of one's own: pictures to classify, and a client's own images and labels."""

import struct
import zlib

import jax
import numpy as np
import pytest
from PIL import Image

from pfedafm_jax import PfedafmError, load_dataset
from pfedafm_jax.data.images import read_pictures
from pfedafm_jax.data.sources.folder import read_own

RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4)  # a grey picture, 4 wide and 3 high
DEEP = RAMP.astype(np.uint16) * 5000


def wanted(*shape, dtype="uint8"):
    return jax.ShapeDtypeStruct((1, *shape), dtype)


@pytest.mark.parametrize("images", [RAMP, RAMP[None], RAMP[..., None], RAMP[None, ..., None]])
def test_a_single_picture_and_a_grey_one_may_lack_axes(images, tmp_path):
    np.savez(tmp_path / "x.npz", x=images, other=0)
    np.save(tmp_path / "x.npy", images)
    for source in (images, tmp_path / "x.npz", str(tmp_path / "x.npy")):
        found, names = read_pictures(source, wanted(3, 4, 1))
        np.testing.assert_array_equal(found, RAMP[None, ..., None])
        assert names == ["0"]


@pytest.mark.parametrize(
    ("source", "shape", "dtype", "said"),
    [
        ("grey.png", (3, 4), "float32", r"'image files' .* an array float32 \[num, 3, 4\], as the"),
        ("grey.png", (4, 3, 1), "uint8", r"grey.png' is 4x3; accepted: 3x4, as the model was tr"),
        ("grey.png", (3, 4, 1), "float32", "grey.png' is uint8; accepted: float32"),
        ("grey.png", (3, 4, 4), "uint8", "grey.png' is RGB; accepted: 4 channels"),
        ("deep.png", (3, 4, 1), "uint8", "deep.png' is float32; accepted: uint8"),
        ("deep.png", (3, 4, 3), "float32", "deep.png' is grey; accepted: 3 channels"),
        ("empty", (3, 4, 1), "uint8", r"empty' cannot be used; .* files that end in \.png"),
        ("empty.npz", (3, 4, 1), "uint8", "holds nothing; accepted: an array named images or x"),
        ("other.npz", (3, 4, 1), "uint8", "holds picture; accepted: an array named images or x"),
        ("text.npy", (3, 4, 1), "uint8", r"text.npy' cannot be read as a file of arrays \(Value"),
    ],
)
def test_pictures_that_do_not_fit_the_model_are_refused(source, shape, dtype, said, tmp_path):
    Image.fromarray(RAMP).save(tmp_path / "grey.png")
    Image.fromarray(DEEP).save(tmp_path / "deep.png")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "other.npz", picture=RAMP)
    (tmp_path / "text.npy").write_text("1 2 3")
    with pytest.raises(PfedafmError, match=said):
        read_pictures(tmp_path / source, wanted(*shape, dtype=dtype))


def test_the_classes_of_a_clients_folder_are_found_by_name(tmp_path):
    for place, grey in (("train/dog", 1), ("train/cat", 2), ("test/dog", 3)):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (8, 6), grey).save(tmp_path / place / "1.png")
    found = read_own(f"folder:{tmp_path}", ["ant", "dog", "cat"], image_size=2)
    assert found.train_images[:, 0, 0, 0].tolist() == [2, 1]  # cat, dog
    assert (found.train_labels.tolist(), found.test_labels.tolist()) == ([2, 1], [1])
    assert found.test_images.shape == (1, 2, 2, 1)
    with pytest.raises(PfedafmError, match="has the class 'cat'; the run knows ant, dog"):
        read_own(str(tmp_path), ["ant", "dog"])


def test_users_of_test_images_are_needed_where_there_are_users(tmp_path):
    own = {"images": RAMP[None].repeat(2, 0), "labels": [0, 1], "user": ["a", "b"]}
    np.savez(tmp_path / "x.npz", **own, test_images=RAMP[None], test_labels=[0])
    with pytest.raises(PfedafmError, match="user and test_user are needed, for images and test_"):
        load_dataset(f"npz:{tmp_path / 'x.npz'}")


def chunk(kind, content):
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def test_a_colour_png_of_16_bits_is_refused_and_not_cut(tmp_path):
    about = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)  # 2x2, 16 bits, RGB
    parts = chunk(b"IHDR", about), chunk(b"IDAT", zlib.compress(bytes(26))), chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    with pytest.raises(PfedafmError, match=r"x\.png has colours of more than 8 bits \(RGB\)"):
        read_pictures(tmp_path / "x.png", wanted(2, 2, 3))
