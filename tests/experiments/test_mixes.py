"""Mix vectors beside one another: what is compared, and what is refused."""

from pathlib import Path

import mixes
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax import PfedafmError

FULL = Path(__file__).parents[2] / "experiments" / "results" / "full_length" / "hetero_cifar10-n100"


def run(tmp_path, *folders):
    return mixes.main([*map(str, folders), "--out", str(tmp_path / "found")])


@pytest.mark.parametrize("folders", [["fedper-seed0"], ["pfedafm-seed0"]])
def test_one_run_of_each_mix_is_compared(tmp_path, folders):
    with pytest.raises(PfedafmError, match="one run of each mix"):
        run(tmp_path, *(FULL / name for name in folders))
    assert list(tmp_path.iterdir()) == []


def test_runs_that_differ_otherwise_are_refused(tmp_path):
    run_by_hand([record(1)], tmp_path / "other", method="fedper")
    with pytest.raises(PfedafmError, match=r"these differ in crop, flip$"):
        run(tmp_path, FULL / "pfedafm-seed0", tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "ends", "page"),
    [
        (FULL.name, ("", "-mix0", "-mix0.5", "-mix1", "-start0.5"), "mixing.md"),
        ("hetero_cifar100-n100", ("", "-mix0"), "cifar100.md"),
        ("hetero_cifar10-n100-classes10", ("", "-mix0"), "mixing.md"),
        ("hetero_cifar10-n500", ("", "-mix0"), "mixing.md"),
        ("hetero_cifar10-n100-plain", ("", "-mix0"), "mixing.md"),
    ],
)
def test_the_results_pages_have_the_tables_that_the_command_makes(tmp_path, name, ends, page):
    run(tmp_path, *(FULL.with_name(name + end) for end in ends))
    page = (FULL.parents[1] / page).read_text()
    tables = (tmp_path / "found.md").read_text().split("\n\n")
    assert [table for table in tables if table.startswith("|") and table.strip() not in page] == []
    assert (tmp_path / "found.png").stat().st_size > 10_000
