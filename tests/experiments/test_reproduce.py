"""The paper's tables and figures: its numbers, the plan, tables of made-up runs, the command."""

import dataclasses
import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import reproduce
from by_hand import record, run_by_hand
from paper import case_studies, numbers, outcome
from paper.items import ITEMS
from paper.study import SCALES, Study, estimator, name_of
from paper.tables import accuracy_table

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.results import plots
from pfedafm_jax.results.tables import markdown
from pfedafm_jax.runs.existing import Task, find_existing

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def study(base: Path, scale: str = "quick", **changes) -> Study:
    return dataclasses.replace(Study(SCALES[scale], base, SCALES[scale].datasets), **changes)


def tasks_of(asked: Study, *items: str) -> dict[str, Task]:
    """The runs of these items, or of all, by name."""
    chosen = [ITEMS[name].tasks(asked) for name in items or ITEMS]
    return {name_of(task): task for tasks in chosen for task in tasks.values()}


def test_the_cost_to_a_target_is_that_up_to_the_first_round_that_reaches_it():
    means = ((1, 0.5), (2, None), (3, 0.91), (4, 0.95))
    rounds = [record(number, accuracy, floats=5) for number, accuracy in means]
    assert numbers.cost_to(0.9, rounds) == (3, 45, 15)  # rounds, floats, FLOPs
    assert numbers.cost_to(0.99, rounds) is None and numbers.cost_to(0.1, []) is None


@pytest.mark.parametrize(("clients", "participants"), [(10, 10), (50, 10), (100, 10)])
def test_the_scale_of_the_paper_has_its_columns(clients, participants):
    config = SCALES["paper"].settings(Config.load("hetero_cifar10"), clients)
    assert (config.rounds, config.local_epochs, config.learning_rate) == (500, 10, 0.01)
    assert (config.num_clients, config.num_participants) == (clients, participants)


@pytest.mark.parametrize("family", ["homo", "hetero"])
def test_the_papers_margins_follow_from_its_tables(family):
    """A slip in copying a number would show: the margins were copied by themselves."""
    for index, cell in enumerate(numbers.CELLS):
        values = {method: row[cell] for method, row in numbers.ACCURACY[family].items()}
        own = values.pop("pfedafm")
        assert own is not None
        others = [value for value in values.values() if value is not None]
        assert own - max(others) == pytest.approx(numbers.MARGIN_BEST[family][index], abs=1e-6)
        mutual = [values[name] for name in numbers.MUTUAL if values[name] is not None]
        assert own - max(mutual) == pytest.approx(numbers.MARGIN_MUTUAL[family][index], abs=1e-6)
    assert set(numbers.METHODS) == set(numbers.ACCURACY[family]) <= set(method_names())


def test_almost_all_of_two_rates_is_not_said():
    means = {"pfedafm": [80.0, 93.0, 94.0], "fedproto": [90.0, 90.0, 90.0]}
    rises, almost = case_studies.MIX_RATE.claims({"CIFAR-10": means})
    assert rises.seen and almost.seen and almost.detail == "2 of 3"
    two = {name: values[:2] for name, values in means.items()}
    assert case_studies.MIX_RATE.claims({"CIFAR-10": two})[1].seen is None


@pytest.mark.parametrize("module", [numbers, outcome])
def test_examples_in_docstrings(module):
    failures, tried = doctest.testmod(module)
    assert tried and not failures


def test_the_papers_number_stands_beside_runs_of_its_settings():
    usual = Config.load("hetero_cifar10").as_dict()
    assert numbers.published(usual) == ("Table 3", 0.9568)
    homo = Config.load("homo_cifar100").as_dict()
    assert numbers.published(homo) == ("Table 2", 0.6269)
    assert numbers.published({**usual, "method": "fedapen"}) == ("Table 3", None)
    others = {"participation": 0.2, "classes_per_client": 4, "partition": "dirichlet"}
    others |= {"method": "mine", "architectures": ["cnn5"], "dataset": "synthetic"}
    others |= {"pfedafm": {"training": "end_to_end"}}
    for other in ({name: value} for name, value in others.items()):
        assert numbers.published({**usual, **other}) is None


def test_quick_runs_have_the_settings_of_their_configuration_and_known_folders(tmp_path):
    tasks = {name: task.config for name, task in tasks_of(study(tmp_path)).items()}
    named = {"hetero_cifar10": "pfedafm", "homo_cifar100": "fd", "hetero_cifar100": "fml"}
    for name, method in named.items():
        expected = updated(Config.load(name), method=method, rounds=20)
        assert tasks[f"{name}-n100/{method}-seed0"] == expected
    assert tasks["hetero_cifar10-n100-mixlr0.1/pfedafm-seed2"].pfedafm.mix_learning_rate == 0.1
    assert tasks["hetero_cifar100-n100-classes50/fedproto-seed0"].classes_per_client == 50
    dirichlet = tasks["hetero_cifar10-n100-gamma0.5/pfedafm-seed0"]
    assert (dirichlet.partition, dirichlet.gamma) == ("dirichlet", 0.5)
    assert tasks["hetero_cifar10-n100-end_to_end/pfedafm-seed0"].pfedafm.training == "end_to_end"
    assert not any("mixlr1/" in name or "classes2/" in name for name in tasks)  # in Table 3


def test_the_papers_scale_has_its_columns_and_points(tmp_path):
    tasks = tasks_of(study(tmp_path, "paper"))
    configs = [task.config for task in tasks.values()]
    assert {(c.num_clients, c.participation) for c in configs} == {(10, 1), (50, 0.2), (100, 0.1)}
    assert {(c.rounds, c.local_epochs, c.learning_rate) for c in configs} == {(500, 10, 0.01)}
    tables = 2 * 3 * 2 * 8
    uneven, mix, training = 2 * (4 + 5) + 2 * 2 * 5, 2 * (4 * 3 - 1), 2
    assert len(tasks) == tables + uneven + mix + training


def test_the_long_runs_of_the_results_are_finished_runs_of_the_full_scale():
    long = study(RESULTS / "full_length", "full", datasets=("cifar10",))
    tasks = [task for task in tasks_of(long, "table3").values() if task.folder]
    there = [task for task in tasks if task.folder and task.folder.exists()]
    assert len(tasks) == 10 and {task.config.rounds for task in tasks} == {500}
    assert there and {find_existing(task).state for task in there} == {"done"}


def test_what_was_asked_for_takes_the_place_of_the_defaults(tmp_path):
    asked = study(tmp_path, datasets=("cifar10",), methods=("fd", "fml"), seeds=(3, 4), rounds=7)
    tasks = tasks_of(asked, "table3").values()
    found = [task.folder.name for task in tasks if task.folder]
    assert found == ["fd-seed3", "fml-seed3", "fd-seed4", "fml-seed4"]
    assert {task.config.rounds for task in tasks} == {7}
    assert {task.config.seed for task in tasks_of(asked, "fig-mix-lr").values()} == {3, 4}


def made_up(config: Config, level: float = 0.8, not_finite: int = 0, folder: Path | None = None):
    """A finished run whose mean accuracy goes up to `level` and whose clients end 0.1 below it."""
    others = {"/small": 0.05, "/large": 0.1} if config.method == "pfedafm" else {}
    drawn, rounds = config.num_participants, []
    for number in range(1, config.rounds + 1):
        mean, last = round(level * number / config.rounds, 4), number == config.rounds
        more = {f"mean_accuracy{name}": mean - less for name, less in others.items()}
        if last:
            more |= {f"all_clients_accuracy{n}": level - 0.1 - less for n, less in others.items()}
        more |= {"participants": range(drawn), "not_finite": int(number == not_finite)}
        rounds.append(record(number, mean, everyone=level - 0.1 if last else None, **more))
    mix = np.full((config.rounds, config.num_clients), np.nan, np.float32)
    mix[:, :drawn] = np.linspace(1, 0.2, config.rounds)[:, None]
    scores = np.random.default_rng(0).normal(level - 0.1, 0.05, config.num_clients)
    visits, settings = {"mix_mean": mix}, config.as_dict()
    run = run_by_hand(rounds, folder, last_accuracies=scores, visits=visits, **settings)
    for name, less in others.items():
        run.clients[f"all_clients/accuracy{name}"] = scores[None] - less  # pyright: ignore
    return run


def test_accuracies_stand_beside_the_papers(tmp_path):
    asked = study(tmp_path, datasets=("cifar10",))

    def run(method, level, **changes):
        config = updated(asked.task(method, "cifar10").config, **changes)
        return made_up(config, level, 4 if method == "fedapen" else 0)

    found = {
        (100, "cifar10", "pfedafm", 0): run("pfedafm", 0.91),
        (100, "cifar10", "pfedafm", 1): run("pfedafm", 0.93),
        (100, "cifar10", "fedproto", 0): run("fedproto", 0.9, rounds=40),
        (100, "cifar10", "fedapen", 0): run("fedapen", 0.3),
        (100, "cifar10", "standalone", 0): run("standalone", 0.88),
        (100, "cifar10", "fedrep", 0): run("fedrep", 0.5),
    }
    result = accuracy_table(asked, found, "hetero")
    assert {row[0]: row[1] for row in result.tables[0].rows} == {
        "Standalone": "88.00 (91.97)", "FedProto": "90.00 (92.49)", "FedAPEN": "30.00 ✗ (fails)",
        "FedRep": "50.00 (–)", "pFedAFM": "92.00 (95.68)",
        "pFedAFM − best baseline": "+2.00 (+3.19)", "pFedAFM − best of category": "+62.00 (+22.47)",
        "pFedAFM − best control": "+42.00 (–)",
    }  # fmt: skip
    details = {row[0]: row[1:] for row in result.tables[1].rows}
    # The last ten of 20 rounds up to L have a mean of L · 15.5 / 20.
    assert details["pFedAFM"][:4] == ["92.00 ± 1.41", "95.68", "71.30 ± 1.10", "82.00 ± 1.41"]
    assert details["FedProto"][-2:] == ["40", "1"] and "FedAPEN (✗ diverged at round 4)" in details
    assert result.claims[0].seen is True and "at 1 of 1" in result.claims[0].line()
    assert "| FedProto | 90.00 (92.49) |" in result.markdown()
    assert "different lengths" in result.markdown()


def test_every_figure_is_drawn_from_finished_runs_and_says_what_is_missing(tmp_path):
    asked = study(tmp_path, only_finished=True)
    level = {"pfedafm": 0.95, "fedproto": 0.9}
    left_out = ("end_to_end/pfedafm-seed0", "gamma0.5/fedproto-seed0")  # of CIFAR-100
    outcomes = {}
    for item in ITEMS.keys() - {"table2", "fig-theory"}:
        found = {}
        for key, task in {**ITEMS[item].also(asked), **ITEMS[item].tasks(asked)}.items():
            name, reached = name_of(task), level.get(task.config.method, 0.7)
            if not (name.startswith("hetero_cifar100") and name.endswith(left_out)):
                found[key] = made_up(task.config, reached - 0.4 * ("cifar100" in name))
        outcomes[item] = ITEMS[item].draw(asked, found)
    assert all(one is not None and one.figure.axes for one in outcomes.values())

    def rows(item: str) -> list[tuple[str, ...]]:
        return [tuple(row) for row in outcomes[item].tables[0].rows]

    assert rows("table1")[3][:3] == ("CNN-4", "4.04", "3.81")  # its widths do not give its size
    assert ("CIFAR-10 to 90 %", "pFedAFM", "19", "57", "95", "95.00", "20") in rows("fig-cost")
    assert ("CIFAR-100 to 50 %", "FedProto", "20", "60", "100", "50.00", "20") in rows("fig-cost")
    dirichlet = rows("fig-dirichlet")
    assert ("CIFAR-100", "0.5", "pFedAFM", "55.00", "42.62", "45.00", "20", "1") in dirichlet
    assert not any(row[:3] == ("CIFAR-100", "0.5", "FedProto") for row in dirichlet)
    differences = [tuple(row) for row in outcomes["fig-dirichlet"].tables[1].rows]
    assert ("CIFAR-10", "0.5", "+5.00 ± 0.00", "+5.00 ± 0.00") in differences
    assert ("CIFAR-100", "0.5", "–", "+5.00 ± 0.00") in differences
    mix = ("95.00 ± 0.00", "73.62 ± 0.00", "85.00 ± 0.00", "20", "3")
    assert ("CIFAR-10", "0.001", "pFedAFM", *mix) in rows("fig-mix-lr")
    assert ("CIFAR-10", "client 0", "1.000", "0.200", "20", "0", "20") in rows("fig-mix-mean")
    assert [row[1:3] for row in rows("fig-ablation-models")[:3]] == [
        ("small", "90.00"), ("large", "85.00"), ("mixed", "95.00"),
    ]  # fmt: skip
    trained = [row[1] for row in rows("fig-ablation-training")]
    assert trained == ["end to end", "iterative", "iterative"]
    individual = [row for row in rows("fig-individual") if row[1] == "FedProto"]
    assert [row[3] for row in individual] == ["92", "93"]
    assert len(rows("fig-individual")) == 14  # all baselines of both datasets
    claims = {claim.text: claim.seen for one in outcomes.values() for claim in one.claims}
    assert claims["pFedAFM needs fewer rounds than FedProto."] is True
    assert claims["CIFAR-100: iterative training is better than end to end."] is None
    rises = "CIFAR-10: accuracy rises from the small to the large to the mixed model."
    assert claims[rises] is False


def test_time_is_estimated_from_what_finished_runs_took(tmp_path):
    asked = study(tmp_path)
    tasks = [asked.task(method, "cifar10") for method in ("pfedafm", "standalone")]
    new = [find_existing(task) for task in tasks]
    assert [estimator(new)(task) for task in new] == [None, None]
    made_up(tasks[0].config, folder=tasks[0].folder)  # 20 rounds of 2 s, and 1.5 s to compile
    known = [find_existing(task) for task in tasks]
    assert [estimator(known)(task) for task in known] == [0, pytest.approx(41.5)]


SOME = ["table1", "table3", "fig-cost", "fig-ablation-training"]


@pytest.mark.parametrize("items", [SOME, pytest.param([*ITEMS], marks=pytest.mark.slow)])
def test_items_are_made_at_the_smallest_scale_and_run_once(items, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *arguments: [])  # each run's own, seconds each
    methods = ["pfedafm", "standalone"] if items is SOME else [*numbers.METHODS]
    asked = ["--scale", "smoke", "--run-dir", str(tmp_path), "--methods", ",".join(methods)]
    assert reproduce.main([*items, *asked]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d+ runs, 0 of them done\n", out) and "run 1 of " in out
    for name in items:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert f"reproduce.py {name} --scale smoke" in (tmp_path / f"{name}.md").read_text()
    assert "CNN-4 are not what the widths" in (tmp_path / "table1.md").read_text()
    before = (tmp_path / "table3.md").read_text()
    assert all(f"| {find_method(name).title} |" in before for name in methods)
    assert reproduce.main(["table3", "fig-cost", *asked]) == 0
    out = capsys.readouterr().out
    done = len(methods)
    assert f"{done} runs, {done} of them done" in out and "run 1 of" not in out
    assert (tmp_path / "table3.md").read_text() == before
    assert reproduce.main([*items, *asked, "--list", "--rounds", "9"]) == 0
    assert "started" in capsys.readouterr().out


def test_only_finished_runs_nothing_where_nothing_is(tmp_path, capsys):
    place = str(tmp_path / "none")
    assert reproduce.main(["table3", "fig-theory", "--only-finished", "--run-dir", place]) == 0
    assert capsys.readouterr().out.count("nothing is finished yet") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table4"], "item = 'table4'"),
        (["table3", "--scale", "quik"], "did you mean quick"),
        (["table3", "--methods", "fedprotto"], "did you mean fedproto"),
        (["table3", "--datasets", "cifar11"], "datasets = 'cifar11'"),
        (["table3", "--seeds", "1,x"], "seeds = '1,x'"),
        (["table3", "--rounds", "0"], "rounds = 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, said, tmp_path):
    with pytest.raises(PfedafmError, match=said):
        reproduce.main([*arguments, "--run-dir", str(tmp_path / "runs")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("item", ["fig-pathological", "fig-dirichlet"])
def test_the_differences_of_the_results_page_are_those_of_the_command(item):
    asked = study(RESULTS / "full_length", "full", datasets=("cifar10",), rounds=100)
    tasks = {
        key: find_existing(task, longer=True) for key, task in ITEMS[item].tasks(asked).items()
    }
    found = {key: task.run.first(100) for key, task in tasks.items() if task.run}
    drawn = ITEMS[item].draw(asked, found)
    assert drawn is not None and len(drawn.tables[1].rows) > 1
    rows = markdown(drawn.tables[1].columns, drawn.tables[1].rows)
    assert rows in (RESULTS / "mixing.md").read_text()
