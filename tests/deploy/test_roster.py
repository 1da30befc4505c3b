"""Who may take part in a federation: what nodes say of themselves, and where it is kept."""

import json

import numpy as np
import pytest
from small import small_config

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.base.files import digest
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import arrays
from pfedafm_jax.deploy.roster import Roster, classes_of, federation_of
from pfedafm_jax.deploy.server import Nodes

CLASSES = ["cat", "dog"]
HELLO = {"image_shape": [4, 4, 1], "dtype": "uint8", "classes": CLASSES, "architecture": None,
         "num_train": 10, "num_test": 5, "mean": [0.5], "std": [0.25]}  # fmt: skip


def roster(folder, method="fedproto", clients=2):
    config = updated(small_config(method), num_clients=clients)
    return Roster(folder / "nodes.json", config, CLASSES)


def test_classes_are_given_counted_or_those_of_the_dataset():
    assert classes_of(Config(), "cat,dog") == CLASSES
    assert classes_of(Config(), "3") == ["0", "1", "2"]
    assert classes_of(Config(dataset="cifar10"), None)[:2] == ["airplane", "automobile"]
    assert classes_of(Config(dataset="synthetic", synthetic_classes=2), None) == ["0", "1"]
    for given in ("1", "cat", "cat,cat", "²", ""):
        with pytest.raises(PfedafmError, match=f"classes = '{given}' cannot be used; .* two or"):
            classes_of(Config(), given)


def test_statistics_of_all_images_come_from_those_of_each_node(tmp_path):
    """30 images of mean 0 and deviation 1 and 10 of mean 4 and deviation 3: their mean is 1, that of
    squares (30 · 1 + 10 · (9 + 16)) / 40 = 7, and the deviation the root of 7 - 1."""
    made = roster(tmp_path)
    made.admit(1, HELLO | {"num_train": 10, "mean": [4], "std": [3]})
    assert not made.complete and not (tmp_path / "nodes.json").exists()
    made.admit(0, HELLO | {"num_train": 30, "mean": [0], "std": [1], "architecture": "dense_b"})
    assert made.about["mean"] == [1.0] and made.about["std"] == [pytest.approx(6**0.5)]
    sizes = {"num_test": 5, "num_train": 10}
    assert made.nodes[1] == {"architecture": "dense_b", **sizes}  # the second of the settings
    kept = roster(tmp_path)
    assert (kept.nodes, kept.about) == (made.nodes, made.about)
    kept.admit(1, HELLO)  # it is back, as it was
    with pytest.raises(ValueError, match=r"comes with .*'num_test': 6.* and was there with"):
        kept.admit(1, HELLO | {"num_test": 6})
    federation = federation_of(kept.config, kept)
    data = federation.data
    assert (data.image_shape, data.class_names, data.at_nodes) == ((4, 4, 1), ("cat", "dog"), True)
    assert [*federation.num_train, *federation.num_test] == [30, 10, 5, 5]
    assert federation.groups.tolist() == [1, 1]  # both have the second architecture
    small = roster(tmp_path / "dark")  # two pictures of one colour each
    for client in (0, 1):
        small.admit(client, HELLO | {"mean": [0.5], "std": [0.001 * client]})
    assert small.about["std"] == [1 / 255]
    same = roster(tmp_path / "alone", clients=1)
    same.admit(0, HELLO)
    assert (same.about["mean"], same.about["std"]) == ([0.5], [0.25])


def test_statistics_of_features_are_those_of_all_rows_together(tmp_path):
    draw = np.random.default_rng(0)
    rows = draw.normal(0.5, 1, (300, 4)) * [1e-4, 1, 0, 0] + [0, 1e9, 5, 0]
    rows[200:, 3] = 1.0  # constant at each node, not in all
    made = roster(tmp_path)
    for client, own in enumerate((rows[:200], rows[200:])):
        head = {"image_shape": [4], "dtype": "float32", "num_train": len(own)}
        statistics = {"mean": own.mean(axis=0).tolist(), "std": own.std(axis=0).tolist()}
        made.admit(client, HELLO | head | statistics)
    mean, std = arrays.statistics(rows)
    assert std[2] == 1.0 and made.about["mean"] == pytest.approx(mean)
    assert made.about["std"] == pytest.approx(std)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"classes": ["cat", "cow", "dog"]}, r"data has 3 classes \(cat, cow, dog, …\), the .* 2"),
        ({"image_shape": [4, 4, 3]}, r"image_shape of its data is \[4, 4, 3\], of others \[4, 4"),
        ({"dtype": "float32"}, "dtype of its data is float32, of others uint8"),
        ({"architecture": "cnn1"}, "its architecture is cnn1; the federation has dense_a, dense_b"),
        ({"num_test": 0}, "it has {'num_train': 10, 'num_test': 0} images"),
        ({"num_train": 10**7}, r"'num_train': 10000000, .* accepted: 1 to 10000000 in all"),
        ({"mean": [0.5] * 3}, "another number of channels than its images"),
    ],
)
def test_what_does_not_fit_the_federation_is_refused_and_not_noted(words, said, tmp_path):
    made = roster(tmp_path)
    made.admit(0, HELLO)
    with pytest.raises(ValueError, match=said):
        made.admit(1, HELLO | words)
    assert list(made.nodes) == [0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dtype": "f4,,"}, r"its data are f4,, \[4, 4, 1\]"),
        ({"image_shape": []}, r"its data are uint8 \[\]"),
        ({"image_shape": ["4", "4", "1"]}, r"its data are uint8 \['4', '4', '1'\]"),
        ({"image_shape": [-4, 4, 1]}, r"its data are uint8 \[-4, 4, 1\]"),
        ({"image_shape": [10**4, 10**4, 1]}, r"\[10000, 10000, 1\]; .* 10000000 numbers in all"),
        ({"image_shape": [1] * 9}, r"its data are uint8 \[1, 1, 1, 1, 1, 1, 1, 1, 1\]"),
        ({"mean": [float("nan")]}, "mean and std are not finite, or a deviation is below 0"),
        ({"std": [-1]}, "mean and std are not finite, or a deviation is below 0"),
    ],
)
def test_the_first_node_cannot_set_what_no_data_have(words, said, tmp_path):
    made = roster(tmp_path)
    with pytest.raises(ValueError, match=said):
        made.admit(0, HELLO | words)
    assert not made.nodes and "image_shape" not in made.about


def test_where_all_have_one_network_it_is_the_shared_one(tmp_path):
    made = roster(tmp_path, "fedavg", clients=1)
    with pytest.raises(ValueError, match="is dense_a; the federation has dense_b"):
        made.admit(0, HELLO | {"architecture": "dense_a"})
    made.admit(0, HELLO)
    assert made.nodes[0]["architecture"] == "dense_b"


def test_a_roster_that_was_changed_is_named(tmp_path):
    made = roster(tmp_path, clients=1)
    made.admit(0, HELLO)
    path = tmp_path / "nodes.json"
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.raises(PfedafmError, match=r"nodes\.json is damaged \(it has changed since"):
        roster(tmp_path, clients=1)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"nodes": []}', '{"nodes": {"a": 1}}', '{"nodes": {}}',
                                     '{"nodes": {}, "classes": 2}',
                                     '{"nodes": {}, "classes": ["cat", "dog"]}'])  # fmt: skip
def test_a_damaged_roster_is_named(content, tmp_path):
    (tmp_path / "nodes.json").write_text(content)
    with pytest.raises(PfedafmError, match=r"nodes\.json is damaged .*--fresh starts over"):
        roster(tmp_path)


def test_a_roster_of_other_classes_is_not_taken_for_this_ones(tmp_path):
    kept = dict.fromkeys(("federation", "image_shape", "dtype", "mean", "std"), "")
    kept |= {"nodes": {}, "classes": ["cat", "cow"]}
    (tmp_path / "nodes.json").write_text(json.dumps(kept | {"sha256": digest(kept)}))
    with pytest.raises(PfedafmError, match=r"classes = 'cat,dog' .*accepted: cat,cow"):
        roster(tmp_path)


class Told:
    """A link that notes what nodes are told; `owners` are the clients of their keys."""

    def __init__(self, owners):
        self.owners, self.said = owners, []

    def ask(self, node, head, body, seconds):
        self.said.append((node, head))


@pytest.mark.parametrize(
    ("head", "owners", "said"),
    [
        ({"error": "my disk is full"}, None, "my disk is full"),
        (HELLO | {"client": 0}, {}, "its key is not among those of this federation"),
        (HELLO | {"client": 0}, {7: 1}, "it says it is client 0 and has the key of 1"),
        (HELLO | {"client": 2}, None, "client 2; accepted: 0 to 1"),
        (HELLO | {"client": True}, None, "client True; accepted: 0 to 1"),
        ({"client": 0}, None, "'image_shape'"),
    ],
)
def test_a_node_that_is_refused_is_told_why(head, owners, said, tmp_path):
    link, lines = Told(owners), []
    nodes = Nodes(link, roster(tmp_path), lines.append)
    nodes._admit((7, "now"), head)
    assert lines == [f"node 7 is refused: {said}"] and not nodes.roster.nodes
    assert link.said == [(7, {"kind": "bye", "why": lines[0]})]
