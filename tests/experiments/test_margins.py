"""How far pFedAFM is ahead: the numbers of the results page, by hand, and what is refused."""

from pathlib import Path

import margins
import numpy as np
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax import PfedafmError

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
FULL = RESULTS / "full_length"
SPLITS = ("hetero_cifar10-n100", "hetero_cifar100-n100", "hetero_cifar10-n100-classes10")


def test_the_results_page_has_the_table_that_the_command_makes(tmp_path):
    folders = [str(FULL / f"{split}{end}") for split in SPLITS for end in ("", "-mix0")]
    margins.main([*folders, "--out", str(tmp_path / "found")])
    _, table = (tmp_path / "found.md").read_text().split("\n\n")
    assert table.strip() in (RESULTS / "README.md").read_text()
    assert (tmp_path / "found.png").stat().st_size > 10_000


def by_hand(method, seed, best, everyone, rounds=2, **settings):
    """A run with this best round; clients differ by ±1 point at the end."""
    scores = np.linspace(-0.01, 0.01, 100) * (method == "pfedafm") + everyone
    records = [record(n + 1, best, everyone=everyone) for n in range(rounds)]
    return run_by_hand(records, last_accuracies=scores, method=method, seed=seed, **settings)


def test_a_margin_has_its_error_and_says_what_it_lacks():
    ours = {0: by_hand("pfedafm", 0, 0.9, 0.8), 1: by_hand("pfedafm", 1, 0.9, 0.8)}
    both = {0: by_hand("fedproto", 0, 0.85, 0.7), 1: by_hand("fedproto", 1, 0.83, 0.74)}
    found = margins.margins(ours, both)
    assert (
        str(found["best round"]) == "+6.00 ± 1.41" and str(found["all clients"]) == "+8.00 ± 2.83"
    )
    assert str(found["best round in the paper"]) == "+3.19"
    one = margins.margins(ours, {1: both[1]})
    assert str(one["best round"]) == "+7.00 (seed 1)"
    error = 100 * np.linspace(-0.01, 0.01, 100).std(ddof=1) / 10
    assert str(one["all clients"]) == f"+6.00 ± {error:.2f} (seed 1)"
    other = margins.margins({0: ours[0]}, {0: by_hand("fedrep", 0, 0.8, 0.7, classes_per_client=3)})
    assert "best round in the paper" not in other and other["best round"].note == ""
    assert margins.margins({0: ours[0]}, {1: both[1]}) == {}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["hetero_cifar10-n100/fedper-seed0"], r"no finished run is one of pfedafm \(CIFAR-10, 2"),
        (["hetero_cifar10-n100/pfedafm-seed0"], "nothing to compare pfedafm with"),
        (["hetero_cifar10-n100/pfedafm-seed0", "homo_cifar10-n100/fd-seed0"], "in architectures$"),
        (["hetero_cifar10-n100", "homo_cifar10-n100/pfedafm-seed0"], "second run of its kind"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, names, said):
    with pytest.raises(PfedafmError, match=said):
        margins.main([*(str(FULL / name) for name in names), "--out", str(tmp_path / "found")])
    assert list(tmp_path.iterdir()) == []
