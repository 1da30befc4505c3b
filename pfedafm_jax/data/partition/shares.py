"""How many images of each class every client gets: the arithmetic of `partition.py`.

A *pool* is a set of images split as a whole (all of them, or the training and the test images
apart); the same proportions are used for every pool. Counts are int64 [clients, classes].
"""

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.config.config import GAMMA_RANGE

LOW_SHARE, HIGH_SHARE = 0.4, 0.6  # of the uniform shares in the released code
MAX_REDRAWS = 100


def draw_classes(
    rng: np.random.Generator, num_clients: int, classes_per_client: int, num_classes: int
) -> list[np.ndarray]:
    """Per client, the distinct classes it owns; numbers of owners per class differ by at most 1.

    Each client in turn draws at random among the classes that lack most owners, never one
    that it already has. That cannot get stuck: with m clients to go, no class lacks more than m
    owners, and together they lack m*k (true at the start: N*k slots in equal parts are at most N
    each, as k <= C). So at least k classes still lack an owner. At most k lack m, and these, being
    the maximum, are all drawn by the next client: again no class lacks more than m - 1.
    """
    if not 1 <= classes_per_client <= num_classes:
        accepted = f"1 to {num_classes}, the classes there are"
        raise bad("classes_per_client", classes_per_client, accepted)
    slots = np.full(num_classes, num_clients * classes_per_client // num_classes)
    slots[rng.permutation(num_classes)[: num_clients * classes_per_client % num_classes]] += 1
    owned = []
    for _ in range(num_clients):
        # The k largest, ties broken at random: the same as k draws among the largest not yet held.
        mine = np.lexsort((rng.random(num_classes), -slots))[:classes_per_client]
        slots[mine] -= 1
        owned.append(np.sort(mine))
    return owned


def pathological_counts(
    rng: np.random.Generator, owned: list[np.ndarray], sizes: list[np.ndarray], least: list[int]
) -> list[np.ndarray]:
    """Split every class among its owners by shares U(0.4, 0.6); one count array per pool.

    Args:
        owned: per client, its classes.
        sizes: per pool, int [classes]: how many images there are.
        least: per pool, how many images a client needs at least.
    """
    num_classes = len(sizes[0])
    counts = [np.zeros((len(owned), num_classes), np.int64) for _ in sizes]
    for cls in range(num_classes):
        owners = [client for client, classes in enumerate(owned) if cls in classes]
        if not owners:
            continue
        shares = rng.uniform(LOW_SHARE, HIGH_SHARE, len(owners))
        for pool, (size, low) in enumerate(zip(sizes, least, strict=True)):
            # One image of every class, more if a client has few classes.
            per_client = len(owned[owners[0]])
            each = -(-low // per_client)
            if size[cls] < each * len(owners):
                raise PfedafmError(
                    f"class {cls} has {size[cls]} images to deal, too few for the {len(owners)} "
                    f"clients that share it (num_clients {len(owned)}, classes_per_client "
                    f"{per_client}): at least {each * len(owners)} are needed. Use fewer clients or "
                    "more data"
                )
            counts[pool][owners, cls] = apportion(int(size[cls]), shares, each)
    return counts


def even_counts(
    rng: np.random.Generator, num_clients: int, sizes: list[np.ndarray], least: list[int]
) -> list[np.ndarray]:
    """Split every class evenly over all clients; the remainder goes to random ones."""
    counts = []
    for size, low in zip(sizes, least, strict=True):
        shares = rng.uniform(1, 1 + 1e-9, (len(size), num_clients))  # ties fall at random
        counts.append(np.stack(list(map(apportion, size, shares)), axis=1))
        if counts[-1].sum(axis=1).min() < low:
            raise PfedafmError(
                f"{size.sum()} images are too few for {num_clients} clients with at least {low} "
                "each. Lower num_clients"
            )
    return counts


def dirichlet_counts(
    rng: np.random.Generator,
    gamma: float,
    num_clients: int,
    sizes: list[np.ndarray],
    least: list[int],
) -> list[np.ndarray]:
    """Split every class over all clients by Dirichlet(gamma) shares, `least` images each per pool.

    Shares that leave a client with too little are redrawn, up to `MAX_REDRAWS` times; after
    that, images move from the clients with most. So it terminates for any gamma.
    """
    if not GAMMA_RANGE[0] <= gamma <= GAMMA_RANGE[1]:
        raise bad("gamma", gamma, f"{GAMMA_RANGE[0]:g} to {GAMMA_RANGE[1]:g}")
    for size, low in zip(sizes, least, strict=True):
        if size.sum() < num_clients * low:
            raise PfedafmError(
                f"{num_clients} clients with at least {low} images each need {num_clients * low}, "
                f"but there are {size.sum()} to deal. Lower num_clients or min_samples"
            )
    counts: list[np.ndarray] = []
    for _ in range(MAX_REDRAWS):
        shares = rng.dirichlet(np.full(num_clients, gamma), len(sizes[0]))
        counts = [np.stack(list(map(apportion, size, shares)), axis=1) for size in sizes]
        if all(count.sum(axis=1).min() >= low for count, low in zip(counts, least, strict=True)):
            return counts
    for count, low in zip(counts, least, strict=True):
        _level(count, low)
    return counts


def _level(counts: np.ndarray, least: int) -> None:
    """Move images, in place, from the clients with most to those with fewer than `least`.

    There are enough for all, so while a client lacks some, the largest has some to spare: every
    step moves at least one image to where it stays.
    """
    totals = counts.sum(axis=1)
    while totals.min() < least:
        poor, rich = int(totals.argmin()), int(totals.argmax())
        cls = int(counts[rich].argmax())
        moved = min(least - totals[poor], totals[rich] - least, counts[rich, cls])
        counts[rich, cls] -= moved
        counts[poor, cls] += moved
        totals[rich] -= moved
        totals[poor] += moved


def apportion(total: int, shares: np.ndarray, least: int = 0) -> np.ndarray:
    """Whole numbers int64 [num] that add up to `total`, as `shares` say, each `least` or more.

    Largest remainders: each is off its exact share by less than one, unless `least` forces it.
    """
    exact = total * (shares / shares.sum())
    counts = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    while counts.min() < least:
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts
