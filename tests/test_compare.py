"""The command that compares methods, on generated data."""

import json

import pytest
from small import command_words

from pfedafm_jax.commands import compare as command
from pfedafm_jax.errors import PfedafmError


def test_the_command_compares_methods_and_leaves_finished_runs_alone(tmp_path, capsys):
    def compared(methods: str) -> str:
        words = command_words(rounds=2, methods=methods, run_dir=tmp_path)
        assert command.main([*words, "--lg_fedavg.learning-rate", "0.007"]) == 0
        return capsys.readouterr().out

    assert "round 2/2" in compared("standalone")
    first = (tmp_path / "standalone-seed0" / "rounds.jsonl").read_text()
    assert "run 1 of 1: LG-FedAvg" in compared("standalone,lg_fedavg")
    assert (tmp_path / "standalone-seed0" / "rounds.jsonl").read_text() == first
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["method"] for row in rows] == ["standalone", "lg_fedavg"]
    assert [row["floats_up_per_client"] for row in rows] == [0, 130]  # a header of 12 x 10 and 10
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert "LG-FedAvg" in (tmp_path / "compare.md").read_text()
    config = json.loads((tmp_path / "lg_fedavg-seed0" / "config.json").read_text())["config"]
    assert (config["learning_rate"], config["lg_fedavg"]["learning_rate"]) == (0.02, 0.007)
    splits = [path.read_bytes() for path in tmp_path.glob("*/partition.npz")]
    assert len(splits) == 2 and splits[0] == splits[1]
    with pytest.raises(PfedafmError, match="fedavgg"):
        compared("standalone,fedavgg")
