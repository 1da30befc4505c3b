"""Rates and knobs tried on held-out data: what is added, and the tables of the results page."""

import json
from pathlib import Path

import choices
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax import PfedafmError

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def test_the_page_of_rates_has_the_tables_that_the_command_prints(capsys):
    choices.main(["--file", str(RESULTS / "choices.json")])
    page = (RESULTS / "rates.md").read_text()
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page


def test_runs_of_sweeps_are_added_and_the_best_is_marked(tmp_path, capsys):
    found = {0.01: 0.5, 0.02: 0.75, 0.04: 0.25}
    for rate, accuracy in found.items():
        settings = {"method": "fd", "learning_rate": rate, "validation_fraction": 0.1}
        run_by_hand([record(1, everyone=accuracy)], tmp_path / f"{rate}", **settings)
    file = tmp_path / "choices.json"
    choices.main([str(tmp_path / f"{rate}") for rate in found] + ["--file", str(file)])
    choices.main(["--file", str(file)])  # reads what it wrote
    assert "| FD | 50.00 | **75.00** | 25.00 | 0.01 |" in capsys.readouterr().out
    assert [one["accuracy"] for one in json.loads(file.read_text())] == [*found.values()]


def test_runs_that_were_judged_on_test_images_are_refused(tmp_path):
    run_by_hand([record(1)], tmp_path / "run", method="fd")
    with pytest.raises(PfedafmError, match="no run of a sweep"):
        choices.main([str(tmp_path / "run"), "--file", str(tmp_path / "choices.json")])


def test_a_file_that_is_none_of_its_own_is_named(tmp_path):
    file = tmp_path / "choices.json"
    for content in ("{", '[{"method": "unknown"}]'):
        file.write_text(content)
        with pytest.raises(
            PfedafmError, match=r"choices\.json' is no file that this command wrote"
        ):
            choices.main(["--file", str(file)])
