"""The benchmarks measure the same work for all, in small; and PyTorch's loop computes what the plain loop computes."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pfedafm_jax import reference
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.data.synthetic import make_synthetic
from pfedafm_jax.engine import build
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import PFedAFM
from pfedafm_jax.training import epoch_order

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
jax.local_devices()  # JAX is started before a contender could change the number of devices

import common  # noqa: E402
import contenders  # noqa: E402
import methods_cost  # noqa: E402
import race  # noqa: E402
import scaling  # noqa: E402
import speed  # noqa: E402

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
ISSUE_KEYS = ("ours_round_seconds", "torch_clean_round_seconds", "torch_released_round_seconds", "ratio_vs_torch_clean",
              "ratio_vs_torch_released", "peak_gflops", "peak_fraction", "compile_seconds", "ours_vmap_round_seconds",
              "reference_round_seconds")  # fmt: skip


@pytest.fixture(scope="module")
def work(config, dataset, partition) -> common.Work:
    return common.Work(dataclasses.replace(config, architectures=("small_b",)), dataset, partition)


class InProcess:
    """A contender without a process of its own."""

    def __init__(self, contender):
        self.contender = contender

    def __call__(self, command, **arguments):
        return json.loads(json.dumps(getattr(self.contender, command)(**arguments)))

    def close(self):
        pass


@pytest.fixture(scope="module")
def measured(work, tmp_path_factory):
    """The race in this process, with small networks and without PyTorch."""
    folder = tmp_path_factory.mktemp("race")
    names = ("ours", "ours_vmap", "reference")
    plan = race.Plan(dict.fromkeys(race.LABELS, 2), draws=2, limit_repeats=1)
    made = race.Race(work.config, folder, plan, folder, names)
    made.contenders = {
        "ours": InProcess(contenders.Engine(work, devices=2)),  # pyright: ignore
        "ours_vmap": InProcess(contenders.Engine(work, devices=1, clients_per_step=made.largest_group)),  # pyright: ignore
        "reference": InProcess(contenders.PlainLoop(work)),  # pyright: ignore
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders.Engine, "matmul_gflops", lambda self, repeats: 100.0)
        return made.batch(8, names, lambda line: None)


def test_every_batch_size_has_the_numbers_that_are_promised_and_null_without_torch(measured):
    assert set(ISSUE_KEYS) <= measured.keys()
    assert measured["torch_clean_round_seconds"] is None and measured["ratio_vs_torch_released"] is None
    ours, plain = measured["ours_round_seconds"], measured["reference_round_seconds"]
    assert ours > 0 and measured["ratio_vs_reference"] == pytest.approx(plain / ours, rel=0.01)
    assert measured["peak_gflops"] == 100.0 and measured["compile_seconds"] > 0
    assert measured["gflops"] == pytest.approx(measured["round_gflop"] / ours, rel=0.02)
    spread = measured["spread"]["ours"]
    assert len(spread["repeats"]) == 2 and spread["min"] <= spread["median"] <= spread["max"]
    assert measured["phase1"]["phase1_cnn1_gflops"] > 0
    assert measured["part"] is None


def test_engine_contenders_do_the_same_work(measured):
    """Chunk size and devices change rounding only, so the losses of all rounds agree."""
    np.testing.assert_allclose(measured["loss"]["ours_vmap"], measured["loss"]["ours"], atol=2e-3)


def test_a_contender_on_a_part_has_the_ratio_of_that_part(work, tmp_path):
    """The engine takes 2 s a round and 1 s on the part, the plain loop 3 s on the part: three times as long."""

    class Fake:
        def __init__(self, seconds):
            self.seconds, self.asked = seconds, []

        def __call__(self, command, **arguments):
            self.asked.append((command, arguments))
            if command == "round":
                return {"seconds": self.seconds[tuple(arguments["participants"])], "loss": 1.0, "accuracy": 0.5}
            return {"flops": 1e9, "matmul_gflops": 100.0, "prepare": {"compile_seconds": 1.0},
                    "phase1_gflops": {"architecture": "cnn1", "rates": [50.0]}}[command]  # fmt: skip

        def close(self):
            pass

    settings = dataclasses.replace(work.config, num_clients=20, participation=0.1, architectures=("small_a", "small_b"))
    plan = race.Plan(dict.fromkeys(race.LABELS, 2), on_part=("reference",), draws=1)
    made = race.Race(settings, tmp_path, plan, tmp_path, ("ours", "reference"))
    assert made.part == [0, 2, 4, 6]
    plain = Fake({(0, 1, 2, 3): 3.0})  # by the numbers of the part
    made.contenders = {"ours": Fake({tuple(made.draws[0]): 2.0, (0, 2, 4, 6): 1.0}), "reference": plain}  # pyright: ignore
    found = made.batch(8, ("ours", "reference"), lambda line: None)
    assert found["reference_round_seconds"] == 6.0 and found["ratio_vs_reference"] == 3.0
    assert found["part"]["clients"] == 4 and found["part"]["repeats"] == [1.0, 1.0]
    assert plain.asked[0] == ("prepare", {"batch_size": 8, "participants": [0, 1, 2, 3]})


def test_the_plain_loop_repeats_the_round_that_it_compiled_for(work, tmp_path):
    made = race.Race(work.config, tmp_path, race.FULL, tmp_path, ("ours", "reference"))
    assert {made.draw("reference", repeat) for repeat in range(3)} == {0}
    assert [made.draw("ours", repeat) for repeat in range(5)] == [0, 1, 2, 3, 4]
    assert made.participants("reference", 2) == made.draws[0] and made.participants("ours", 2) == made.draws[2]


def test_table_and_chart_are_drawn_from_the_numbers(measured, capsys, tmp_path):
    results = {
        **{size: {**measured, "part": {"clients": 4, "median": 1.5}} for size in ("8", "512")},
        "phase1_cnn1": {size: measured["phase1"] for size in ("8", "512")},
        "others": {"cpu_share": 0.5, "steal_share": 0.0},
        "devices": {"devices": 2, "devices_2_vs_1": 1.7},
        "start": {"start_cold_seconds": 50.0, "start_warm_seconds": 10.0},
        "work": {"N": 6, "K": 3, "E": 2, "vmap_clients_per_step": 2, "architectures": ["cnn1"]},
        "machine": common.machine(),
    }
    speed.print_results(results, [8, 512])
    printed = capsys.readouterr().out
    assert race.LABELS["reference"] in printed and "of it" in printed and "4 clients with CNN-1" in printed
    assert "batch 512" in printed and "not quiet" in printed and "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert speed.plots.save(speed.draw(results, [8, 512]), tmp_path / "speed.png").stat().st_size > 10_000


def test_seconds_are_scaled_to_a_round_of_mean_work():
    runs = {"ours": [{"scaled": 2.0, "loss": 1.0, "accuracy": 0.5}], "torch_clean": [
        {"scaled": 3.0, "loss": 1.0, "accuracy": 0.5}, {"scaled": 5.0, "loss": 0.9, "accuracy": 0.5}]}  # fmt: skip
    found = race.summary(runs, mean_flops=50e9, limit=100.0)
    assert found["ratio_vs_torch_clean"] == 2.0 and found["torch_clean_round_seconds"] == 4.0
    assert found["gflops"] == 25.0 and found["peak_fraction"] == 0.25


def test_work_travels_through_a_folder(work, tmp_path):
    work.save(tmp_path)
    again = common.Work.load(tmp_path)
    assert again.config == work.config
    np.testing.assert_array_equal(again.dataset.images, work.dataset.images)
    assert (again.dataset.mean, again.dataset.digest) == (work.dataset.mean, work.dataset.digest)
    np.testing.assert_array_equal(again.partition.train[4], work.partition.train[4])


def test_a_part_has_the_clients_of_the_first_architecture(config, dataset, partition):
    whole = common.Work(dataclasses.replace(config, architectures=("small_a", "small_b")), dataset, partition)
    part = whole.part()
    assert part.config.architectures == ("small_a",) and part.config.num_clients == len(part.partition.train) == 3
    for place, rows in enumerate(part.partition.train):
        np.testing.assert_array_equal(rows, partition.train[2 * place])


def test_a_contender_that_fails_says_why(work, tmp_path):
    work.save(tmp_path)
    contender = common.Contender("reference", tmp_path, method="no_such_method")
    with pytest.raises(PfedafmError, match="reference: "):
        contender("prepare", batch_size=8, participants=[0])
    contender.close()
    assert contender.process.returncode == 0


# ---------------------------------------------------------------------------------------------- PyTorch


@pytest.fixture(scope="module")
def larger(config) -> common.Work:
    """Networks of the paper on images of 16x16 pixels: three clients, 24 training images each but one."""
    dataset = dataset_from_arrays("larger", *make_synthetic(4, 120, seed=1, image_size=16), num_classes=4)
    order = np.random.default_rng(0).permutation(120).astype(np.int32)
    train = (order[:24], order[24:43], order[43:67])
    test = (order[70:80], order[80:90], order[90:100])
    settings = dataclasses.replace(
        config, num_clients=3, participation=1.0, architectures=("cnn5",), shared_extractor="cnn5", feature_size=20,
        learning_rate=0.05, clip_norm=0.5, batch_size=8, local_epochs=1, weight_decay=1e-2,
        settings=(PFedAFM.Settings(mix_learning_rate=0.5),),
    )  # fmt: skip
    return common.Work(settings, dataset, Partition(train, test, tuple(np.zeros(0, np.int32) for _ in train)))


@pytest.fixture(scope="module")
def plain(larger):
    """Clients and server before and after a round of two clients in the plain loop, and what it reported."""
    programs = build(larger.config, larger.dataset, larger.partition)
    state = reference.start(programs)

    def snapshot(state):
        return [state.store.state(client) for client in range(3)], jax.device_get(state.server)

    before = snapshot(state)
    state, result = reference.run_round(programs, state, 1, [0, 1])
    return before, snapshot(state), result.info, programs.key


@needs_torch
@pytest.mark.parametrize("released", [False, True])
def test_the_torch_loop_computes_what_the_plain_loop_computes(larger, plain, released):
    """One round from the same weights with the same batches; what is in the graph must not change the result."""
    import torch_loop

    before, after, info, run_key = plain

    def order(number, client, phase, epoch):
        key = jax.random.fold_in(client_key(run_key, number, client), phase)
        size = len(larger.partition.train[client])
        return np.asarray(epoch_order(jax.random.fold_in(jax.random.fold_in(key, epoch), 2**20), np.int32(size), size))  # pyright: ignore

    def loaded(weights, client: int) -> torch_loop.TorchLoop:
        loop = torch_loop.TorchLoop(larger, released=released, order=order, threads=1)
        torch_loop.load_client(loop.starts[0], weights[0][client])
        torch_loop.load_extractor(loop.shared, weights[1]["shared_extractor"])
        return loop

    loop = loaded(before, 0)
    loop.set_layout(channels_last=not released)
    loop.fused = not released
    answer = loop.round(1, [0, 1])
    assert answer["loss"] == pytest.approx(float(np.mean(info["loss"])), rel=1e-5)
    assert answer["accuracy"] == pytest.approx(float(np.mean(info["accuracy/mixed"])), abs=1e-6)

    def check(trained, start, wanted):
        """Off by a thousandth of the way gone at most."""
        for name, value in trained.state_dict().items():
            moved = float((wanted.state_dict()[name] - start.state_dict()[name]).abs().max())
            assert moved > 0, name
            np.testing.assert_allclose(value, wanted.state_dict()[name], atol=1e-3 * moved, rtol=0, err_msg=name)

    for client in (0, 1):
        check(loop.clients[client], loaded(before, client).starts[0], loaded(after, client).starts[0])
    check(loop.shared, loaded(before, 0).shared, loaded(after, 0).shared)


@needs_torch
def test_the_torch_loop_learns_in_a_process_of_its_own(larger, tmp_path):
    larger.save(tmp_path)
    contender = common.Contender("torch_clean", tmp_path, threads=1)
    chosen = contender("prepare", batch_size=8)
    assert chosen.keys() == {"channels_last", "fused", "threads"}
    losses = [contender("round", number=number, participants=[0, 1, 2])["loss"] for number in range(1, 7)]
    contender.close()
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------- scaling


def test_a_point_of_the_scaling_curves_reports_time_and_memory(work):
    point = contenders.ScalingPoint(work, {"num_clients": 40, "participation": 0.1, "devices": 2})
    assert {len(rows) for rows in point.work.partition.train} == {192}
    report = point.prepare(8)
    answer = point.numbered_round(1)
    memory = point.memory()
    assert report["devices"] == 2 and answer["seconds"] > 0
    assert memory["peak_bytes"] > 0 and memory["resident_bytes"] > 0 and memory["store_bytes"] > 0
    assert memory["device_bytes"] > 0 and memory["store_on_disk"] is False


def test_draws_are_even_over_architectures_at_every_number_of_clients(config):
    for clients in (10, 100, 1000):
        wide = dataclasses.replace(config, num_clients=clients, participation=10 / clients)
        drawn = contenders.even_draw(wide, 3)
        assert len(set(drawn)) == 10 and max(drawn) < clients
        assert sum(client % 2 for client in drawn) == 5


def test_curves_are_printed_and_drawn(capsys, tmp_path):
    row = {"round_seconds": 2.0, "spread": {"min": 1.9, "max": 2.2}, "peak_bytes": 2**31, "rounds_peak_bytes": None,
           "device_bytes": 2**28, "store_bytes": 2**36, "store_on_disk": True}  # fmt: skip
    rows = [{"value": 100, **row}, {"value": 10_000, **row, "round_seconds": 2.1}]
    scaling.print_series("N", rows)
    printed = capsys.readouterr().out
    assert "10,000" in printed and "1.05" in printed and max(map(len, printed.splitlines())) <= 80
    assert scaling.plots.save(scaling.draw({"N": rows, "E": rows}, "title"), tmp_path / "s.png").stat().st_size > 10_000


def test_series_change_one_setting_each():
    options = scaling.parse(["--quick", "--clients", "100,10000"])
    series = scaling.series_of(options, scaling.base_config(options))
    assert series["N"][10_000] == {"num_clients": 10_000, "participation": 0.001}
    assert series["E"] == {1: {"local_epochs": 1}, 2: {"local_epochs": 2}} and list(series["devices"]) == [1, 2, 4]


# ---------------------------------------------------------------------------------------------- words and errors


def test_methods_are_printed_with_their_seconds_beside_their_flops(capsys):
    row = {"round_seconds": 2.0, "reference_round_seconds": None, "ratio_vs_reference": None, "flops": 1e12,
           "flops_vs_standalone": 1.5, "seconds_vs_standalone": 1.8, "seconds_over_flops": 1.2}  # fmt: skip
    methods_cost.print_methods({"standalone": row, "fedkd": {**row, "reference_round_seconds": 5.0}})
    printed = capsys.readouterr().out
    assert "Standalone" in printed and "–" in printed and "1.20" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (speed, ["--batch-sizes", "64,x"], "batch_sizes = '64,x'"),
        (speed, ["--participants", "200"], "participants = 200"),
        (speed, ["--epochs", "0"], "epochs = 0"),
        (speed, ["--without", "torch_cleam"], "did you mean torch_clean"),
        (speed, ["--architectures", "cnn9"], "architectures = 'cnn9'"),
        (speed, ["--json", "/dev/null/speed.json"], "cannot be written"),
        (scaling, ["--series", "M"], "series = 'M'"),
        (scaling, ["--clients", "5,100"], "10 or more"),
        (scaling, ["--devices", "0"], "devices = '0'"),
        (scaling, ["--repeats", "0"], "repeats = 0"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_message(program, arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program.__name__, *arguments])
    with pytest.raises(SystemExit) as ended:
        speed.guarded(program.main)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
