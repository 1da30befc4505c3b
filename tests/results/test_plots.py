"""Pictures of runs: names, numbers, colours, text as it is; and the command that draws them."""

from html import escape

import matplotlib
import numpy as np
import pandas as pd
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli.commands import plot
from pfedafm_jax.methods import method_names
from pfedafm_jax.results import plots, style
from pfedafm_jax.results.run import per_round, read_runs
from pfedafm_jax.results.select import grouped

FLOATS = {"pfedafm": 100, "standalone": 0, "fd": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three methods, two seeds each, with accuracies that grow with seed and round."""
    base = tmp_path_factory.mktemp("runs")
    for method, floats in FLOATS.items():
        for seed in (0, 1):
            cost = {"floats": floats, "seconds": 1.0 + seed}
            rounds = [record(n, 0.1 * n + 0.01 * seed, **cost) for n in range(1, 7)]
            run_by_hand(rounds, base / f"{method}-seed{seed}", method=method, seed=seed)
    return base


def test_curves_have_what_a_run_cost_so_far():
    rounds = [record(1, 0.1), record(2, None), record(3, 0.3), record(4, 0.5, everyone=0.5)]
    rows, costs = per_round(rounds), {"rounds": [1, 3, 4], "floats": [3, 9, 12]}
    for x, expected in {**costs, "flops": [5, 15, 20], "seconds": [2, 6, 8]}.items():
        along, values = plots.curve(rows, x)
        np.testing.assert_allclose(along, expected)
        np.testing.assert_allclose(values, [10, 30, 50])
    along, values = plots.curve(rows, window=2)
    np.testing.assert_allclose([along, values], [[3, 4], [20, 40]])
    np.testing.assert_allclose(plots.curve(rows, y="all_clients"), [[4], [50]])
    np.testing.assert_allclose(plots.curve(rows, y="loss")[1], [1, 1 / 2, 1 / 3, 1 / 4])
    assert [len(part) for part in plots.curve(rows[:1], y="all_clients", window=5)] == [0, 0]


def test_several_runs_are_a_mean_and_a_band(folder):
    figure = plots.curves(grouped(read_runs([folder]), ["method"]))
    axes = figure.axes[0]
    assert len(axes.lines) == 3 and len(axes.collections) == 3
    np.testing.assert_allclose(axes.lines[0].get_ydata(), 10 * np.arange(1, 7) + 0.5)
    band = axes.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose([band[:, 1].min(), band[:, 1].max()], [10, 61])


def test_runs_at_different_places_are_joined_between_their_points(folder):
    runs = {"pFedAFM": read_runs([folder / "pfedafm-seed0", folder / "pfedafm-seed1"])}
    line = plots.curves(runs, x="seconds").axes[0].lines[0]  # rounds take 1 s and 2 s
    along, values = line.get_data()
    assert (along[0], along[-1]) == (2, 6)
    np.testing.assert_allclose(values, np.mean([10 * along, 5 * along + 1], axis=0))


def test_short_runs_are_smoothed_less(folder):
    runs = {"FD": read_runs([folder / "fd-seed0"])}
    axes = plots.compare_runs(runs["FD"]).axes[0]
    assert len(axes.lines[0].get_xdata()) == 6 and "mean of" not in axes.get_ylabel()
    assert "mean of 5 points" in plots.curves(runs, window=5).axes[0].get_ylabel()


def test_methods_that_send_little_much_and_nothing_fit_one_picture(folder):
    runs = grouped(read_runs([folder]), ["method"])
    axes = plots.curves(runs, x="floats").axes[0]
    assert axes.get_xscale() == "log"
    names = {line.get_label() for line in axes.lines}
    assert names == {"FD", "pFedAFM", "Standalone (sends nothing)"}
    assert plots.curves(runs, x="flops").axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_the_command_draws_and_says_what_and_where(suffix, folder, tmp_path, capsys):
    out = tmp_path / f"picture.{suffix}"
    assert plot.main([str(folder), "--group", "method", "--smooth", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "pFedAFM, 2 runs" in said and "60.50 ± 0.71" in said
    assert f"picture.{suffix}" in said.replace("\n", "")
    assert out.read_bytes()[:5] in (b"\x89PNG\r", b"%PDF-", b"<?xml")


def test_a_mean_over_runs_that_differ_in_more_than_the_seed_is_told(tmp_path, capsys):
    for rate in (0.1, 0.2):
        run_by_hand([record(1)], tmp_path / str(rate), method="fd", learning_rate=rate)
    plot.main([str(tmp_path), "--group", "method", "--out", str(tmp_path / "x.svg")])
    assert "FD: a mean over runs that also differ in learning_rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere' cannot be used; accepted: the folder of a run"),
        (["run", "--group", "metod"], "group = 'metod' cannot be used"),
        (["run", "--smooth", "0"], "smooth = '0' cannot be used; accepted: at least 1"),
        (["run", "--out", "plot.gif"], "out = 'plot.gif' cannot be used"),
        (["run", "--out", "nowhere/plot.png"], "a folder that exists"),
        (["run", "--out", "plots.png"], r"out = 'plots\.png' cannot be used"),
        (["empty"], "nothing to draw yet"),
    ],
)
def test_bad_input_is_told_and_draws_nothing(arguments, said, tmp_path, monkeypatch):
    run_by_hand([], tmp_path / "empty", finished=False)
    run_by_hand([record(1)], tmp_path / "run")
    (tmp_path / "plots.png").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PfedafmError, match=said):
        plot.main(arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "plots.png", "run"]


def test_a_method_has_one_colour_in_every_picture(folder):
    runs = read_runs([folder])
    few = [run for run in runs if run.config["method"] != "fd"]
    for chosen in (runs, few):
        for line in plots.compare_runs(chosen).axes[0].lines:
            name = {"pFedAFM": "pfedafm", "FD": "fd", "Standalone": "standalone"}[line.get_label()]
            assert line.get_color() == style.METHOD_COLOURS[name]
    assert set(style.METHOD_COLOURS) == set(method_names())
    assert len(set(style.METHOD_COLOURS.values())) == len(style.METHOD_COLOURS)
    assert style.method_colour("mine") == style.method_colour("mine")


def test_runs_of_one_method_are_told_apart(folder):
    runs = read_runs([folder / "pfedafm-seed0", folder / "pfedafm-seed1", folder / "fd-seed0"])
    looks = plots.styles(grouped(runs, ["method", "seed"]))
    assert len(set(looks.values())) == 3
    assert looks["pFedAFM, seed 0"][0] == looks["pFedAFM, seed 1"][0] == style.BLUE
    alone = plots.styles(grouped(runs[:2], ["seed"]))
    assert alone["seed 0"][0] != alone["seed 1"][0]


def test_axes_that_count_have_whole_numbers():
    run = run_by_hand([record(number, 0.5) for number in (1, 2, 3)], method="fd")
    mix, counts = np.full((3, 2), 0.5), np.ones((3, 30), int)
    drawn = plots.accuracy_by_round(run.per_round()), plots.curves({"run": [run]})
    along = [figure.axes[0].xaxis for figure in (*drawn, plots.mix_by_round(mix))]
    for axis in (*along, plots.classes_by_client(counts).axes[0].yaxis):
        assert all(float(tick).is_integer() for tick in axis.get_majorticklocs())


def test_a_client_with_nothing_right_is_visible():
    axes = plots.accuracy_by_client(np.array([0.0, 0.5, 0.0]), np.zeros(3, int), ["cnn1"]).axes[0]
    (crosses,) = (line for line in axes.lines if line.get_marker() == "x")
    assert crosses.get_xdata().tolist() == [1, 2] and axes.get_ylim()[0] < 0


@pytest.mark.parametrize("name", ["$a_b$", r"\frac{$x", "100 % $", "名前"])
def test_text_from_outside_is_shown_as_it_is(name, tmp_path):
    rounds = [record(1, 0.5), record(2, 0.75)]
    run = run_by_hand(rounds, method="fd", dataset=f"folder:{name}", architectures=[name])
    accuracy = plots.of_run(run)["accuracy"]()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for figure in (accuracy, plots.curves({name: [run]}, name)):
            assert escape(name, quote=False) in style.rendered(figure, "svg").decode()


def test_a_title_that_is_no_text_is_drawn(tmp_path):
    rounds = pd.DataFrame({"round": [1], "mean_accuracy": [0.5], "all_clients_accuracy": [None]})
    figure = plots.accuracy_by_round(rounds, title="\udcff $x [a]")
    assert plots.save(figure, tmp_path / "a.png").stat().st_size > 1000
