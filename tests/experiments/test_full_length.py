"""Long runs beside one another: the numbers of the results page are those of its command."""

from pathlib import Path

import full_length
import numpy as np
import pytest
from by_hand import record, run_by_hand
from paper import by_client, by_seed

from pfedafm_jax import PfedafmError

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


@pytest.mark.parametrize(
    ("folder", "page", "count"),
    [
        ("hetero_cifar10-n100", "cifar10.md", None),
        ("hetero_cifar100-n100", "cifar100.md", None),
        ("homo_cifar10-n100", "one_architecture.md", 2),
    ],
)
def test_the_results_pages_have_the_tables_that_the_command_makes(tmp_path, folder, page, count):
    full_length.main([str(RESULTS / "full_length" / folder), "--out", str(tmp_path / "found")])
    page = (RESULTS / "README.md").read_text() + (RESULTS / page).read_text()
    texts = (tmp_path / "found.md").read_text().split("\n\n")
    tables = [text.strip() for text in texts if text.startswith("|")][:count]
    assert (tmp_path / "found.png").stat().st_size > 10_000
    assert tables and [table for table in tables if table not in page] == []


def test_everybody_may_take_part_and_names_may_have_dots(tmp_path):
    picks = full_length.draws(3, 6, 6)[0]
    assert np.array_equal(np.sort(picks, axis=1), [range(6)] * 3)
    folder = str(RESULTS / "homo_cifar100-n100")
    for name in (".", str(tmp_path)):
        with pytest.raises(
            PfedafmError, match=r"out = .* cannot be used; accepted: a name for files"
        ):
            full_length.main([folder, "--out", name])
    full_length.main([folder, "--out", str(tmp_path / "v1.2")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.2.md", "v1.2.png"]


def test_stretches_without_an_evaluation_of_all_clients_have_a_dash(tmp_path):
    folder = RESULTS / "homo_cifar100-n100"  # 20 rounds, evaluated every ten
    full_length.main([str(folder), "--out", str(tmp_path / "found")])
    rows = (tmp_path / "found.md").read_text().splitlines()
    first = next(row for row in rows if row.startswith("| 1 to 4 | ")).split(" | ")
    assert first[5] == "–" and "–" not in first[:5]  # of all clients, and of participants


def test_runs_of_different_lengths_are_not_compared(tmp_path):
    with pytest.raises(PfedafmError, match="one length"):
        full_length.main([str(RESULTS / "newcomers"), "--out", str(tmp_path / "found")])


def test_runs_that_differ_in_more_than_methods_are_not_compared(tmp_path):
    unlike = {"dataset": "cifar10", "classes_per_client": 2, "architectures": ("cnn1", "cnn5")}
    rounds = [record(n) for n in range(1, 21)]
    run_by_hand(rounds, tmp_path / "fd", method="fd", **unlike)
    ours = str(RESULTS / "homo_cifar100-n100" / "pfedafm-seed0")
    with pytest.raises(PfedafmError, match="in architectures, classes_per_client, dataset"):
        full_length.main([ours, str(tmp_path / "fd"), "--out", str(tmp_path / "found")])


def test_the_error_of_a_mean_has_clients_as_units():
    """Two clients, of means 1 and 3 over two and one visits: the mean of visits is 5/3, the error
    the root of 2 · (2 · 2/3)² · 2, over 3 visits."""
    values = np.array([[0.0, np.nan], [2.0, 3.0]])
    assert by_client.with_error(values) == f"+1.67 ± {np.sqrt(2 * 2 * (4 / 3) ** 2) / 3:.2f}"
    assert by_client.with_error(np.full((2, 3), np.nan)) == "–"


def test_the_smallest_p_is_not_rounded_to_nothing():
    apart = np.linspace(12, 13, 100, dtype=np.float32)
    assert 0 < float(by_client.paired_p(apart)) < 1e-100


def test_seeds_are_averaged_and_clients_paired_within_a_seed():
    def run(method, seed, everyone):
        scores = everyone + np.linspace(-0.1, 0.1, 100)
        rounds = [record(n, everyone, everyone=everyone) for n in range(1, 11)]
        seen = {"accuracy": np.tile(scores - seed / 100, (10, 1))}
        return run_by_hand(rounds, last_accuracies=scores, visits=seen, method=method, seed=seed)

    runs = [run("pfedafm", 1, 0.9), run("pfedafm", 0, 0.8), run("fd", 0, 0.75), run("fd", 1, 0.84)]
    runs += [run("fml", 0, 0.5), run("standalone", 5, 0.5), run("standalone", 6, 0.5)]
    rows = by_seed.levels(runs).splitlines()[2:]
    assert rows[:2] == [
        f"| pFedAFM | {seed} |" + 4 * f" {80 + 10 * seed}.00 |" + " – |" for seed in (0, 1)
    ]
    means = {"pFedAFM": "85.00 ± 7.07", "FD": "79.50 ± 6.36", "Standalone": "50.00 ± 0.00"}
    assert rows[2::3] == [
        f"| {title} | mean ± deviation |" + 4 * f" {mean} |" + " – |"
        for title, mean in means.items()
    ]
    (only,) = by_seed.differences(runs).splitlines()[2:]  # Standalone has other seeds
    start, of_clients, of_seeds, *end = only.rsplit(" | ", 4)
    assert start == "| pFedAFM − FD | +5.00 ± 0.00 | +6.00 ± 0.00" + 2 * " | +5.50 ± 0.71"
    assert end == ["+5.50 ± 0.71", "+5.50 ± 0.71 |"]  # participants, best round
    # 5.5 / (0.71 / √2) = 11, with one degree of freedom: 1 - 2 arctan(11) / π
    assert float(of_clients) < 1e-3 and of_seeds == f"{1 - 2 * np.arctan(11) / np.pi:.2g}"
    assert by_seed.by_part(runs).splitlines()[2:] == [
        f"| pFedAFM − FD | {seed} |" + 4 * " – |" + f" +{gain}.00 ± 0.00 |"
        for seed, gain in enumerate((5, 6))
    ]
    assert by_seed.by_part(runs[2:]) == ""
    assert by_seed.levels(runs[1:6:3]) == by_seed.differences(runs[1:6:3]) == ""
    for one, small in zip(runs[:2], (0.87, 0.79), strict=True):  # 3 and 1 points below the mixed
        one.clients["all_clients/accuracy/small"] = one.clients["all_clients/accuracy"] + small
        one.clients["all_clients/accuracy/small"] -= one.summary.final_all_clients_accuracy
    *parts, last = by_seed.mixing(runs).splitlines()[2:]
    assert parts[0] == "| 1 to 2 | – | – | – |"  # not evaluated
    assert last == "| 9 to 10 | +1.00 ± 0.00 | +3.00 ± 0.00 | +2.00 ± 1.41 |"
    assert by_seed.mixing(runs[2:]) == ""


def test_parts_that_were_not_evaluated_have_no_level_and_no_change():
    rounds = [record(n, 0.5) for n in range(1, 11)]
    run = run_by_hand(rounds, last_accuracies=np.full(100, 0.8), method="fd")
    row = full_length.levels([run]).splitlines()[2]
    assert row == "| FD | – | – | – | – | 80.00 | – | 80.00 (10) |"
