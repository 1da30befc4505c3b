"""Controls beside pFedAFM: levels, differences paired by seed and their intervals, by hand."""

import controls
import numpy as np
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax import PfedafmError


def by_hand(method, seed, everyone, **settings):
    """A run of two rounds with this accuracy of all clients at the end."""
    records = [record(t, 0.9, everyone=everyone) for t in (1, 2)]
    scores = np.full(100, everyone)
    return run_by_hand(records, last_accuracies=scores, method=method, seed=seed, **settings)


RUNS = [
    *(by_hand("pfedafm", seed, level) for seed, level in enumerate((0.80, 0.82, 0.84))),
    *(by_hand("fedrep", seed, level) for seed, level in enumerate((0.81, 0.82, 0.83))),
    by_hand("fedavg", 1, 0.9, server_optimizer="momentum", server_momentum=0.5, server_mean=0.8),
]


def test_every_seed_stands_beside_its_mean():
    text = controls.levels(controls.by_split(RUNS))
    assert "| pFedAFM | **82.00** (80.00, 82.00, 84.00) |" in text
    assert "| FedAvg, momentum 0.5, mean 0.8 | 90.00 |" in text


def test_differences_are_paired_by_seed_with_students_interval():
    """-1, 0 and 1 have mean 0 and standard error 1/√3; t(0.975, 2) is 4.3027."""
    column = controls.by_split(RUNS)["CIFAR-10, 2 classes, 2 rounds"]
    text = controls.difference(column["pFedAFM"], column["FedRep"])
    assert text == "+0.00 [-2.48, +2.48] (-1.00, +0.00, +1.00)"
    alone = controls.difference(column["pFedAFM"], column["FedAvg, momentum 0.5, mean 0.8"])
    assert alone == "-8.00 (seed 1)"
    assert controls.difference(column["pFedAFM"], {7: RUNS[0]}) == "not run"


def test_a_second_run_of_its_kind_and_runs_without_pfedafm_are_refused(tmp_path):
    with pytest.raises(PfedafmError, match="second run of its kind and seed"):
        controls.by_split([RUNS[0], RUNS[0]])
    assert "pFedAFM" not in controls.methods_of(controls.by_split(RUNS[3:]))


def test_what_is_particular_to_a_run_is_in_its_name():
    held = by_hand("pfedafm", 0, 0.8, pfedafm={"mix_fixed": 0.0})
    assert controls.name_of(held) == "pFedAFM, mix held at 0"
    tuned = by_hand("fedavg_finetuned", 0, 0.8, fedavg_finetuned={"finetune": "header"})
    assert controls.name_of(tuned) == "FedAvg with fine-tuning, header"
