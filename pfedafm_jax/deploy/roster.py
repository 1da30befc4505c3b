"""Who takes part in a federation, with which data: what nodes say of themselves before round 1."""

import json
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import digest, read_bytes, write_atomically
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.arrays import divisors
from pfedafm_jax.data.dataset import noun_of
from pfedafm_jax.data.sources.cifar import CIFARS
from pfedafm_jax.deploy.wire import Head
from pfedafm_jax.engine.federation import DataDescription, Federation, method_for
from pfedafm_jax.methods import find_method

DTYPES = ("uint8", "float32", "int32")  # of a `Dataset`
LARGEST = 10**7  # numbers in an image, images of a node


def classes_of(config: Config, given: str | None) -> list[str]:
    """Names of a federation's classes: `cat,dog`, or how many there are; or those of the dataset
    that the settings name."""
    count = config.synthetic_classes if config.dataset == "synthetic" else 0
    if given is None and config.dataset in CIFARS:
        found = list(CIFARS[config.dataset].class_names)
    elif given is None or given.isdecimal():
        found = [str(number) for number in range(count if given is None else int(given))]
    else:
        found = given.split(",")
    if len(found) < 2 or len(set(found)) < len(found):
        accepted = "two or more, their number or different names, cat,dog,…: the server has no data"
        raise bad("classes", given, accepted)
    return found


class Roster:
    """Who takes part, as told before round 1; kept in a file of the run.

    `nodes[client]` has its `architecture`, `num_train` and `num_test`.
    """

    def __init__(self, path: Path, config: Config, classes: Sequence[str]):
        self._path, self.config = path, config
        self.about: dict[str, Any] = {"federation": secrets.token_hex(8), "classes": list(classes)}
        self.nodes: dict[int, dict[str, Any]] = {}
        if path.exists():
            try:
                kept = json.loads(read_bytes(path))
                if kept.pop("sha256", None) != digest(kept):
                    raise ValueError("it has changed since it was written")
                self.nodes = {int(client): one for client, one in kept.pop("nodes").items()}
                self.about, names = kept, list(map(str, kept["classes"]))
                known = ("federation", "image_shape", "dtype", "mean", "std")
                if missing := [name for name in known if name not in kept]:
                    raise ValueError(f"{missing[0]} is missing")
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise PfedafmError(f"{path} is damaged ({error}); --fresh starts over") from error
            if names != list(classes):
                raise bad("classes", ",".join(classes), ",".join(names))

    @property
    def complete(self) -> bool:
        return len(self.nodes) == self.config.num_clients

    def admit(self, client: int, head: Head) -> None:
        """Notes a node, or raises `ValueError` where it cannot take part."""
        about: dict[str, Any] = {name: list(head[name]) for name in ("image_shape", "classes")}
        about["dtype"], shape = str(head["dtype"]), about["image_shape"]
        sized = 0 < len(shape) < 9 and all(type(size) is int and size > 0 for size in shape)
        sized = sized and math.prod(shape) <= LARGEST
        if about["dtype"] not in DTYPES or not sized:
            found = f"its data are {about['dtype'][:20]} {str(shape)[:80]}"
            raise ValueError(
                f"{found}; accepted: {', '.join(DTYPES)}, sizes from 1, {LARGEST} numbers in all"
            )
        if about["classes"] != self.about["classes"]:
            found = (
                f"its data has {len(about['classes'])} classes ({', '.join(about['classes'][:5])}"
            )
            raise ValueError(f"{found}, …), the federation's {len(self.about['classes'])}")
        for name in ("image_shape", "dtype"):
            if about[name] != self.about.get(name, about[name]):
                raise ValueError(
                    f"{name} of its data is {about[name]}, of others {self.about[name]}"
                )
        names = self.config.architectures
        if find_method(self.config.method).one_network:
            names = (self.config.shared_extractor,)
        name = head["architecture"] or names[client % len(names)]
        if name not in names:
            raise ValueError(f"its architecture is {name}; the federation has {', '.join(names)}")
        sizes = {size: int(head[size]) for size in ("num_train", "num_test")}
        if min(sizes.values()) < 1 or sum(sizes.values()) > LARGEST:
            raise ValueError(f"it has {sizes} images; accepted: 1 to {LARGEST} in all")
        own = {"architecture": name, **sizes}
        if self.complete and own != (kept := self.nodes[client]):
            raise ValueError(f"it comes with {own} and was there with {kept}")
        if not self.complete:
            statistics = {part: [float(x) for x in head[part]] for part in ("mean", "std")}
            channels = 0 if about["dtype"] == "int32" else about["image_shape"][-1]
            if any(len(numbers) != channels for numbers in statistics.values()):
                raise ValueError("mean and std have another number of channels than its images")
            known = all(map(math.isfinite, statistics["mean"] + statistics["std"]))
            if not known or min(statistics["std"], default=0.0) < 0:
                raise ValueError("mean and std are not finite, or a deviation is below 0")
            self.about |= about
            self.nodes[client] = own | statistics
            if self.complete:
                self._finish()

    def _finish(self) -> None:
        """Everybody is known: how images are normalised, and the file."""
        each = [self.nodes[client] for client in sorted(self.nodes)]
        statistics = [(one.pop("mean"), one.pop("std")) for one in each]
        mean, std = np.array(statistics[0])  # CIFAR's, or of what else all have
        if any(one != statistics[0] for one in statistics):  # of all images, from each node's
            shares = np.array([one["num_train"] for one in each], float)
            means, deviations = np.array(statistics).transpose(1, 0, 2)
            mean = np.average(means, 0, shares)
            std = np.sqrt(np.average(deviations**2 + (means - mean) ** 2, 0, shares))
        pixels = self.about["dtype"] == "uint8"
        self.about |= {"mean": mean.tolist(), "std": list(divisors(mean, std, pixels))}
        known = {**self.about, "nodes": {str(client): one for client, one in self.nodes.items()}}
        text = json.dumps(known | {"sha256": digest(known)}, indent=2)
        write_atomically(self._path, text + "\n")


def federation_of(config: Config, roster: Roster) -> Federation:
    """The federation of these nodes; the roster must be complete."""
    about = roster.about
    nodes = [roster.nodes[client] for client in range(config.num_clients)]
    sizes = [[node["num_train"], node["num_test"]] for node in nodes]
    num_train, num_test = np.array(sizes).T
    shape = tuple(about["image_shape"])
    classes = tuple(about["classes"])
    data = DataDescription(
        name=config.dataset,
        num_classes=len(classes),
        class_names=classes,
        image_shape=shape,
        dtype=about["dtype"],
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        digest=about["federation"],
        source=f"{len(nodes)} nodes, each with {noun_of(shape, about['dtype'])} of its own",
        partition="as the nodes have it",
        split=digest({"sizes": sizes}),
        noun=noun_of(shape, about["dtype"]),
        at_nodes=True,
    )
    method = method_for(config, data, num_train.tolist())
    names = [architecture.name for architecture in method.architectures]
    return Federation(
        config=config,
        method=method,
        data=data,
        groups=np.array([names.index(node["architecture"]) for node in nodes]),
        num_train=num_train,
        num_test=num_test,
        # What a node has of each class, it does not say: at most all of them.
        num_classes_seen=np.full(len(nodes), len(classes)),
        num_classes_held=np.full(len(nodes), len(classes)),
    )
