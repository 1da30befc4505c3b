"""The paper's tables and figures: its numbers, the plan, the tables from made-up runs, and the command at its smallest."""

import dataclasses
import doctest
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config, config_names
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import method_names
from pfedafm_jax.reproduce import ITEMS, SCALES, Results, Run, Study, estimator, grid, look, paper, plan
from pfedafm_jax.reproduce import outcome as outcome_module
from pfedafm_jax.reproduce.execute import carry_out
from pfedafm_jax.reproduce.outcome import Claim, Outcome, Table, panels
from pfedafm_jax.reproduce.tables import compare_with_paper

ROOT = Path(__file__).parent.parent
CONFIGS = {name: Config.load(name) for name in config_names()}


def study(base: Path, scale: str = "quick", **changes) -> Study:
    return dataclasses.replace(Study(SCALES[scale], base, CONFIGS, SCALES[scale].datasets), **changes)


# ---------------------------------------------------------------------------------------------- the paper's numbers


@pytest.mark.parametrize("family", ["homo", "hetero"])
def test_the_papers_margins_follow_from_its_tables(family):
    """A slip in copying a number would show: the margins were copied by themselves."""
    for index, cell in enumerate(paper.CELLS):
        values = {method: row[cell] for method, row in paper.ACCURACY[family].items()}
        own = values.pop("pfedafm")
        assert own is not None
        others = [value for value in values.values() if value is not None]
        assert own - max(others) == pytest.approx(paper.MARGIN_BEST[family][index], abs=1e-6)
        mutual = [values[name] for name in paper.MUTUAL if values[name] is not None]
        assert own - max(mutual) == pytest.approx(paper.MARGIN_MUTUAL[family][index], abs=1e-6)


@pytest.mark.parametrize("module", [grid, outcome_module, paper, plan])
def test_examples_in_docstrings(module):
    failures, tried = doctest.testmod(module)
    assert tried and not failures


def test_the_paper_and_this_project_have_the_same_methods():
    assert set(paper.METHODS) <= set(method_names()) and set(paper.ACCURACY["homo"]) == set(paper.METHODS)


# ---------------------------------------------------------------------------------------------- the plan


def test_quick_runs_have_the_settings_of_their_configuration_file_and_known_folders(tmp_path):
    runs = {run.name: run.config for name in ITEMS for run in ITEMS[name].runs(study(tmp_path))}
    for name, method in (("hetero_cifar10", "pfedafm"), ("homo_cifar100", "fd"), ("hetero_cifar100", "fml")):
        expected = dataclasses.replace(CONFIGS[name], method=method, rounds=20)
        assert runs[f"{name}-n100/{method}-seed0"] == expected
    assert runs["hetero_cifar10-n100-mixlr0.1/pfedafm-seed2"].pfedafm.mix_learning_rate == 0.1
    assert runs["hetero_cifar100-n100-classes50/fedproto-seed0"].classes_per_client == 50
    dirichlet = runs["hetero_cifar10-n100-gamma0.5/pfedafm-seed0"]
    assert (dirichlet.partition, dirichlet.gamma) == ("dirichlet", 0.5)
    assert runs["hetero_cifar10-n100-end_to_end/pfedafm-seed0"].pfedafm.training == "end_to_end"
    assert not any("mixlr1/" in name or "classes2/" in name for name in runs)  # shared with Table 3


def test_the_papers_scale_has_its_columns_and_points(tmp_path):
    runs = {run.name: run.config for name in ITEMS for run in ITEMS[name].runs(study(tmp_path, "paper"))}
    shapes = {(c.num_clients, c.participation, c.rounds, c.local_epochs, c.learning_rate) for c in runs.values()}
    assert shapes == {(10, 1.0, 500, 10, 0.01), (50, 0.2, 500, 10, 0.01), (100, 0.1, 500, 10, 0.01)}
    tables = 2 * 3 * 2 * 8
    uneven, mix, training = 2 * (4 + 5) + 2 * 2 * 5, 2 * (4 * 3 - 1), 2
    assert len(runs) == tables + uneven + mix + training


def test_what_was_asked_for_takes_the_place_of_the_defaults(tmp_path):
    asked = study(tmp_path, datasets=("cifar10",), methods=("fd", "fml"), seeds=(3, 4), rounds=7)
    runs = ITEMS["table3"].runs(asked)
    assert [run.folder.name for run in runs] == ["fd-seed3", "fml-seed3", "fd-seed4", "fml-seed4"]
    assert {run.config.rounds for run in runs} == {7}
    assert {run.config.seed for run in ITEMS["fig-mix-lr"].runs(asked)} == {3, 4}


# ---------------------------------------------------------------------------------------------- made-up runs


def write_run(run: Run, level: float = 0.8, rounds: int | None = None, diverged: int | None = None) -> Run:
    """The files of a finished run whose mean accuracy goes up to `level` and whose clients end around it."""
    config = dataclasses.replace(run.config, rounds=rounds or run.config.rounds)
    names = ("mixed", "small", "large") if config.method == "pfedafm" else ("private",)
    clients, per_round = config.num_clients, config.num_participants
    rng = np.random.default_rng(0)
    records = []
    for number in range(1, config.rounds + 1):
        mean = round(level * number / config.rounds, 4)
        records.append({
            "round": number, "mean_accuracy": mean, "accuracy": {name: mean - 0.05 * i for i, name in enumerate(names)},
            "all_clients": None, "all_clients_accuracy": None, "floats_up": 10, "floats_down": 10, "flops": 1000,
            "participants": list(range(per_round)), "not_finite": 0,
        })  # fmt: skip
    records[-1]["all_clients"] = {name: level - 0.1 - 0.05 * i for i, name in enumerate(names)}
    summary = {
        "best_mean_accuracy": level, "best_round": config.rounds, "last_mean_accuracy": level, "seconds": 10.0,
        "final_all_clients_accuracy": level - 0.1, "spread_over_clients": 0.05, "rounds": config.rounds,
        "floats_up_per_client": 10.0, "floats_down_per_client": 10.0, "flops_per_client_round": 1e9,
        "compile_seconds": 1.0, "diverged_at_round": diverged, "config": config.as_dict(), "data_source": "made up",
    }  # fmt: skip
    mix = np.full((config.rounds, clients), np.nan, np.float32)
    mix[:, :per_round] = np.linspace(1, 0.2, config.rounds)[:, None]
    table = {f"all_clients/{name}": rng.normal(level - 0.1, 0.05, (1, clients)) for name in names}
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps({"config": config.as_dict()}))
    (run.folder / "summary.json").write_text(json.dumps(summary))
    (run.folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    np.savez(run.folder / "clients.npz", **{"visits/mix_mean": mix}, **table)
    return run


def results_of(runs: list[Run]) -> Results:
    found = {run.folder: look(run).summary for run in runs}
    return Results({folder: summary for folder, summary in found.items() if summary is not None})


def test_accuracies_stand_beside_the_papers():
    def summary(best, diverged=None, rounds=20):
        return {"best_mean_accuracy": best, "last_mean_accuracy": 0.5, "final_all_clients_accuracy": 0.4,
                "spread_over_clients": 0.1, "floats_up_per_client": 0, "floats_down_per_client": 0,
                "flops_per_client_round": 0, "seconds": 1, "diverged_at_round": diverged, "rounds": rounds}  # fmt: skip

    cell = (100, "cifar10")
    runs = [("pfedafm", summary(0.91)), ("pfedafm", summary(0.93)), ("fedproto", summary(0.9, rounds=40)),
            ("fedapen", summary(0.3, diverged=4)), ("standalone", summary(0.88))]  # fmt: skip
    outcome = compare_with_paper("hetero", {cell: runs}, {cell: "N=100, CIFAR-10"})
    overview = {row[0]: row[1] for row in outcome.tables[0].rows}
    assert overview == {
        "Standalone": "88.00 (91.97)", "FedProto": "90.00 (92.49)", "FedAPEN": "30.00 ✗ (fails)",
        "pFedAFM": "92.00 (95.68)", "pFedAFM − best baseline": "+2.00 (+3.19)",
        "pFedAFM − best of category": "+62.00 (+22.47)",
    }  # fmt: skip
    details = {row[0]: row[1:] for row in outcome.tables[1].rows}
    assert details["pFedAFM"] == ["92.00 ± 1.41", "95.68", "50.00 ± 0.00", "40.00 ± 0.00", "10.00 ± 0.00", "20", "2"]
    assert details["FedProto"][-2:] == ["40", "1"] and "FedAPEN (✗ diverged at round 4)" in details
    assert outcome.claims[0].seen is True and "in 1 of 1" in outcome.claims[0].line()
    assert "| FedProto | 90.00 (92.49) |" in outcome.markdown()


def test_every_figure_is_drawn_from_finished_runs_and_says_what_is_missing(tmp_path):
    asked = study(tmp_path, only_finished=True)
    needed = {run.folder: run for name in ITEMS for run in ITEMS[name].runs(asked)}
    level = {"pfedafm": 0.95, "fedproto": 0.9}
    left_out = {"hetero_cifar100-n100-end_to_end/pfedafm-seed0", "hetero_cifar100-n100-gamma0.5/fedproto-seed0"}
    for run in needed.values():
        if run.name not in left_out and "homo" not in run.name:
            write_run(run, level.get(run.config.method, 0.7) - 0.4 * ("cifar100" in run.name))
    results = results_of(list(needed.values()))
    outcomes = {name: ITEMS[name].draw(asked, results) for name in ITEMS if name not in ("table2", "fig-theory")}
    assert all(outcome is not None and outcome.figure.axes for outcome in outcomes.values())

    def rows(name: str) -> list[tuple[str, ...]]:
        outcome = outcomes[name]
        assert outcome is not None
        return [tuple(row) for row in outcome.tables[0].rows]

    assert rows("table1")[3][:3] == ("CNN-4", "4.04", "3.81")  # the paper's own widths do not give its size
    assert ("CIFAR-10 to 90 %", "pFedAFM", "19", "380", "19 k", "95.00", "20") in rows("fig-cost")
    assert ("CIFAR-100 to 50 %", "FedProto", "20", "400", "20 k", "50.00", "20") in rows("fig-cost")
    assert ("CIFAR-100", "0.5", "pFedAFM", "55.00", "55.00", "45.00", "20", "1") in rows("fig-dirichlet")
    assert not any(row[:3] == ("CIFAR-100", "0.5", "FedProto") for row in rows("fig-dirichlet"))
    assert ("CIFAR-10", "0.001", "95.00 ± 0.00", "95.00 ± 0.00", "85.00 ± 0.00", "20", "3") in rows("fig-mix-lr")
    assert ("CIFAR-10", "client 0", "1.000", "0.200", "20", "0", "20") in rows("fig-mix-mean")
    assert ("CIFAR-10", "large", "85.00", "85.00", "75.00", "20") in rows("fig-ablation-models")
    assert [row[1] for row in rows("fig-ablation-training")] == ["end to end", "iterative", "iterative"]
    individual = [row for row in rows("fig-individual") if row[1] == "FedProto"]
    assert [row[3] for row in individual] == ["92", "93"] and len(rows("fig-individual")) == 14  # all baselines there
    claims = {claim.text: claim.seen for outcome in outcomes.values() if outcome for claim in outcome.claims}
    assert claims["pFedAFM needs fewer rounds than FedProto."] is True
    assert claims["CIFAR-100: iterative training is better than end to end."] is None
    assert claims["CIFAR-10: accuracy rises from the small to the large to the mixed model."] is False


def test_nothing_is_a_claim_where_nothing_is_known():
    assert "cannot be told" in Claim("It rises.", None).line()
    assert Claim("It rises.", False, "by 0").line() == "It rises. Here: no, by 0."


def test_an_outcome_is_three_files(tmp_path):
    outcome = Outcome("Title", [Table("t", ("a", "b"), [["x", "1"]])], panels(1, 1, 5, 3)[0], numbers={"x": 1})
    paths = outcome.save(tmp_path / "new", "item", "about it")
    assert [path.name for path in paths] == ["item.md", "item.png", "item.json"]
    assert "| x | 1 |" in paths[0].read_text() and "![Title](item.png)" in paths[0].read_text()
    assert json.loads(paths[2].read_text())["numbers"] == {"x": 1}


def test_a_run_is_used_gone_on_with_or_started_over(tmp_path, monkeypatch):
    asked = study(tmp_path)
    assert look(asked.run("fml", "cifar10")).state == "new"
    longer = look(write_run(asked.run("fedproto", "cifar10"), rounds=40))
    assert (longer.state, longer.rounds_done, longer.run.config.rounds) == ("done", 40, 40)
    shorter = write_run(asked.run("fd", "cifar10"), rounds=10)
    assert look(shorter).state == "again"  # there is no checkpoint
    fedkd = write_run(asked.run("fedkd", "cifar10"), rounds=10)
    monkeypatch.setattr(Checkpoints, "manifests", lambda self: {10: {}})
    assert (look(shorter).state, look(shorter).rounds_done) == ("started", 10)
    assert look(fedkd).state == "again"  # its coding depends on the last round
    assert look(dataclasses.replace(fedkd, config=dataclasses.replace(fedkd.config, rounds=5))).state == "done"
    other = dataclasses.replace(shorter, config=dataclasses.replace(shorter.config, batch_size=32))
    with pytest.raises(PfedafmError, match="batch_size: 64 → 32"):
        look(other)


def test_runs_whose_checkpoints_do_not_fit_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1e8))
    standing = look(study(tmp_path).run("pfedafm", "cifar10"))
    with pytest.raises(PfedafmError, match=r"1 runs leave about 1 GB.*0 GB free; --drop-checkpoints"):
        carry_out([standing], lambda standing: 1.0)


def test_time_is_estimated_from_work_and_from_what_finished_runs_took(tmp_path):
    asked = study(tmp_path)
    runs = [asked.run(method, "cifar10") for method in ("pfedafm", "standalone")]
    new = [look(run) for run in runs]
    seconds = [estimator(new, 0.0)(standing) for standing in new]
    assert 200 < seconds[0] < 400  # 20 rounds of about 14 s on two cores
    assert 0.4 < seconds[1] / seconds[0] < 0.9
    write_run(runs[0])  # 10 s for 20 rounds of 10 clients with 1e9 operations each: 2e10 a second
    assert estimator([look(run) for run in runs], 0.0)(new[1]) == pytest.approx(3 * seconds[1], rel=0.01, abs=2.0)


# ---------------------------------------------------------------------------------------------- the command


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "experiments" / "reproduce.py"), *arguments]


def environment() -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    found.pop("XLA_FLAGS", None)
    return found


def inside(monkeypatch, *arguments: str) -> int:
    """The command in this process."""
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *arguments])
    return runpy.run_path(str(ROOT / "experiments" / "reproduce.py"))["main"]()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Everything at the smallest scale, once stopped on the way: the output of both starts, and the folder."""
    folder = tmp_path_factory.mktemp("reproduce") / "smoke"
    arguments = command("all", "--scale", "smoke", "--run-dir", str(folder))
    first = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    before = []
    for line in first.stdout:
        before.append(line)
        if line.startswith("round 1/2"):
            first.send_signal(signal.SIGTERM)
            break
    _, errors = first.communicate(timeout=600)
    second = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=600)
    return first.returncode, errors, second, folder


def test_the_command_stops_when_asked_and_goes_on_to_the_end(smoke):
    code, errors, second, folder = smoke
    assert code == 143 and "the same command goes on" in errors and "Traceback" not in errors
    assert second.returncode == 0, second.stderr
    assert max(len(line) for line in second.stdout.splitlines()) <= 80 + len(str(folder))
    assert re.search(r"17 runs, [01] of them done; the rest takes about \d+", second.stdout)
    assert "run 1 of " in second.stdout and " left" in second.stdout


def test_every_item_has_its_files_and_the_papers_numbers(smoke):
    folder = smoke[-1]
    for name in ITEMS:
        assert (folder / f"{name}.png").stat().st_size > 10_000
        content = json.loads((folder / f"{name}.json").read_text())
        assert content["item"] == name and content["numbers"]
        assert f"reproduce.py {name} --scale smoke" in (folder / f"{name}.md").read_text()
    assert "CNN-4 are not what the widths" in (folder / "table1.md").read_text()
    for method in ("Standalone", "LG-FedAvg", "FD", "FedProto", "FML", "FedKD", "FedAPEN", "pFedAFM"):
        assert f"| {method} |" in (folder / "table3.md").read_text()


def test_another_start_runs_nothing(smoke, monkeypatch, capsys):
    folder = smoke[-1]
    before = (folder / "table3.md").read_text()
    assert inside(monkeypatch, "table3", "fig-cost", "--scale", "smoke", "--run-dir", str(folder)) == 0
    out = capsys.readouterr().out
    assert "8 runs, 8 of them done" in out and "run 1 of" not in out and "round 1/" not in out
    assert (folder / "table3.md").read_text() == before
    assert inside(monkeypatch, "all", "--scale", "smoke", "--run-dir", str(folder), "--list", "--rounds", "9") == 0
    assert "started" in capsys.readouterr().out


def test_only_finished_runs_nothing_where_nothing_is(tmp_path, monkeypatch, capsys):
    arguments = ["table3", "fig-theory", "--scale", "quick", "--only-finished", "--run-dir", str(tmp_path / "none")]
    assert inside(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out.count("nothing is finished yet") == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table4"], "item = 'table4'"),
        (["table3", "--scale", "quik"], "did you mean quick"),
        (["table3", "--methods", "fedprotto"], "did you mean fedproto"),
        (["table3", "--datasets", "cifar11"], "datasets = 'cifar11'"),
        (["table3", "--seeds", "1,x"], "seeds = '1,x'"),
        (["table3", "--seeds", "-1"], "seed = -1"),
        (["table3", "--rounds", "0"], "rounds = 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, said, tmp_path, monkeypatch):
    with pytest.raises(PfedafmError, match=said):
        inside(monkeypatch, *arguments, "--run-dir", str(tmp_path / "runs"))
    assert not list(tmp_path.iterdir())
