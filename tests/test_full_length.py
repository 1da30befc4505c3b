"""Long runs beside one another: the numbers of the results page are those of its command."""

from pathlib import Path

import full_length
import pytest

from pfedafm_jax import PfedafmError

RESULTS = Path(__file__).parents[1] / "experiments" / "results"


def test_the_results_page_has_the_tables_that_the_command_makes(tmp_path):
    folder = RESULTS / "full_length" / "hetero_cifar10-n100"
    full_length.main([str(folder), "--out", str(tmp_path / "found")])
    page = (RESULTS / "README.md").read_text()
    tables = (tmp_path / "found.md").read_text().split("\n\n")
    assert (tmp_path / "found.png").stat().st_size > 10_000
    assert [table for table in tables if table.startswith("|") and table.strip() not in page] == []


def test_stretches_without_an_evaluation_of_all_clients_have_a_dash(tmp_path):
    folder = RESULTS / "hetero_cifar10-n100"  # 40 rounds, evaluated every ten
    full_length.main([str(folder), "--out", str(tmp_path / "found")])
    rows = (tmp_path / "found.md").read_text().splitlines()
    assert next(row for row in rows if row.startswith("| 1 to 8 |")).endswith("| – | – |")


def test_runs_of_different_lengths_are_not_compared(tmp_path):
    with pytest.raises(PfedafmError, match="one length"):
        full_length.main([str(RESULTS / "newcomers"), "--out", str(tmp_path / "found")])
