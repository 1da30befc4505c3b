"""The grid search: its grid, its choice, its files; the command on generated data."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small import command_words

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli import sweep as grid
from pfedafm_jax.cli.commands import sweep as sweep_command
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Partition
from pfedafm_jax.data.load import load_data, split
from pfedafm_jax.results import plots


def sweep(*arguments: str, **settings) -> int:
    return sweep_command.main([*command_words(batch_size=4, **settings), *arguments])


def score(point, *accuracies, diverged=None):
    numbers = {"last_ten_mean_accuracy": 0.5, "rounds": 3, "seconds": 60.0}
    numbers["diverged_at_round"] = diverged
    found = [{**numbers, "final_all_clients_accuracy": one} for one in accuracies]
    runs: Any = [
        SimpleNamespace(summary=SimpleNamespace(**one), config={"seed": 0}) for one in found
    ]
    return grid.scored(point, runs)


def test_a_grid_is_every_combination_of_its_values():
    words = ["batch_size=64,128,256,512", "local_epochs=1,10", "learning_rate=0.01"]
    found = grid.points(grid.parse_grid([*words, "pfedafm.mix_learning_rate=0.001,0.01,0.1,1"]))
    assert len(found) == 4 * 2 * 4
    first = {"batch_size": 64, "local_epochs": 1, "learning_rate": 0.01}
    assert found[0] == {**first, "pfedafm.mix_learning_rate": 0.001}
    config = updated(Config(), found[-1])
    assert (config.batch_size, config.local_epochs) == (512, 10)
    assert config.pfedafm.mix_learning_rate == 1.0


def test_values_are_read_as_what_they_are():
    found = grid.parse_grid(
        [
            "learning-rate=0.1,1e-2",
            "flip=true,false",
            "pfedafm.mix_fixed=none,0.5",
            "architectures=cnn1",
        ]
    )
    assert found == {"learning_rate": (0.1, 0.01), "flip": (True, False), "pfedafm.mix_fixed": (None, 0.5),
                     "architectures": (("cnn1",),)}  # fmt: skip
    assert grid.label(grid.points(found)[0]).endswith(
        "=0.1,flip=True,mix_fixed=None,architectures=cnn1"
    )
    with pytest.raises(
        PfedafmError, match=r"pfedafm\.mix_fixed = 'half' .* accepted: a number, or none"
    ):
        grid.parse_grid(["pfedafm.mix_fixed=half"])


@pytest.mark.parametrize("words", ["batch_size", "batch_size=", "batch_size=1,,2", "=1", "seed=1,2",
                                   "batch_size=1 batch-size=2"])  # fmt: skip
def test_a_grid_that_makes_no_sense_is_refused(words):
    with pytest.raises(PfedafmError, match="grid = "):
        grid.parse_grid(words.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "batchsize=1,2"], "unknown setting batchsize"),
        (["--grid", "batch_size=64,none"], "batch_size = 'none'"),
        (["--grid", "batch_size=64,0"], "batch_size = '0' .* at least 1"),
        (["--grid", "fd.gama=1"], "unknown setting fd.gama"),
        (["--grid", "fd.gamma=1,2"], r"grid = 'fd\.gamma' .* with --method fd"),
        (["--grid", "gamma=1,2"], "grid = 'gamma' .* with --partition dirichlet"),
        ([], "grid = None .* SETTING=VALUE,VALUE,… once or more"),
        (["--grid", "batch_size=4,8", "--seeds", "a"], r"seeds\[0\] = 'a' .* a whole number"),
        (["--coordinator", "host:1"], "a sweep is run by one process"),
        (
            ["--grid", "batch_size=4,8", "--validation-fraction", "0"],
            "validation_fraction = 0 .* by held-out data",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, said, tmp_path):
    with pytest.raises(PfedafmError, match=said):
        sweep(*arguments, run_dir=tmp_path / "sweep")
    assert not list(tmp_path.iterdir())


def test_validation_data_take_the_place_of_test_data_which_are_in_no_part():
    config = updated(Config(), dataset="synthetic", num_clients=10, validation_fraction=0.1)
    dataset = load_data(config)
    whole, found = split(config, dataset), grid.validation_split(config, dataset)
    assert isinstance(found, Partition)
    for client in range(10):
        assert np.array_equal(found.test[client], whole.validation[client])
        assert len(found.test[client]) > 0
        seen = np.concatenate([found.train[client], found.test[client], found.validation[client]])
        assert not np.isin(seen, np.concatenate(whole.test)).any()


def test_values_that_differ_have_different_folders():
    values = [0.01234561, 0.01234562, 0.01, 10.0, 1e-5, 64, None, True]
    texts = ["0.01234561", "0.01234562", "0.01", "10", "1e-05", "64", "None", "True"]
    assert list(map(grid.shown, values)) == texts


def test_the_best_mean_over_seeds_is_chosen_and_a_diverged_setting_never():
    a, b = score({"learning_rate": 0.1}, 0.9, 0.5), score({"learning_rate": 0.2}, 0.75, 0.75)
    c = score({"learning_rate": 1.0}, 0.99, 0.99, diverged=2)
    d = score({"learning_rate": 2.0}, 0.8, None)
    assert [s["point"]["learning_rate"] for s in grid.ranked([a, b, c, d])] == [0.2, 0.1, 1.0, 2.0]
    equal = score({"learning_rate": 0.3}, 0.7, 0.7)
    assert grid.ranked([a, equal])[0] is a  # the grid's own order
    _, rows = grid.rows(grid.ranked([a, b, c]))
    assert rows[0] == ["1", "0.2", "75.00 ± 0.00", "50.00", "3", "2.0"]
    assert "diverged at round 2" in rows[2][2]


def test_a_split_from_a_file_is_cut_for_validation(tmp_path):
    config = Config(dataset="synthetic", num_clients=10, validation_fraction=0.1)
    dataset, path = load_data(config), tmp_path / "mine.npz"
    whole = split(updated(config, validation_fraction=0.0), dataset)
    whole.save(path)
    own = updated(config, partition=str(path))
    found, again = (grid.validation_split(own, dataset) for _ in range(2))
    for client in range(10):
        rows = np.concatenate([found.train[client], found.test[client]])
        assert np.array_equal(np.sort(rows), whole.train[client])
        assert len(found.test[client]) == round(0.1 * len(rows))
        assert np.array_equal(found.test[client], again.test[client])
    cut = split(config, dataset)
    cut.save(path)  # what a file has already is used
    assert np.array_equal(grid.validation_split(own, dataset).test[3], cut.validation[3])
    one = dataclasses.replace(whole, train=(whole.train[0][:1], *whole.train[1:]))
    with pytest.raises(PfedafmError, match="accepted: 0: client 0 has one training image"):
        one.with_validation(dataset.labels, 0.1, 0)


def test_where_all_settings_diverge_the_table_is_written_and_none_is_chosen(tmp_path):
    scores = grid.ranked([score({"learning_rate": rate}, 0.5, diverged=2) for rate in (1.0, 2.0)])
    with pytest.raises(PfedafmError, match=r"nothing to choose: .* diverged; try lower learning"):
        grid.write(tmp_path, Config(), scores, "By hand.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.json", "sweep.md"]


def test_the_command_chooses_goes_on_and_leaves_a_configuration(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *arguments: None)  # each run's own, seconds each
    folder = tmp_path / "sweep"
    settings = {"method": "standalone", "run_dir": folder, "rounds": 2}
    settings |= {"grid": "learning_rate=0.000001,0.1", "validation_fraction": 0.1}
    assert sweep(**settings) == 0
    content = json.loads((folder / "sweep.json").read_text())
    assert [entry["point"]["learning_rate"] for entry in content] == [0.1, 1e-6]
    rounds = (folder / "learning_rate=0.1" / "seed0" / "rounds.jsonl").read_text().splitlines()
    assert content[0]["accuracy"] == json.loads(rounds[1])["all_clients_accuracy"]
    with np.load(folder / "learning_rate=0.1" / "seed0" / "partition.npz") as parts:
        assert parts["validation_sizes"].sum() == 0
        assert len(parts["train"]) + len(parts["test"]) < 240 * 0.85
    best = Config.load(folder / "best.toml")
    assert (best.learning_rate, best.method) == (0.1, "standalone")
    assert (best.validation_fraction, best.rounds) == (0.0, 2)
    assert "| 1 | 0.1 |" in (folder / "sweep.md").read_text()
    capsys.readouterr()
    assert sweep(**settings) == 0
    again = capsys.readouterr().out
    assert "2 runs, 2 of them done" in again and "round 1/" not in again
    # Runs of other lengths would be ranked with these.
    with pytest.raises(PfedafmError, match=r"rounds = 1 .*accepted: 2 or more, as .*seed0 has"):
        sweep(**settings | {"rounds": 1})


@pytest.mark.slow
def test_data_of_ones_own_is_swept_like_any(tmp_path, dataset):
    np.savez(tmp_path / "mine.npz", images=dataset.images, labels=dataset.labels)
    own = f"npz:{tmp_path / 'mine.npz'}"
    settings = {"method": "standalone", "rounds": 1, "run_dir": tmp_path / "sweep"}
    settings["grid"] = "learning_rate=0.01,0.1"
    assert sweep("--drop-checkpoints", dataset=own, **settings) == 0
    assert len(json.loads((tmp_path / "sweep" / "sweep.json").read_text())) == 2
    assert Config.load(tmp_path / "sweep" / "best.toml").dataset == own
    assert not list((tmp_path / "sweep").rglob("*.safetensors"))  # the checkpoints
