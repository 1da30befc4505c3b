"""Labels tell runs apart, and groups have nothing in them that differs."""

from by_hand import record, run_by_hand

from pfedafm_jax.methods import find_method
from pfedafm_jax.results.select import grouped, labels


def test_no_two_runs_have_one_label_whatever_they_share(tmp_path):
    rounds = [record(n, 0.5) for n in (1, 2, 3)]
    places = {"a/run": 3, "b/run": 2, "b/other": 2, "c/run": 2}
    runs = [run_by_hand(rounds[:count], tmp_path / name) for name, count in places.items()]
    assert labels(runs[:2]) == ["run (3 rounds)", "run (2 rounds)"]
    assert labels(runs[1:3]) == ["run", "other"]
    found = labels([*runs[1:2], runs[3]])
    assert found == [f"run ({tmp_path / name / 'run'})" for name in "bc"]
    assert len(set(labels(runs))) == 4


def test_methods_of_one_title_are_not_averaged(monkeypatch):
    runs = [run_by_hand([record(1)], method=method) for method in ("fedper", "fedrep")]
    monkeypatch.setattr(find_method("fedrep"), "title", find_method("fedper").title)
    assert {label: len(own) for label, own in grouped(runs, ["method"]).items()} == {
        "FedPer": 1, "FedPer (fedrep)": 1,
    }  # fmt: skip
