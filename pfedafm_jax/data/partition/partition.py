"""Which client has which images: random splits, and those that come with the data."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad, naming
from pfedafm_jax.base.files import reading, write_atomically
from pfedafm_jax.config.config import Protocol
from pfedafm_jax.data.partition.shares import (
    apportion,
    dirichlet_counts,
    draw_classes,
    even_counts,
    pathological_counts,
)

PARTITIONS = ("pathological", "dirichlet", "iid", "natural")
PARTS = ("train", "test", "validation")
EMPTY = np.zeros(0, np.int32)
AUTHORS_TRAIN_SHARE = 4 / 5  # the released code keeps 40 000 of the 50 000 official training images


@dataclass(frozen=True)
class Partition:
    """Per client, ascending int32 indices into `Dataset.images`. No index occurs twice anywhere,
    unless `shared` says that clients may have the same images."""

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...]  # empty arrays unless asked for
    about: str = "a partition of one's own"  # for people
    shared: bool = False

    def __post_init__(self):
        for part in PARTS:  # lists are accepted; an empty one is of no type
            rows = [np.asarray(one) if len(one) else EMPTY for one in getattr(self, part)]
            object.__setattr__(self, part, tuple(rows))

    @property
    def num_clients(self) -> int:
        return len(self.train)

    def of(self, clients: slice) -> "Partition":
        """The same for some of the clients."""
        return replace(self, **{part: getattr(self, part)[clients] for part in PARTS})

    def same_rows(self, other: "Partition") -> bool:
        """Whether every client has the same images for the same purpose."""
        parts = ((getattr(self, part), getattr(other, part)) for part in PARTS)
        return all(len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in parts)

    def check(self, num_images: int, num_clients: int) -> "Partition":
        """Returns itself, or raises `PfedafmError` if it does not fit these numbers."""
        parts = {part: getattr(self, part) for part in PARTS}
        for part, arrays in parts.items():
            if len(arrays) != num_clients:
                found = f"{len(arrays)} clients in {part!r}"
                raise PfedafmError(f"partition: {found}, num_clients is {num_clients}")
        for client, own in enumerate(zip(*parts.values(), strict=True)):
            rows = np.concatenate([one.ravel() for one in own])
            problem = ""
            if rows.dtype.kind not in "iu" or any(one.ndim != 1 for one in own):
                problem = f"rows are {rows.dtype} {rows.shape}; accepted: integers [images]"
            elif len(own[0]) == 0:
                problem = "has no training images"
            elif rows.min() < 0 or rows.max() >= num_images:
                problem = f"has rows {rows.min()} to {rows.max()}; accepted: 0 to {num_images - 1}"
            elif len(np.unique(rows)) < len(rows):
                problem = "has an image twice, or one to train and to test on"
            if problem:
                raise PfedafmError(f"partition: client {client} {problem}")
        rows = np.concatenate([rows for arrays in parts.values() for rows in arrays])
        if not self.shared and len(np.unique(rows)) < len(rows):
            row = np.flatnonzero(np.bincount(rows) > 1)[0]
            accepted = "or say that clients may share images: Partition(…, shared=True)"
            raise PfedafmError(
                f"partition: image {row} is several clients'; give it to one, {accepted}"
            )
        return self

    def with_validation(self, labels: np.ndarray, fraction: float, seed: int) -> "Partition":
        """The same with a fraction of each client's training images set apart.

        Every class of a client is cut in proportion; at least one image is left, and one cut.
        """
        rng = _streams(seed)[-1]
        few = next((k for k, rows in enumerate(self.train) if len(rows) < 2), None)
        if few is not None:
            raise bad("validation_fraction", fraction, f"0: client {few} has one training image")
        cuts = [_cut(rng, labels, rng.permutation(mine), fraction, 0) for mine in self.train]
        train, validation = (tuple(map(np.sort, part)) for part in zip(*cuts, strict=True))
        return replace(self, train=train, validation=validation)

    def class_counts(self, labels: np.ndarray, num_classes: int) -> np.ndarray:
        """int64 [clients, classes]: how many images of each class a client has, in all parts.

        >>> train, nothing = (np.array([0, 1, 2]), np.array([3])), (np.zeros(0, int),) * 2
        >>> Partition(train, nothing, nothing).class_counts(np.array([0, 0, 2, 1]), num_classes=3)
        array([[2, 0, 1],
               [0, 1, 0]])
        """
        each = map(np.concatenate, zip(self.train, self.test, self.validation, strict=True))
        labels = np.asarray(labels)
        return np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in each])

    def save(self, path: str | Path) -> None:
        """Write a .npz file (no pickle in it), atomically."""
        content = {}
        for part in PARTS:
            arrays = getattr(self, part)
            content[part] = np.concatenate(arrays)
            content[f"{part}_sizes"] = np.array([len(array) for array in arrays], np.int64)
        content |= {"about": np.array(self.about), "shared": np.array(self.shared)}
        with naming(f"partition file {path} cannot be written"):
            write_atomically(Path(path), lambda file: np.savez(file, **content))

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Read what `save` wrote."""
        parts, damaged = {}, f"{path} is a damaged partition file"
        with (
            naming(f"{path} cannot be read as a partition file"),
            reading(path) as file,
            np.load(file, allow_pickle=False) as content,
        ):
            read = {part: (content[part], content[f"{part}_sizes"]) for part in PARTS}
            more = {name: content[name].item() for name in ("about", "shared") if name in content}
        for part, (indices, sizes) in read.items():
            fine = all(a.ndim == 1 and a.dtype.kind in "iu" and (a >= 0).all() for a in read[part])
            if not fine or sizes.sum() != len(indices):
                raise PfedafmError(f"{damaged}: the sizes in {part!r} do not add up")
            parts[part] = tuple(np.split(indices.astype(np.int32), np.cumsum(sizes)))[:-1]
        if len({len(arrays) for arrays in parts.values()}) != 1 or not parts["train"]:
            raise PfedafmError(f"{damaged}: its parts are for different numbers of clients")
        return cls(**parts, **more)


def make_partition(
    labels: np.ndarray,
    num_train: int,
    num_clients: int,
    *,
    kind: str = "pathological",
    classes_per_client: int = 2,
    gamma: float = 0.5,
    protocol: str = "paper",
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    min_samples: int = 10,
    seed: int = 0,
    num_classes: int | None = None,
    users: np.ndarray | None = None,
) -> Partition:
    """Split a dataset over clients.

    Args:
        labels: int [num], training images first.
        num_train: how many of them are official training images.
        num_clients: N in the paper.
        kind: "pathological": every client holds images of exactly `classes_per_client` classes, a
            class is shared by its owners in proportions U(0.4, 0.6); "dirichlet": every class is
            spread over all clients in proportions Dirichlet(`gamma`), each client then holding at
            least `min_samples` images; "iid": an even random share of every class; "natural": as
            `users` says.
        classes_per_client: pathological only.
        gamma: Dirichlet only; the smaller, the more unequal.
        protocol: "paper": all images are split over clients, then each client's into train and test
            by `test_fraction`, class by class; "authors", as in the released code: four fifths of
            the official training images and all official test images, both split in the same
            proportions; `test_fraction` is ignored.
        test_fraction: of a client's images.
        validation_fraction: of a client's training images, set apart.
        min_samples: Dirichlet only.
        seed: same seed, same split.
        num_classes: if larger than the largest label plus one.
        users: int [num], natural only: whose image it is, 0 to num_clients - 1.

    >>> labels = np.arange(100) % 10
    >>> partition = make_partition(labels, num_train=80, num_clients=5, classes_per_client=2)
    >>> [len(rows) for rows in partition.train], [len(rows) for rows in partition.test]
    ([16, 16, 16, 16, 16], [4, 4, 4, 4, 4])
    >>> (partition.class_counts(labels, 10) > 0).sum(axis=1)
    array([2, 2, 2, 2, 2])
    """
    labels = np.asarray(labels)
    num = len(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or num == 0 or labels.min() < 0:
        found = f"labels is {labels.dtype} {labels.shape}"
        raise PfedafmError(f"{found}; accepted are integers [num], 0 or more")
    num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    larger = f"more than the largest label, {labels.max()}"
    there, protocols = f"{num}, the images there are", get_args(Protocol)
    for name, value, fine, accepted in (
        ("kind", kind, kind in PARTITIONS, ", ".join(PARTITIONS)),
        ("protocol", protocol, protocol in protocols, ", ".join(protocols)),
        ("seed", seed, seed >= 0, "0 or more"),
        ("num_train", num_train, 0 <= num_train <= num, f"0 to {there}"),
        ("num_clients", num_clients, 1 <= num_clients <= num, f"1 to {there}"),
        ("num_classes", num_classes, num_classes > labels.max(), larger),
        ("test_fraction", test_fraction, 0 < test_fraction < 1, "above 0, below 1"),
        ("validation_fraction", validation_fraction, 0 <= validation_fraction < 1, "0 to below 1"),
    ):
        if not fine:
            raise bad(name, value, accepted)
    # One stream per decision: another validation_fraction leaves the rest of the split as it was.
    share_rng, keep_rng, order_rng, cut_rng, validation_rng = _streams(seed)

    descriptions = {
        "pathological": f"{classes_per_client} of {num_classes} classes per client",
        "dirichlet": f"Dirichlet({gamma:g})",
        "iid": "an even share of every class per client",
        "natural": "the data's own users",
    }
    own = kind == "natural" and protocol == "authors"
    about = f"{descriptions[kind]}, {'their own test images' if own else f'{protocol} protocol'}"
    # Pools are split separately; every client needs at least `least[i]` images of pool i, so that
    # none of its parts is empty.
    held_out = 1 if validation_fraction > 0 else 0
    if protocol == "paper":
        pools, least = [np.arange(len(labels))], [2 + held_out]
    else:
        kept = np.sort(keep_rng.permutation(num_train)[: round(num_train * AUTHORS_TRAIN_SHARE)])
        pools, least = [kept, np.arange(num_train, len(labels))], [1 + held_out, 1]
    if kind == "natural":
        if users is None:
            raise bad(
                "partition", kind, "for data that say whose is what: user in npz, folder:, leaf:"
            )
        there = len(np.unique(users))
        if len(users) != num or there != num_clients:
            raise bad("num_clients", num_clients, f"{there}, the users of the data")
        if protocol == "authors":  # the data's own training and test images
            pools = [np.arange(num_train), np.arange(num_train, num)]
        order = [pool[np.argsort(users[pool], kind="stable")] for pool in pools]
        ends = [np.cumsum(np.bincount(users[pool], minlength=num_clients)) for pool in pools]
        dealt = [np.split(rows, end[:-1]) for rows, end in zip(order, ends, strict=True)]
        dealt = [[order_rng.permutation(mine) for mine in pool] for pool in dealt]
    else:
        sizes = [np.bincount(labels[pool], minlength=num_classes) for pool in pools]
        if kind == "iid":
            counts = even_counts(share_rng, num_clients, sizes, least)
        elif kind == "pathological":
            owned = draw_classes(share_rng, num_clients, classes_per_client, num_classes)
            counts = pathological_counts(share_rng, owned, sizes, least)
        else:
            # min_samples over the pools in proportion to their size, rounded up.
            total = sum(len(pool) for pool in pools)
            wanted = [math.ceil(min_samples * len(pool) / total) for pool in pools]
            least = list(map(max, least, wanted))
            counts = dirichlet_counts(share_rng, gamma, num_clients, sizes, least)
        both = zip(pools, counts, strict=True)
        dealt = [_hand_out(order_rng, labels, pool, count) for pool, count in both]

    if len(dealt) == 1:
        cuts = [_cut(cut_rng, labels, mine, test_fraction, held_out) for mine in dealt[0]]
        dealt = [list(part) for part in zip(*cuts, strict=True)]
    train, test = dealt
    validation = [np.zeros(0, np.int32)] * num_clients
    if held_out:
        cuts = [_cut(validation_rng, labels, mine, validation_fraction, 0) for mine in train]
        train, validation = (list(part) for part in zip(*cuts, strict=True))
    parts = (train, test, validation)
    rows = (tuple(np.sort(mine).astype(np.int32) for mine in part) for part in parts)
    return Partition(*rows, about=about)


def _streams(seed: int) -> list[np.random.Generator]:
    """For shares, kept images, order, test images and validation images."""
    streams = np.random.SeedSequence(seed).spawn(5)
    return [np.random.Generator(np.random.PCG64(stream)) for stream in streams]


def _hand_out(
    rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray, counts: np.ndarray
) -> list[np.ndarray]:
    """`counts[client, class]` random indices of each class in `pool` by client, none twice."""
    dealt: list[list[np.ndarray]] = [[] for _ in range(len(counts))]
    for cls in range(counts.shape[1]):
        indices = rng.permutation(pool[labels[pool] == cls])
        # What lies beyond the last cut is unused (a class without owners).
        for mine, share in zip(dealt, np.split(indices, np.cumsum(counts[:, cls])), strict=False):
            mine.append(share)
    return [np.concatenate(shares) for shares in dealt]


def _cut(
    rng: np.random.Generator, labels: np.ndarray, mine: np.ndarray, fraction: float, reserve: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rest, `fraction`) of a client's indices, by class; at least 1 + `reserve` and 1."""
    if not len(mine):
        return mine, mine
    wanted = max(0, min(max(round(len(mine) * fraction), 1), len(mine) - 1 - reserve))
    mine = mine[np.argsort(labels[mine], kind="stable")]  # `_hand_out` has shuffled within a class
    classes, starts, sizes = np.unique(labels[mine], return_index=True, return_counts=True)
    # Rounding ties go to random classes, else the first ones would always get more test images.
    order = rng.permutation(len(classes))
    taken = np.zeros(len(classes), np.int64)
    taken[order] = apportion(wanted, sizes[order])
    out = np.concatenate([np.arange(n) + at for at, n in zip(starts, taken, strict=True)])
    return np.delete(mine, out), mine[out]
