"""What must hold of every split, whatever the dataset, the number of clients and the settings."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.data import Partition, make_partition
from pfedafm_jax.data.partition.shares import apportion, dirichlet_counts, draw_classes

QUICK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
CIFAR_LIKE = np.tile(np.arange(10), 6000)
PARTS = ("train", "test", "validation")


def all_indices(partition: Partition) -> np.ndarray:
    return np.concatenate([*partition.train, *partition.test, *partition.validation])


def in_order(partition: Partition) -> bool:
    parts = (*partition.train, *partition.test, *partition.validation)
    return all(part.dtype == np.int32 and (np.diff(part) > 0).all() for part in parts)


@st.composite
def problems(draw):
    """(labels, num_train, num_clients, num_classes) with unequal classes in random order."""
    num_classes = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(0, 80), min_size=num_classes, max_size=num_classes))
    labels = np.repeat(np.arange(num_classes), sizes)
    labels = np.random.default_rng(draw(st.integers(0, 99))).permutation(labels)
    num_train = draw(st.integers(0, len(labels)))
    return labels, num_train, draw(st.integers(1, 15)), num_classes


@given(st.integers(1, 40), st.integers(1, 25), st.data())
@QUICK
def test_no_class_is_dealt_twice_to_a_client_and_classes_have_equally_many_owners(
    num_clients, num_classes, data
):
    k, random = data.draw(st.integers(1, num_classes)), data.draw(st.integers(0, 999))
    owned = draw_classes(np.random.default_rng(random), num_clients, k, num_classes)
    assert all(len(mine) == len(set(mine)) == k for mine in owned)
    owners = np.bincount(np.concatenate(owned), minlength=num_classes)
    assert owners.max() - owners.min() <= 1 and owners.sum() == num_clients * k


@given(problems(), st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 2**32))
@QUICK
def test_pathological_paper_split(problem, k, validation_fraction, seed):
    labels, num_train, num_clients, num_classes = problem
    options: dict[str, Any] = dict(classes_per_client=k, validation_fraction=validation_fraction)
    options |= {"seed": seed, "num_classes": num_classes}
    try:
        split = make_partition(labels, num_train, num_clients, **options)
    except PfedafmError:
        # Only for a reason: too many classes asked for, or a class too small for its owners.
        owners = -(-num_clients * k // num_classes)
        per_owner = -(-(2 + (validation_fraction > 0)) // k)
        smallest = np.bincount(labels, minlength=num_classes).min() if len(labels) else 0
        assert k > num_classes or smallest < owners * per_owner or num_clients > len(labels)
        return
    counts = split.class_counts(labels, num_classes)
    assert ((counts > 0).sum(axis=1) == k).all()
    dealt = np.flatnonzero(np.isin(labels, np.flatnonzero(counts.sum(axis=0))))
    np.testing.assert_array_equal(np.sort(all_indices(split)), dealt)  # every one exactly once
    assert num_clients * k < num_classes or len(dealt) == len(labels)
    check_cuts(split, labels, num_classes, validation_fraction)


@given(problems(), st.floats(0.001, 100), st.integers(0, 12), st.integers(0, 2**32))
@QUICK
def test_dirichlet_paper_split_ends_and_everyone_has_enough(problem, gamma, min_samples, seed):
    labels, num_train, num_clients, num_classes = problem
    options: dict[str, Any] = dict(kind="dirichlet", gamma=gamma, min_samples=min_samples)
    options |= {"seed": seed, "num_classes": num_classes}
    if len(labels) == 0 or num_clients * max(min_samples, 2) > len(labels):
        with pytest.raises(PfedafmError):
            make_partition(labels, num_train, num_clients, **options)
        return
    split = make_partition(labels, num_train, num_clients, **options)
    np.testing.assert_array_equal(np.sort(all_indices(split)), np.arange(len(labels)))
    assert split.class_counts(labels, num_classes).sum(axis=1).min() >= min_samples
    check_cuts(split, labels, num_classes, 0.0)


def check_cuts(
    split: Partition, labels: np.ndarray, num_classes: int, validation_fraction: float
) -> None:
    assert in_order(split)
    for train, test, validation in zip(split.train, split.test, split.validation, strict=True):
        total = len(train) + len(test) + len(validation)
        assert len(train) and len(test)
        assert bool(len(validation)) == (validation_fraction > 0)
        assert abs(len(test) - 0.2 * total) <= 1  # 8:2 within one sample
        assert abs(len(validation) - validation_fraction * (total - len(test))) <= 1
        whole = np.concatenate([train, test, validation])
        mine, tested = (np.bincount(labels[p], minlength=num_classes) for p in (whole, test))
        # The same mixture of classes: no class is off its exact share by one or more.
        assert (np.abs(tested - mine * len(test) / total) < 1 + 1e-9).all()


@given(
    problems(),
    st.sampled_from(["pathological", "dirichlet"]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 99),
)
@QUICK
def test_authors_split_keeps_the_official_parts_apart(problem, kind, validation_fraction, seed):
    labels, num_train, num_clients, num_classes = problem
    options: dict[str, Any] = dict(kind=kind, protocol="authors", classes_per_client=1, seed=seed)
    options |= {"min_samples": 5, "validation_fraction": validation_fraction}
    try:
        split = make_partition(labels, num_train, num_clients, num_classes=num_classes, **options)
    except PfedafmError:
        return  # how little is too little is checked below and in the paper splits
    indices = all_indices(split)
    assert len(np.unique(indices)) == len(indices) and in_order(split)
    assert all((part < num_train).all() and len(part) for part in split.train)
    assert all((part < num_train).all() for part in split.validation)
    assert all((part >= num_train).all() and len(part) for part in split.test)
    from_train = sum(map(len, split.train)) + sum(map(len, split.validation))
    assert from_train <= round(num_train * 0.8)
    if kind == "dirichlet":
        assert from_train == round(num_train * 0.8)
        assert sum(map(len, split.test)) == len(labels) - num_train
        assert split.class_counts(labels, num_classes).sum(axis=1).min() >= 5


@pytest.mark.parametrize(
    ("num_clients", "classes_per_client", "num_classes", "owners"),
    [(10, 2, 10, 2), (50, 2, 10, 10), (100, 2, 10, 20), (10, 10, 100, 1), (100, 10, 100, 10)],
)
def test_cifar_settings_of_the_paper(num_clients, classes_per_client, num_classes, owners):
    labels = np.tile(np.arange(num_classes), 60000 // num_classes)
    split = make_partition(
        labels, 50000, num_clients, classes_per_client=classes_per_client, seed=3
    )
    counts = split.class_counts(labels, num_classes)
    assert split.num_clients == num_clients and counts.shape == (num_clients, num_classes)
    assert ((counts > 0).sum(axis=0) == owners).all() and counts.sum() == 60000
    # Shares U(0.4, 0.6): nobody gets more than half as much again as another owner of the class.
    held = np.where(counts > 0, counts, np.nan)
    assert np.nanmax(np.nanmax(held, axis=0) - 1.5 * np.nanmin(held, axis=0)) <= 2.5
    assert sum(map(len, split.test)) == pytest.approx(12000, abs=num_clients)
    # More classes than slots: some belong to nobody.
    few = make_partition(CIFAR_LIKE, 50000, 2, classes_per_client=3).class_counts(CIFAR_LIKE, 10)
    assert sorted(few.sum(axis=0)) == [0] * 4 + [6000] * 6


def test_authors_split_of_cifar_uses_40000_and_10000_in_the_same_shares():
    split = make_partition(CIFAR_LIKE, 50000, 10, protocol="authors", seed=42)
    assert sum(map(len, split.train)) == 40000 and sum(map(len, split.test)) == 10000
    for train, test in zip(split.train, split.test, strict=True):
        counts = (np.bincount(CIFAR_LIKE[part], minlength=10) for part in (train, test))
        shares = [count / count.sum() for count in counts]
        np.testing.assert_allclose(*shares, atol=0.02)


def test_smaller_gamma_is_more_unequal():
    spread = []
    for gamma in (0.1, 1.0, 10.0):
        split = make_partition(CIFAR_LIKE, 50000, 20, kind="dirichlet", gamma=gamma)
        spread.append(np.std(split.class_counts(CIFAR_LIKE, 10)))
    assert spread[0] > 1.5 * spread[1] > 3 * spread[2]


def test_repair_gives_everyone_enough_when_redraws_do_not():
    # At gamma 0.001 a class falls whole to one client: 48 of 50 go empty without repair.
    images = [np.array([300, 300]), np.array([40, 10])]
    counts, tests = dirichlet_counts(np.random.default_rng(0), 0.001, 50, images, [12, 1])
    assert (counts.sum(axis=1) >= 12).all() and (counts.sum(axis=0) == [300, 300]).all()
    assert (tests.sum(axis=1) == 1).all() and (tests.sum(axis=0) == [40, 10]).all()


def test_the_seed_decides_the_split_and_validation_is_cut_from_train():
    first, same, other = (make_partition(CIFAR_LIKE, 50000, 10, seed=seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first.train, same.train, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.train, other.train, strict=True))
    # Validation is cut from train and leaves test alone.
    without = make_partition(CIFAR_LIKE, 50000, 10)
    with_validation = make_partition(CIFAR_LIKE, 50000, 10, validation_fraction=0.25)
    for client in range(10):
        np.testing.assert_array_equal(without.test[client], with_validation.test[client])
        both = np.concatenate([with_validation.train[client], with_validation.validation[client]])
        np.testing.assert_array_equal(without.train[client], np.sort(both))
        assert len(without.validation[client]) == 0


def test_apportion_by_hand():
    assert apportion(10, np.array([1, 1, 1])).tolist() == [4, 3, 3]
    assert apportion(7, np.array([0.5, 0.3, 0.2])).tolist() == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert apportion(5, np.array([100.0, 1.0, 1.0]), least=1).tolist() == [3, 1, 1]
    assert apportion(0, np.array([2.0, 1.0])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "even"}, "kind = 'even' cannot be used; accepted: pathological, dirichlet, iid"),
        ({"protocol": "mine"}, "protocol = 'mine'"),
        ({"classes_per_client": 11}, "classes_per_client = 11 cannot be used; accepted: 1 to 10"),
        ({"classes_per_client": 0}, "classes_per_client = 0"),
        ({"num_clients": 0}, "num_clients = 0"),
        ({"num_clients": 101}, "num_clients = 101 cannot be used; accepted: 1 to 100"),
        ({"num_clients": 51}, "class . has 10 images to deal, too few for the 11 clients"),
        ({"kind": "dirichlet", "num_clients": 11}, "11 clients with at least 10 images each"),
        ({"kind": "dirichlet", "gamma": 0.0}, "gamma = 0.0"),
        ({"kind": "dirichlet", "gamma": float("nan")}, "gamma = nan"),
        ({"test_fraction": 1.0}, "test_fraction = 1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction = -0.1"),
        ({"num_train": 101}, "num_train = 101"),
        ({"num_classes": 9}, "num_classes = 9 .*accepted: more than the largest label, 9"),
        ({"seed": -1}, "seed = -1"),
        ({"protocol": "authors", "num_train": 100}, "has 0 images to deal"),
        ({"labels": np.zeros(0, int)}, "labels is"),
        ({"labels": np.array([0.5, 1.0])}, "labels is float64"),
    ],
)
def test_impossible_settings_are_refused_by_name(options, message):
    usual = {"labels": np.tile(np.arange(10), 10), "num_train": 80, "num_clients": 5}
    with pytest.raises(PfedafmError, match=message):
        make_partition(**{**usual, **options})


def test_saved_partition_comes_back(tmp_path):
    split = make_partition(CIFAR_LIKE, 50000, 7, validation_fraction=0.1)
    split.save(tmp_path / "new" / "split.npz")
    back = Partition.load(tmp_path / "new" / "split.npz")
    for part in PARTS:
        for a, b in zip(getattr(split, part), getattr(back, part), strict=True):
            np.testing.assert_array_equal(a, b)
            assert b.dtype == np.int32
    (rows,) = make_partition(CIFAR_LIKE, 50000, 1).train
    one = Partition((rows.astype(np.uint32),), (rows[:0],), (rows[:0],))
    one.check(60000, 1).save(tmp_path / "one.npz")
    np.testing.assert_array_equal(Partition.load(tmp_path / "one.npz").train[0], rows)


def test_damaged_partition_file_is_named(tmp_path):
    path = tmp_path / "split.npz"
    with pytest.raises(PfedafmError, match="cannot be read"):
        Partition.load(path)

    def fake(num: int) -> dict[str, Any]:  # sizes 0 + 1 + 2 are 3 indices, 0 + 1 + 2 + 3 are not 4
        return {f"{part}{end}": np.arange(num) for part in PARTS for end in ("", "_sizes")}

    np.savez(path, **fake(3))
    assert Partition.load(path).num_clients == 3
    np.savez(path, **fake(4))
    with pytest.raises(PfedafmError, match="do not add up"):
        Partition.load(path)


def test_even_shares_hold_as_much_of_every_class():
    split = make_partition(np.tile(np.arange(3), 50), 150, 7, kind="iid", validation_fraction=0.1)
    counts = split.class_counts(np.tile(np.arange(3), 50), 3)
    assert counts.sum() == 150 and counts.max() - counts.min() <= 1
    split.check(150, 7)
    with pytest.raises(PfedafmError, match="too few for 9 clients"):
        make_partition(np.arange(10) % 2, 10, 9, kind="iid")


def test_natural_shares_are_the_users_of_the_data():
    users = np.array([2, 0, 1, 1, 0, 2, 2, 1, 2, 2, 3])  # user 3 has one image
    labels = np.zeros(11, int)
    split = make_partition(labels, 8, 4, kind="natural", users=users).check(11, 4)
    whole = [np.sort(np.concatenate(own)) for own in zip(split.train, split.test, strict=True)]
    assert [one.tolist() for one in whole] == [
        np.flatnonzero(users == u).tolist() for u in range(4)
    ]
    assert [len(rows) for rows in split.test] == [1, 1, 1, 0]
    assert split.about == "the data's own users, paper protocol"
    users[-1] = 0
    own = make_partition(labels, 8, 3, kind="natural", users=users, protocol="authors")
    assert [rows.tolist() for rows in own.test] == [[10], [], [8, 9]]
    found = {"kind": "natural", "protocol": "authors", "validation_fraction": 0.2}
    tested = make_partition(
        labels, 8, 4, users=np.array([0, 0, 0, 1, 1, 1, 2, 2, 0, 1, 3]), **found
    )
    with pytest.raises(PfedafmError, match="client 3 has no training images"):
        tested.check(11, 4)
    with pytest.raises(PfedafmError, match=r"num_clients = 5 .* 3, the users of the data"):
        make_partition(labels, 8, 5, kind="natural", users=users)
    with pytest.raises(PfedafmError, match="for data that say whose is what"):
        make_partition(labels, 8, 3, kind="natural")


@pytest.mark.parametrize(
    ("train", "test", "problem"),
    [
        ([[0, 1], [2]], [[3], [4]], ""),
        ([[0, 1]], [[3]], "1 clients in 'train', num_clients is 2"),
        ([[0, -1], [2]], [[3], [4]], "client 0 has rows -1 to 3; accepted: 0 to 9"),
        ([[0, 1], [12]], [[3], [4]], "client 1 has rows 4 to 12; accepted: 0 to 9"),
        ([[0, 1], []], [[3], [4]], "client 1 has no training images"),
        ([[0, 1], [2]], [[1], [4]], "client 0 has an image twice, or one to train and to test on"),
        ([[0, 1], [1]], [[3], [4]], r"image 1 is several clients'; .*shared=True"),
        ([[0.0, 1.0], [2.0]], [[3], [4]], "client 0 rows are float64"),
    ],
)
def test_a_partition_of_ones_own_is_checked(train, test, problem):
    nothing = (np.zeros(0, np.int32),) * len(train)
    parts = [
        tuple(np.array(rows, int if not rows else None) for rows in one) for one in (train, test)
    ]
    split = Partition(*parts, nothing)
    if not problem:
        assert split.check(10, 2) is split
        return
    with pytest.raises(PfedafmError, match=problem):
        split.check(10, 2)


def test_clients_may_share_images_where_it_is_said(tmp_path):
    rows, nothing = (np.array([0, 1]), np.array([1, 2])), (np.zeros(0, np.int64),) * 2
    split = Partition(rows, nothing, nothing, about="two wards", shared=True).check(3, 2)
    split.save(tmp_path / "split.npz")
    back = Partition.load(tmp_path / "split.npz")
    assert (back.about, back.shared) == ("two wards", True)
