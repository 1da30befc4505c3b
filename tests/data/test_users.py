"""Data that say whose they are: a folder a user, LEAF's JSON."""

import json
import os
import re

import numpy as np
import pytest
from PIL import Image

from pfedafm_jax import Config, PfedafmError, load_dataset, split
from pfedafm_jax.data.sources import leaf
from pfedafm_jax.data.sources.leaf import token_ids


def picture(path, grey=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 6), grey).save(path)


def test_a_folder_a_user(tmp_path):
    for grey, name in enumerate(["eva/cat/1", "eva/dog/1", "eva/dog/2", "adam/dog/1"]):
        picture(tmp_path / "users" / f"{name}.png", grey)
    found = load_dataset(f"folder:{tmp_path}")
    assert found.class_names == ("cat", "dog") and found.labels.tolist() == [1, 0, 1, 1]
    assert found.images[:, 0, 0, 0].tolist() == [3, 0, 1, 2]
    assert found.users is not None and found.users.tolist() == [0, 1, 1, 1]  # adam, eva
    assert found.source.endswith("4 images of 2 classes and 2 users")
    config = Config(partition="natural", num_clients=2, participation=0.5)
    parts = split(config, found)
    assert parts.train[0].tolist() == [0] and len(parts.train[1]) == 2
    assert parts.about == "the data's own users, paper protocol"


def test_users_in_train_and_test(tmp_path):
    for part in ("train", "test"):
        for name in ("a/x", "a/y", "b/x"):
            picture(tmp_path / part / "users" / name / "0.png")
    found = load_dataset(f"folder:{tmp_path}")
    assert found.num_train == 3 and found.users is not None
    assert found.users.tolist() == [0, 0, 1] * 2
    (tmp_path / "test" / "users").rename(tmp_path / "test" / "x")
    with pytest.raises(PfedafmError, match="users/ is needed in both"):
        load_dataset(f"folder:{tmp_path}")


def test_a_folder_with_more_than_users_is_one_of_classes(tmp_path):
    for name in ("users/0.png", "others/0.png"):
        picture(tmp_path / name)
    found = load_dataset(f"folder:{tmp_path}")
    assert found.class_names == ("others", "users") and found.users is None


def test_a_user_without_images_is_named(tmp_path):
    picture(tmp_path / "users" / "a" / "x" / "0.png")
    (tmp_path / "users" / "b" / "y").mkdir(parents=True)
    with pytest.raises(PfedafmError, match="users/b: user b has no images"):
        load_dataset(f"folder:{tmp_path}")


def write(path, part, file, own, **more):
    """A file of LEAF: {user: (x, y)}."""
    (path / part).mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(own),
        "num_samples": [len(x) for x, _ in own.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in own.items()},
    }
    (path / part / file).write_text(json.dumps({**content, **more}))


def test_leaf_of_flat_pixels(tmp_path):
    write(
        tmp_path,
        "train",
        "a.json",
        {"f1": ([[0.0, 1, 1, 0], [1, 1, 0, 0]], [0, 2]), "f0": ([[0, 0, 1.0, 0]], [1])},
    )
    write(tmp_path, "train", "b.json", {"f2": ([[1, 1, 1, 1.0]], [1])})
    write(tmp_path, "test", "a.json", {"f2": ([[0, 0, 0, 0.5]], [1]), "f1": ([[0, 1, 1, 0.0]], [0])})  # fmt: skip
    found = load_dataset(f"leaf:{tmp_path}")
    assert found.dtype == "float32" and found.image_shape == (4,) and found.num_train == 4
    assert found.labels.tolist() == [0, 2, 1, 1, 1, 0] and found.num_classes == 3
    assert found.users is not None and found.users.tolist() == [1, 1, 0, 2, 2, 1]
    assert found.mean == (0.5, 0.75, 0.75, 0.25)
    assert "4 training and 2 test samples of 3 users" in found.source
    images = load_dataset(f"leaf:{tmp_path}", image_size=2)
    assert images.image_shape == (2, 2, 1) and images.mean == (0.5625,) and images.noun == "images"
    np.testing.assert_allclose(images.images[0, :, :, 0] > 0, [[False, True], [True, False]])
    # Everybody's own test samples, where there are some.
    config = Config(partition="natural", num_clients=3, protocol="authors", participation=1.0)
    parts = split(config, found)
    assert [rows.tolist() for rows in parts.test] == [[], [5], [4]]
    assert parts.about == "the data's own users, their own test images"
    with pytest.raises(PfedafmError, match=r"samples float64 \[4\]; image_size 3 needs flat lists"):
        load_dataset(f"leaf:{tmp_path}", image_size=3)


def test_leaf_of_whole_numbers_is_token_ids_or_pixels(tmp_path):
    write(tmp_path, "train", "a.json", {"a": ([[0, 255, 3, 4], [1, 2, 3, 4]], [0, 1])})
    assert load_dataset(f"leaf:{tmp_path}").dtype == "int32"
    images = load_dataset(f"leaf:{tmp_path}", image_size=2)
    assert images.dtype == "uint8" and images.images[0, 0, 1, 0] == 255
    write(tmp_path, "train", "a.json", {"a": ([[0, 256, 3, 4], [1, 2, 3, 4]], [0, 1])})
    with pytest.raises(PfedafmError, match="image_size 2 needs flat lists"):
        load_dataset(f"leaf:{tmp_path}", image_size=2)


def test_leaf_of_texts(tmp_path):
    write(
        tmp_path,
        "train",
        "a.json",
        {"HAMLET": (["to b", "not"], ["e", " "]), "OPHELIA": (["é"], ["t"])},
    )
    found = load_dataset(f"leaf:{tmp_path}")
    assert found.dtype == "int32" and found.class_names == (" ", "e", "t")
    assert found.images.tolist() == [[116, 111, 32, 98], [110, 111, 116, 0], [195, 169, 0, 0]]
    assert found.labels.tolist() == [1, 0, 2]
    with pytest.raises(PfedafmError, match=r"image_size = 2 .* 0, for the texts"):
        load_dataset(f"leaf:{tmp_path}", image_size=2)
    np.testing.assert_array_equal(token_ids(["abc"], 2), [[97, 98]])
    with pytest.raises(PfedafmError, match="has 0 bytes"):
        token_ids(["", ""])


GOOD = {"a": ([[1.0], [2.0]], [0, 1])}


@pytest.mark.parametrize(
    ("users", "more", "said"),
    [
        ({"a": ([[1.0], [2.0, 3.0]], [0, 1])}, {}, "user 'a' .*different lengths"),
        ({**GOOD, "b": ([[1.0, 2.0]], [0])}, {}, r"'a' .*samples \[1\] .*'b' .*samples \[2\] "),
        ({**GOOD, "b": ([], [])}, {}, "user 'b' of .*x.json has no data"),
        ({"a": ([[1.0], [2.0]], [0])}, {}, "user 'a' of .* has 2 samples, 1 labels"),
        ({"a": ([[1.0], [2.0]], [0, 1.5])}, {}, "labels that are neither"),
        ({"a": ([[1.0], [2.0]], [0, -1])}, {}, "labels that are neither"),
        ({"a": ([[1.0], [float("nan")]], [0, 1])}, {}, "'a' .*not finite in sample 1"),
        ({"a": ([[1.0], [None]], [0, 1])}, {}, "neither lists of numbers nor texts"),
        ({"a": ([[1.0], "x"], [0, 1])}, {}, "different lengths|neither lists of numbers nor texts"),
        ({"a": ([1.0, 2.0], [0, 1])}, {}, "neither lists of numbers nor texts"),
        ({"a": (["1.jpg", "2.jpg"], [0, 1])}, {}, r"names of files \('1.jpg'\).*users/NAME/CLASS"),
        (GOOD, {"num_samples": [3]}, "other num_samples"),
        (GOOD, {"num_samples": [2, 2]}, "a number for each of 1 users"),
        (GOOD, {"users": ["a", "b"]}, "user 'b' is in one of users and user_data only"),
        (GOOD, {"users": ["a", "a"]}, "each of them once"),
        (GOOD, {"users": []}, "accepted: users, num_samples, user_data"),
        (
            GOOD,
            {"user_data": {"a": {"x": [[1.0], [2.0]]}}},
            "user 'a' .*has no data; accepted: x and y",
        ),
        (GOOD, {"user_data": {"a": 3}}, "user 'a' .*has no data"),
        (GOOD, {"user_data": [3]}, "holds users, num_samples, user_data; accepted"),
    ],
)
def test_leaf_that_cannot_be_used_is_named_with_file_and_user(users, more, said, tmp_path):
    write(tmp_path, "train", "x.json", users, **more)
    with pytest.raises(PfedafmError, match=said):
        load_dataset(f"leaf:{tmp_path}")


@pytest.mark.parametrize(
    "content", ["{", "[1]", "3", "[" * 100_000, "", "null", '{"users": 1' + "0" * 5000 + "}"]
)
def test_damaged_json_is_named(content, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.json").write_text(content)
    with pytest.raises(PfedafmError, match=re.escape(str(tmp_path / "train" / "x.json"))):
        load_dataset(f"leaf:{tmp_path}")


def test_json_that_is_no_file_or_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(PfedafmError, match="has no train"):
        load_dataset(f"leaf:{tmp_path}")
    (tmp_path / "train").mkdir()
    os.mkfifo(tmp_path / "train" / "x.json")
    with pytest.raises(PfedafmError, match="not a regular file"):
        load_dataset(f"leaf:{tmp_path}")
    (tmp_path / "train" / "x.json").unlink()
    write(tmp_path, "train", "x.json", GOOD)
    monkeypatch.setattr(leaf, "MAX_BYTES", 10)
    with pytest.raises(PfedafmError, match=r"over 10 bytes; split it by users"):
        load_dataset(f"leaf:{tmp_path}")
