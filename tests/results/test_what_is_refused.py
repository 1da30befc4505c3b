"""Files of runs that no run writes: which words say what is wrong with them."""

import json

import pytest
from by_hand import record, run_by_hand

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.results.records import Record
from pfedafm_jax.results.run import Damaged, read_run

LINE = {
    "round": 1,
    "mean_accuracy": 0.5,
    "all_clients_accuracy": None,
    "loss": 1e30,
    "seconds": 2.0,
    "participants": [4, 0],
    "not_finite": 0,
    "floats_up": 2**40,
    "floats_down": 10,
    "flops": 99,
    "mix_mean": 0.75,
    "mean_accuracy/small": None,
    "adaptation_flops": 12,
}


def test_a_line_is_read_back_as_it_was_written():
    read = Record.from_dict(LINE)
    assert (read.round, read.participants, read.drawn) == (1, [4, 0], 2)
    assert read.more == {"mix_mean": 0.75, "mean_accuracy/small": None, "adaptation_flops": 12}
    assert json.dumps(read.as_dict()) == json.dumps(LINE)
    dropped = Record.from_dict({**LINE, "dropped": [7]})
    assert dropped.drawn == 3 and dropped.as_dict()["dropped"] == [7]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss": "x"}, "loss = 'x' cannot be used; accepted: a number, or none"),
        ({"loss": float("nan")}, "loss = nan cannot be used; accepted: a number, or none"),
        ({"round": 0}, "round = 0 cannot be used; accepted: at least 1"),
        ({"round": 1.5}, "round = 1.5 cannot be used; accepted: a whole number"),
        ({"flops": 2**63}, f"flops = {2**63} cannot be used; accepted: below {2**63:,}"),
        ({"participants": [1, -1]}, "participants[1] = -1 cannot be used; accepted: at least 0"),
        ({"participants": 3}, "participants = 3 cannot be used; accepted: a list"),
        (
            {"mix_mean": "high"},
            "more.mix_mean = 'high' cannot be used; accepted: a number, or none",
        ),
    ],
)
def test_a_damaged_line_names_the_field_and_what_is_accepted(changes, why):
    with pytest.raises(PfedafmError) as caught:
        Record.from_dict({**LINE, **changes})
    assert str(caught.value) == why
    less = {name: value for name, value in LINE.items() if name != "flops"}
    with pytest.raises(PfedafmError, match=r"^flops is missing$"):
        Record.from_dict(less)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "summary.json",
            {"seconds": "long"},
            "seconds = 'long' cannot be used; accepted: a number",
        ),
        (
            "summary.json",
            {"versions": {"jax": 3}},
            "versions.jax = 3 cannot be used; accepted: a t",
        ),
        ("summary.json", {"devices": None}, "devices = None cannot be used; accepted: a text"),
        ("config.json", {"config": None}, "config = None cannot be used; accepted: a table of nam"),
        ("config.json", {"data": {"source": "here"}}, "data.digest is missing"),
        ("config.json", {"predictions": "mixed"}, "predictions = 'mixed' cannot be used; accepted"),
    ],
)
def test_a_damaged_file_names_itself_and_the_field(name, changes, why, tmp_path):
    folder = tmp_path / "run"
    run_by_hand([record(1)], folder)
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(Damaged) as caught:
        read_run(folder)
    said = str(caught.value)
    assert said.startswith(f"{str(path)!r} is damaged ({why}"), said
    assert "The run's other files can still be read by hand" in said
