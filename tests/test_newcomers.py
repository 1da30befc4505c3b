"""Clients held out of training join finished runs, and which runs are refused."""

import json

import newcomers
import numpy as np
import pytest
from small import small_config

from pfedafm_jax import PfedafmError, run


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
