"""Using what was trained: predictions, newcomers, exported clients, and the commands for them."""

import csv
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from small import METHODS, small_config, small_data

from pfedafm_jax import PfedafmError, export_client, load_client, load_run, run
from pfedafm_jax.cli.commands import export, join, predict
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.inference import export as exporting
from pfedafm_jax.training.batches import ClientData

USUAL = ("pfedafm", "fedper", "fd", "standalone")
EVERY = [m if m in USUAL else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, experiment) of a method's run over two rounds."""

    @cache
    def of(method, **changes):
        folder = tmp_path_factory.mktemp(method) / "run"
        if method != "pfedafm":  # one architecture is compiled in half the time
            changes = {"architectures": ("dense_b",), **changes}
        config = small_config(method, rounds=2, checkpoint_every=1, **changes)
        return folder, run(config, *small_data(), run_dir=folder, progress=False)

    return of


@pytest.mark.parametrize("method", [*EVERY, "pfedafm_released"])
def test_a_client_predicts_what_the_run_recorded(method, trained):
    folder, experiment = trained(method)
    dataset, partition = small_data()
    opened = load_run(folder)
    assert opened.finished and opened.round == 2 and opened.classes == ["0", "1", "2", "3"]
    recorded = experiment.history.evaluations[2]
    for number in range(4):
        client, rows = opened.client(number), partition.test[number]
        found = client.predict(dataset.images[rows])
        assert list(found) == experiment.predictions == client.predictions
        for name, logits in found.items():
            right = np.mean(logits.argmax(axis=1) == dataset.labels[rows], dtype=np.float32)
            own = "accuracy" if name == experiment.predictions[0] else f"accuracy/{name}"
            assert right == recorded[own][number]
            assert client.card["accuracy"][name] == pytest.approx(float(right), abs=1e-6)
        assert client.params.keys() == experiment.state.clients.state(number).keys()
        chex.assert_trees_all_equal(client.params, experiment.state.clients.state(number))
        training = client.method.training
        images = normalise(dataset.images[rows], training.mean, training.std)
        state = (client.params, jax.device_get(experiment.state.server))
        plain = client.method.predict(client.architecture, *state, images)
        chex.assert_trees_all_close(found, plain, rtol=1e-5, atol=1e-5)
    shares = client.probabilities(dataset.images[:3])
    assert all(
        np.allclose(rows.sum(axis=1), 1) and rows.shape == (3, 4) for rows in shares.values()
    )


@pytest.mark.parametrize("method", EVERY)
def test_a_newcomer_trains_as_a_participant_and_leaves_the_federation_as_it_was(method, trained):
    folder, _ = trained(method)
    dataset, partition = small_data()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    rows, told = partition.train[1], []
    opened = load_run(folder)
    client = opened.join(
        dataset.images[rows],
        dataset.labels[rows],
        test_images=dataset.images[partition.test[1]],
        test_labels=dataset.labels[partition.test[1]],
        visits=2,
        log=lambda visit, accuracies: told.append((visit, accuracies)),
    )
    assert [visit for visit, _ in told] == [0, 1, 2] and client.history[2] == told[2][1]
    assert list(client.history[0]) == client.predictions  # the method's own first
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # The same by hand: a participant's work in rounds 3 and 4, with the last broadcast.
    method_, network, server = client.method, client.architecture, jax.device_put(opened.server)
    start = opened.join(dataset.images[rows], dataset.labels[rows], visits=0)
    state, key = start.params, jax.random.key(opened.config.seed)
    both = np.concatenate([rows, partition.test[1]])
    parts = (dataset.images[both], dataset.labels[both], np.arange(15), 15, 15 + np.arange(5), 5)
    data = ClientData(*map(jnp.asarray, parts))
    for number in (3, 4):
        visit = client_key(key, number, 4)
        state = method_.client_update(visit, network, state, server, data, np.float32(15)).client
    chex.assert_trees_all_close(client.params, jax.device_get(state), rtol=1e-4, atol=1e-6)
    found = client.predict(dataset.images[partition.test[1]])[client.predictions[0]]
    right = np.mean(found.argmax(axis=1) == dataset.labels[partition.test[1]])
    assert client.history[2][client.predictions[0]] == pytest.approx(right, abs=1e-6)


def test_a_newcomer_may_have_a_network_that_nobody_has_unless_all_have_one(trained):
    dataset, _ = small_data()
    opened = load_run(trained("pfedafm")[0])
    client = opened.join(dataset.images[:20], dataset.labels[:20], "dense_b", visits=1, seed=3)
    assert client.architecture.name == "dense_b" and client.card["newcomer"]["num_train"] == 16
    shared = load_run(trained("fedper")[0])
    with pytest.raises(PfedafmError, match="accepted: dense_b, which all clients of FedPer have"):
        shared.join(dataset.images[:20], dataset.labels[:20], "dense_a")
    with pytest.raises(PfedafmError, match="architecture = 'nothing' cannot be used"):
        opened.join(dataset.images[:20], dataset.labels[:20], "nothing")


def test_an_unfinished_run_is_used_as_its_last_checkpoint_left_it(tmp_path):
    one = {"architectures": ("dense_b",)}
    config = small_config("standalone", rounds=3, checkpoint_every=1, **one)
    with pytest.raises(ZeroDivisionError):
        run(config, *small_data(), run_dir=tmp_path / "run", progress=False, observers=[Stops()])
    said = []
    opened = load_run(tmp_path / "run", said.append)
    assert opened.round == 1 and not opened.finished and "after round 1 of 3" in said[0]
    visited = set(opened.run.records[0].participants)
    start = opened.join(*(part[:20] for part in (small_data()[0].images, small_data()[0].labels)))
    assert start.card["finished"] is False and opened.client(0).card["accuracy"] == {}
    text = exporting.readme(opened.client(0), [exporting.ONNX])
    assert "an unfinished run" in text and "accuracy: not evaluated after this round" in text
    assert "With ONNX: `network.onnx`, input `images`, outputs private." in text
    for number in {0, 1, 2, 3} - visited:  # a client that never took part is as it started
        chex.assert_trees_all_equal(opened.client(number).params, opened._start(number, 0))


class Stops:
    """Ends a run in its second round."""

    def start(self, folder, config, past):
        pass

    def round(self, observation):
        if observation.record.round == 2:
            1 / 0  # noqa: B018

    def finish(self, summary):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (np.zeros((2, 4, 3, 1), np.uint8), r"uint8 \[2, 4, 3, 1\]; accepted: uint8 \[num, "),
        (np.zeros((2, 3, 3, 1), np.float32), r"float32 \[2, 3, 3, 1\]; accepted"),
        ("nowhere.png", "images = 'nowhere.png' cannot be used; accepted: a .npy or .npz file"),
        (Path(__file__), "is not a readable image"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, said, trained):
    with pytest.raises(PfedafmError, match=said):
        load_run(trained("fd")[0]).client(0).predict(images)


def test_wrong_clients_runs_without_weights_and_damaged_ones_are_named(trained, tmp_path):
    folder, _ = trained("fd")
    opened = load_run(folder)
    for number in (-1, 4, "1"):
        with pytest.raises(PfedafmError, match=f"client = {number!r} .*accepted: 0 to 3"):
            opened.client(number)
    images, labels = small_data()[0].images[:20], small_data()[0].labels[:20]
    for arguments, said in (
        ((images, labels[:5]), "20 integers, one per image"),
        ((images, labels + 9), "labels run from 9 to 12; accepted: 0 to 3"),
        ((images[:4], labels[:4]), "both are needed"),
        ((images, labels, None, -1), "visits = -1 cannot be used"),
    ):
        with pytest.raises(PfedafmError, match=said):
            opened.join(*arguments)
    with pytest.raises(PfedafmError, match="test_images and test_labels are given together"):
        opened.join(images, labels, test_images=images)
    for seed in (-1, 2**31):
        with pytest.raises(PfedafmError, match=f"seed = {seed} cannot be used"):
            opened.join(images, labels, seed=seed)
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    said = []
    newest = max((copy / "checkpoints").glob("round-*.json"))
    victim = next(p for p in newest.with_suffix("").rglob("*") if p.is_file() and p.stat().st_size)
    victim.write_bytes(b"no longer what it was")
    assert load_run(copy, said.append).round == 1 and "round-000002 is skipped" in said[0]
    newest.write_text("{")
    assert load_run(copy, said.append).round == 1 and "round-000002.json is damaged" in said[-2]
    (newest.with_name("round-000001") / "clients" / ".DS_Store").touch()  # as file managers do
    assert load_run(copy, said.append).client(0).card["round"] == 1
    subprocess.run(["rm", "-r", copy / "checkpoints"], check=True)
    with pytest.raises(PfedafmError, match="has no weights to use: it has no checkpoint"):
        load_run(copy)


def test_what_is_no_run_or_of_an_unknown_method_is_told(trained, tmp_path):
    with pytest.raises(PfedafmError, match=r"run_dir = .*typo' .*there is no such folder"):
        load_run(tmp_path / "typo")
    folder, _ = trained("pfedafm")
    card = json.loads(json.dumps(load_run(folder).client(1).card))
    card["config"] |= {"method": "mine"}
    with pytest.raises(PfedafmError, match=r"method = 'mine' .*by --plugin FILE\.py"):
        exporting.model_of(card)


def test_an_exported_client_is_the_client(trained, tmp_path, monkeypatch):
    folder, _ = trained("pfedafm")
    client, images = load_run(folder).client(1), small_data()[0].images[:5]
    export_client(client, tmp_path / "out")
    again = load_client(tmp_path / "out")
    chex.assert_trees_all_equal(again.predict(images), client.predict(images))
    assert again.card == json.loads(json.dumps(client.card)) and again.classes == client.classes
    assert "client.header.kernel" in _names(tmp_path / "out" / "weights.safetensors")
    assert "Client 1 of pFedAFM, dense_b" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "out" / "card.json").unlink()  # as an interrupted export leaves it
    (tmp_path / "out" / "network.onnx").write_bytes(b"of another client")
    export_client(client, tmp_path / "out")  # over its own files, and over nobody else's
    assert not (tmp_path / "out" / "network.onnx").exists()
    with pytest.raises(PfedafmError, match="a new or empty folder"):
        export_client(client, folder)
    weights = tmp_path / "out" / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PfedafmError, match=r"weights\.safetensors' has changed"):
        load_client(tmp_path / "out")
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    for change, said in (
        ({"round": 3}, r"card\.json' .* \(ValueError: it has changed since it was written\)"),
        ({"format": 9}, "has format 9 and 1 is read here; export it again"),
    ):
        (tmp_path / "out" / "card.json").write_text(json.dumps(card | change))
        with pytest.raises(PfedafmError, match=said):
            load_client(tmp_path / "out")
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(PfedafmError, match=r"pip install -e '\.\[onnx\]'"):
        export_client(client, tmp_path / "onnx", onnx=True)
    assert not (tmp_path / "onnx").exists()


def _names(path: Path) -> str:
    content = path.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")].decode()


WITHOUT_US = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pfedafm_jax", "flax", "optax", "orbax", "safetensors"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""


def test_the_exported_program_runs_where_jax_is_alone_by_its_own_readme(trained, tmp_path):
    client, images = load_run(trained("pfedafm")[0]).client(0), small_data()[0].images[:7]
    export_client(client, tmp_path / "out")
    np.save(tmp_path / "images.npy", images)
    block = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    block = "\n".join(line for line in block.splitlines() if not line.startswith("images ="))
    block = f'{WITHOUT_US}\nimport numpy\nimages = numpy.load("../images.npy")\n{block}'
    block += '\nnumpy.save("../logits.npy", logits)'
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path / "out", check=True)
    expected = client.predict(images)["mixed"]
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=1e-4, atol=1e-5)


def test_a_client_goes_to_onnx(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("jax2onnx")
    client, images = load_run(trained("pfedafm")[0]).client(0), small_data()[0].images[:7]
    export_client(client, tmp_path / "out", onnx=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "network.onnx")
    (found,) = session.run(["mixed"], {"images": images})
    np.testing.assert_allclose(found, client.predict(images)["mixed"], rtol=1e-4, atol=1e-5)


def test_the_commands_predict_export_and_join(trained, tmp_path, capsys):
    folder, _ = trained("pfedafm")
    dataset, client = small_data()[0], load_run(folder).client(2)
    np.save(tmp_path / "x.npy", dataset.images[:12])
    (tmp_path / "pictures").mkdir()
    for number, image in enumerate(dataset.images[:3]):
        Image.fromarray(image[..., 0]).save(tmp_path / "pictures" / f"{number}.png")
    base = [str(folder), "--client", "2"]
    out = tmp_path / "y.npz"
    assert predict.main([*base, "--images", str(tmp_path / "x.npy"), "--out", str(out)]) == 0
    expected = client.predict(dataset.images[:12])
    with np.load(out) as file:
        assert np.array_equal(file["logits/mixed"], expected["mixed"])
        assert np.array_equal(file["predicted"], expected["mixed"].argmax(axis=1))
    rows = tmp_path / "y.csv"
    predict.main([*base, "--images", str(tmp_path / "pictures"), "--out", str(rows)])
    with open(rows, newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0][:4] == ["image", "class", "probability", "probability 0"] and len(lines) == 4
    assert float(lines[1][7]) == pytest.approx(expected["mixed"][0, 0], rel=1e-5)
    assert export.main([*base, "--out", str(tmp_path / "model")]) == 0
    predict.main([str(tmp_path / "model"), "--images", str(tmp_path / "x.npy")])
    assert "and 2 more; --out y.csv has all of them" in capsys.readouterr().out
    np.savez(tmp_path / "own.npz", images=dataset.images[:25], labels=dataset.labels[:25])
    arguments = ["--data", str(tmp_path / "own.npz"), "--visits", "1", "--architecture", "dense_b"]
    assert join.main([str(folder), *arguments, "--out", str(tmp_path / "new")]) == 0
    assert "after 1 visit:  " in capsys.readouterr().out
    assert load_client(tmp_path / "new").card["newcomer"]["visits"] == 1
    with pytest.raises(PfedafmError, match=r"out = .*pictures' cannot be used"):  # before training
        join.main([str(folder), *arguments, "--out", str(tmp_path / "pictures")])
    for words, said in (
        ([str(folder)], "choose a client: --client K, 0 to 3"),
        ([*base, "--out", "y.txt"], "ends in .npz or .csv"),
        ([str(tmp_path / "model"), "--client", "1"], "one client's own folder"),
    ):
        with pytest.raises(PfedafmError, match=said):
            predict.main([*words, "--images", str(tmp_path / "x.npy")])


def test_a_newcomer_to_a_run_that_shares_nothing_is_told_so(trained, tmp_path, capsys):
    dataset = small_data()[0]
    np.savez(tmp_path / "own.npz", images=dataset.images[:25], labels=dataset.labels[:25])
    (tmp_path / "plugin.py").write_text("print('the plugin is read')")
    words = [str(trained("standalone")[0]), "--data", str(tmp_path / "own.npz"), "--visits", "0"]
    words += ["--out", str(tmp_path / "new"), "--plugin", str(tmp_path / "plugin.py")]
    assert join.main(words) == 0
    said, alone = capsys.readouterr().out, "Standalone shares nothing: the newcomer trains alone"
    assert all(words in said for words in ("the plugin is read", "after 0 visits", alone))
