"""The benchmarks measure the same work for all, in small; and PyTorch's loop computes what the
engine computes."""

import importlib.util
import json
import sys

import common
import contenders
import jax
import networks
import numpy as np
import pytest
import scaling
import speed
from small import engine_of, slow_but

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.data.sources.synthetic import make_synthetic
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.training.batches import epoch_order

torch = importlib.util.find_spec("torch")
needs_torch = pytest.mark.skipif(not torch, reason="PyTorch is an extra")
PROMISED = {"ours_round_seconds", "ours_xla_round_seconds", "compile_seconds", "peak_gflops"}
PROMISED |= {f"ratio_vs_torch_{name}" for name in ("strongest", "clean", "released")}


@pytest.fixture(scope="module")
def work(config, dataset, partition) -> common.Work:
    return common.Work(updated(config, architectures=("small_b",)), dataset, partition)


class InProcess(contenders.ScalingPoint):
    """A contender without a process of its own, on a machine of 100 GFLOP/s."""

    def __call__(self, command, **arguments):
        answer = 100.0 if command == "matmul_gflops" else getattr(self, command)(**arguments)
        return json.loads(json.dumps(answer))


@pytest.fixture(scope="module")
def point(work):
    """A point of the scaling curves: 40 clients, four a round, on two devices."""
    return InProcess(work, {"num_clients": 40, "participation": 0.1, "devices": 2})


@pytest.fixture(scope="module")
def measured(point):
    """The race in this process, with small networks and without PyTorch."""
    return speed.race({"ours": point}, {"ours": 2}, [[0, 1, 2], [3, 4, 5]], 8)


def test_every_batch_size_has_the_numbers_that_are_promised_and_null_without_torch(measured):
    assert {*PROMISED, "peak_fraction"} <= measured.keys()
    assert measured["torch_clean_round_seconds"] is None
    assert measured["ratio_vs_torch_released"] is None
    assert measured["ours_round_seconds"] > 0 and measured["compile_seconds"] > 0
    rate = measured["round_gflop"] / measured["ours_round_seconds"]
    assert measured["gflops"] == pytest.approx(rate, rel=0.05)
    spread = measured["spread"]["ours"]
    assert len(spread["repeats"]) == 2 and spread["min"] <= spread["median"] <= spread["max"]


def test_ratios_are_of_medians_and_the_fraction_is_of_the_limit():
    def rows(*seconds):
        return [{"scaled": value, "loss": 1.0, "accuracy": 0.5} for value in seconds]

    runs = {"ours": rows(2.0), "torch_clean": rows(3.0, 5.0)}
    found = speed.summary(runs, mean_flops=50e9, limit=100.0)
    assert found["ratio_vs_torch_clean"] == 2.0 and found["torch_clean_round_seconds"] == 4.0
    assert found["gflops"] == 25.0 and found["peak_fraction"] == 0.25


def test_table_and_chart_are_drawn_from_the_numbers(measured, capsys, tmp_path):
    results = {"8": measured, "512": measured, "machine": common.machine()}
    results["work"] = {"N": 6, "K": 3, "E": 2}
    speed.print_results(results, [8, 512])
    printed = capsys.readouterr().out
    assert speed.LABELS["ours"] in printed and "of matrix products" in printed.replace("\n", " ")
    assert max(map(len, printed.splitlines())) <= 80
    picture = speed.plots.save(speed.draw(results, [8, 512]), tmp_path / "speed.png")
    assert picture.stat().st_size > 10_000


def test_a_contender_in_a_process_of_its_own_says_why_it_fails(work, tmp_path):
    work.save(tmp_path)
    again = common.Work.load(tmp_path)
    assert again.config == work.config and again.dataset.digest == work.dataset.digest
    contender = common.Contender("ours", tmp_path, method="no_such_method")
    with pytest.raises(PfedafmError, match=r"ours: .*no_such_method"):
        contender("prepare", batch_size=8)
    contender.close()
    assert contender.process.returncode == 0


@pytest.fixture(scope="module")
def larger(config) -> common.Work:
    """Networks of the paper on images of 16x16 pixels: three clients, 24 training images each but
    one."""
    arrays = make_synthetic(4, 120, seed=1, image_size=16)
    order = np.random.default_rng(0).permutation(120).astype(np.int32)
    train = (order[:24], order[24:43], order[43:67])
    test = (order[70:80], order[80:90], order[90:100])
    networks = {"architectures": ("cnn5",), "shared_extractor": "cnn5", "feature_size": 20}
    rates = {"learning_rate": 0.05, "clip_norm": 0.5, "weight_decay": 1e-2}
    settings = {**networks, **rates, "pfedafm": {"mix_learning_rate": 0.5}}
    settings |= {"num_clients": 3, "participation": 1.0, "batch_size": 8, "local_epochs": 2}
    dataset = dataset_from_arrays("larger", *arrays, num_classes=4)
    return common.Work(updated(config, settings), dataset, Partition(train, test, (order[:0],) * 3))


@needs_torch
@pytest.mark.optimised
@pytest.mark.parametrize("kind", slow_but(["careful"], ["careful", "cached", "released"]))
def test_the_torch_loop_computes_what_the_engine_computes(larger, kind):
    """One round from the same weights with the same batches; what is in the graph must not change
    the result."""
    import torch_loop

    programs = engine_of(larger.config, larger.dataset, larger.partition)
    before = programs.start()
    clients = [before.clients.state(client) for client in range(2)]
    after, result = programs.run_round(before, 1, [0, 1])

    def order(number, client, phase, epoch):
        key = jax.random.fold_in(client_key(programs.federation.run_key, number, client), phase)
        size = len(larger.partition.train[client])
        key = jax.random.fold_in(jax.random.fold_in(key, epoch), 2**20)
        return np.array(epoch_order(key, np.int32(size), size))  # pyright: ignore

    def loaded(client, server):
        options = {"released": kind == "released", "cached": kind == "cached"}
        loop = torch_loop.TorchLoop(larger, order=order, threads=1, **options)
        torch_loop.load_client(loop.starts[0], client)
        torch_loop.load_extractor(loop.shared, jax.device_get(server)["shared_extractor"])
        return loop

    loop = loaded(clients[0], before.server)
    loop.set_layout(channels_last=kind != "released")
    loop.fused = kind == "cached"
    answer = loop.round(1, [0, 1])
    assert answer["loss"] == pytest.approx(float(np.mean(result.reports["loss"])), rel=1e-4)
    accuracy = float(np.mean(result.reports["accuracy/mixed"]))
    assert answer["accuracy"] == pytest.approx(accuracy, abs=1e-6)

    def check(trained, start, wanted):
        """Off by a thousandth of the way gone at most."""
        before, goal = start.state_dict(), wanted.state_dict()
        for name, value in trained.state_dict().items():
            moved = float((goal[name] - before[name]).abs().max())
            assert moved > 0, name
            limits = {"atol": 1e-3 * moved, "rtol": 0, "err_msg": name}
            np.testing.assert_allclose(value, goal[name], **limits)

    for client in (0, 1):
        wanted = loaded(after.clients.state(client), after.server)
        first = loaded(clients[client], before.server).starts[0]
        check(loop.clients[client], first, wanted.starts[0])
    check(loop.shared, loaded(clients[0], before.server).shared, wanted.shared)


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch_clean", "torch_strongest"])
def test_the_torch_loop_learns_in_processes_of_its_own(larger, tmp_path, kind):
    larger.save(tmp_path)
    contender = common.Contender(kind, tmp_path)
    assert {"channels_last", "fused", "threads"} <= contender("prepare", batch_size=8).keys()
    rounds = [contender("round", number=t, participants=[0, 1, 2]) for t in range(1, 7)]
    losses = [answer["loss"] for answer in rounds]
    contender.close()
    assert losses[-1] < losses[0]


def test_a_point_of_the_scaling_curves_reports_time_and_memory(point, measured):
    assert {len(rows) for rows in point.work.partition.train} == {192}
    assert measured["settings"]["ours"]["devices"] == 2 and point.numbered_round(1)["seconds"] > 0
    memory = point.memory()
    assert all(memory[f"{name}_bytes"] > 0 for name in ("peak", "store", "device"))


def test_series_change_one_setting_each_and_are_drawn(capsys, tmp_path):
    options = scaling.parse(["--quick", "--clients", "100,10000"])
    series = scaling.series_of(options, scaling.base_config(options))
    assert series["N"][10_000] == {"num_clients": 10_000, "participation": 0.001}
    row = {"peak_bytes": 2**31, "device_bytes": 2**28, "store_bytes": 2**36, "store_on_disk": True}
    both = {
        100: {"min": 1.9, "median": 2.0, "max": 2.2},
        10_000: {"min": 2.1, "median": 2.1, "max": 2.2},
    }
    rows = [{"value": value, "spread": spread, **row} for value, spread in both.items()]
    scaling.print_series("N", rows)
    printed = capsys.readouterr().out
    assert "10,000" in printed and "1.05" in printed and max(map(len, printed.splitlines())) <= 80
    drawn = scaling.draw({"N": rows, "E": rows}, "title")
    assert scaling.plots.save(drawn, tmp_path / "s.png").stat().st_size > 10_000


@needs_torch
def test_networks_are_the_same_in_torch_and_their_steps_are_timed():
    found = networks.measure("mobilenet_small", repeats=1, batch=4, side=8)
    best = min(found["torch_first"], found["torch_last"])
    assert found["ratio"] == pytest.approx(found["native"] / best, rel=1e-2)


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (speed, ["--batch-sizes", "64,x"], "batch_sizes = '64,x'"),
        (speed, ["--participants", "200"], "participants = 200"),
        (speed, ["--without", "torch_cleam"], "did you mean torch_clean"),
        (speed, ["--json", "/dev/null/speed.json"], "cannot be written"),
        (scaling, ["--series", "M"], "series = 'M'"),
        (scaling, ["--devices", "0"], "devices = '0'"),
        (networks, ["--networks", "resnet_small,vgg"], "networks = 'vgg'"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_message(
    program, arguments, said, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program.__name__, *arguments])
    with pytest.raises(SystemExit) as ended:
        speed.guarded(program.main)
    assert ended.value.code == 2 and said in capsys.readouterr().err
