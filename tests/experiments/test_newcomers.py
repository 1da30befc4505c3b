"""Clients held out of training join finished runs, and which runs are refused."""

import json
from pathlib import Path

import newcomers
import numpy as np
import pytest
from paper.by_client import with_error
from small import small_config

from pfedafm_jax import PfedafmError, run

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "newcomers"


def test_the_results_page_has_the_tables_of_its_numbers():
    found = json.loads((RESULTS / "newcomers.json").read_text())
    page = (RESULTS / "README.md").read_text()
    assert [table for table in newcomers.tables(found).values() if table.strip() not in page] == []


@pytest.mark.slow
def test_held_out_clients_join_runs_side_by_side(tmp_path):
    for method, count in (("standalone", 2), ("fedproto", 2), ("fd", 0)):
        some = {"dataset": "synthetic", "synthetic_samples": 240, "held_out_clients": count}
        config = small_config(method, rounds=1, architectures=("dense_b",), **some)
        run(config, run_dir=tmp_path / method, progress=False)
    folders = [str(tmp_path / "standalone"), str(tmp_path / "fedproto")]
    newcomers.main([*folders, "--visits", "2", "--out", str(tmp_path / "found")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert np.array(found["fedproto"]["accuracies"]).shape == (2, 3)
    assert "| FedProto (1 rounds) |" in (tmp_path / "found.md").read_text()
    assert (tmp_path / "found.png").stat().st_size > 5000
    others = {"held_out_clients = 0 cannot be used": tmp_path / "fd", "two runs are of": folders[0]}
    for said, other in others.items():
        with pytest.raises(PfedafmError, match=said):
            newcomers.main([*folders, str(other), "--out", str(tmp_path / "other")])


def test_differences_are_paired_by_newcomer():
    accuracies = {
        "standalone": [[0.1, 0.5], [0.1, 0.7]],
        "pfedafm": [[0.1, 0.8], [0.1, 0.9]],
        "fedrep": [[0.1, 0.6], [0.1, 0.7]],
    }
    about = {"title": "T (9 rounds)", "clients": 0.95}
    found = {name: about | {"accuracies": rows} for name, rows in accuracies.items()}
    levels, differences = newcomers.tables(found).values()
    assert "| T (9 rounds) | 10.00 ± 0.00 | 85.00 ± 7.07 | 95.00 |" in levels
    assert differences.splitlines()[2:] == [
        "| pFedAFM − Standalone | +0.00 ± 0.00 | +25.00 ± 5.00 |",
        "| FedRep − Standalone | +0.00 ± 0.00 | +5.00 ± 5.00 |",
        "| pFedAFM − FedRep | +0.00 ± 0.00 | +20.00 ± 0.00 |",
    ]
    assert with_error(np.array([2.0])) == "+2.00"  # a newcomer alone
