"""One client of a federation: its data, its private state in files, its answers to the server."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax import kernels
from pfedafm_jax.checkpoint_files import fitted
from pfedafm_jax.config import Config, updated
from pfedafm_jax.data import Dataset, dataset_from_arrays
from pfedafm_jax.data.dataset import DATASETS
from pfedafm_jax.data.folders import read_own
from pfedafm_jax.deploy.states import States
from pfedafm_jax.deploy.wire import Head, Tree, pack, unpack
from pfedafm_jax.engine.compile import init_client, init_server
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.state import client_start
from pfedafm_jax.engine.visit import Common, Slots, evaluate, work
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import load_data, split
from pfedafm_jax.files import own_version
from pfedafm_jax.methods import Method, make_method
from pfedafm_jax.models import Architecture
from pfedafm_jax.settings import bad
from pfedafm_jax.statistics import OWN, statistics_of
from pfedafm_jax.trained import CARD_FORMAT, about_data, described


def _shapes(method: Method, network: Architecture) -> dict[str, Tree]:
    client = jax.eval_shape(partial(init_client, architecture=network), method, jax.random.key(0))
    return {"client": client, "server": jax.eval_shape(init_server, method, jax.random.key(0))}


# ----------------------------------------------------------------------------------------- the work


@partial(jax.jit, static_argnums=0)
def _work(architecture: Architecture | None, common: Common, state: Tree, slot: Slots):
    return work(architecture, common, state, slot)


@partial(jax.jit, static_argnums=0)
def _evaluate(architecture: Architecture, common: Common, state: Tree, slot: Slots):
    return evaluate(architecture, common, state, slot).info


class Ready(NamedTuple):
    """What visits need, made once from the server's settings and this node's data."""

    settings: str
    config: Config
    method: Method
    network: Architecture
    common: Common
    slot: Slots
    start: int  # tells this client's start from others'
    shapes: dict[str, Tree]  # of `client` and `server`
    cost: dict[str, float]  # of a visit
    card: dict[str, Any]


class Node:
    """A client: `answer` is what it says to the server's questions.

    Attributes:
        left: why the server wants no more of this node; empty text: it is finished.
    """

    def __init__(
        self,
        client: int,
        states: States,
        data: str,
        architecture: str | None = None,
        data_dir: str | None = None,
        log: Any = print,
    ):
        self.client, self.states, self.data, self.architecture = client, states, data, architecture
        self.left: str | None = None
        self._data_dir, self._log = data_dir, log
        self._own: tuple[str, Dataset, int] | None = None
        self._ready: Ready | None = None
        self._last: tuple[Any, tuple[Head, bytes]] | None = None

    def answer(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        """The reply to a question: of kind hello, visit, evaluate or bye."""
        kind = head.get("kind")
        if kind == "hello":
            return self._hello(head), b""
        if kind == "bye":
            self.left = str(head.get("why", ""))
            return {}, b""
        if kind not in ("visit", "evaluate"):
            raise PfedafmError(f"the server asks for {str(kind)[:40]!r}; is it of another version?")
        asked = json.dumps(head, sort_keys=True), hashlib.sha256(body).digest()
        if (
            self._last is None or self._last[0] != asked
        ):  # where only the reply was lost, it is sent again
            number, after = int(head["round"]), int(head["after"])
            ready = self._prepared(head["settings"])
            reply = self._visit if kind == "visit" else self._evaluated
            self._last = asked, reply(ready, number, after, body)
        return self._last[1]

    # ------------------------------------------------------------------------------ the data

    def own_data(
        self, config: Config, classes: Sequence[str], **statistics: Sequence[float]
    ) -> tuple[Dataset, int]:
        """This client's images as a dataset of their own, training images first, and how many
        those are.

        Files and folders are all this client's. Of what everybody can have, CIFAR and the like, it
        takes the share that the simulator would give it, to rehearse.

        Args:
            config: the server's settings.
            classes: names of all classes of the federation; this client may lack some.
            statistics: `mean` and `std` of the federation's data, once they are known.
        """
        key = json.dumps([config.as_dict(), classes, statistics])
        if self._own is None or self._own[0] != key:
            self._own = (key, *self._loaded(config, classes, **statistics))
        return self._own[1:]

    def _loaded(
        self, config: Config, classes: Sequence[str], **statistics: Any
    ) -> tuple[Dataset, int]:
        name = self.data
        if name in DATASETS or name.startswith("tfds:"):
            config = replace(config, dataset=name)
            dataset = load_data(config, self._data_dir, self._log)
            shares = split(config, dataset)
            if not 0 <= self.client < shares.num_clients:
                raise bad("client", self.client, f"0 to {shares.num_clients - 1}")
            train, test = shares.train[self.client], shares.test[self.client]
        else:
            arrays = read_own(name, classes, config.image_size)
            about = {"num_classes": len(classes), "class_names": classes, "source": name}
            dataset = dataset_from_arrays(name, *arrays, **about, **statistics)
            train = np.arange(dataset.num_train)
            test = np.arange(dataset.num_train, len(dataset.images))
        if not len(train) or not len(test):
            raise PfedafmError(
                f"{self.data} has {len(train)} training and {len(test)} test images; both are needed "
                "(in a .npz file: images, labels, test_images, test_labels)"
            )
        rows = np.concatenate([train, test])
        images, labels = dataset.images[rows], dataset.labels[rows]
        return replace(dataset, images=images, labels=labels, num_train=len(train)), len(train)

    def _hello(self, head: Head) -> Head:
        config = updated(Config(), head["config"]).check()
        dataset, num_train = self.own_data(config, head["classes"])
        rounds = self.states.rounds()
        if rounds and self.states.read(rounds[-1])[0]["federation"] != head["federation"]:
            raise PfedafmError(
                f"{self.states.place} has the state of another federation; choose another --state"
            )
        return {
            "client": self.client,
            "architecture": self.architecture,
            "image_shape": dataset.image_shape,
            "dtype": dataset.dtype,
            "classes": dataset.class_names,
            "mean": dataset.mean,
            "std": dataset.std,
            "num_train": num_train,
            "num_test": len(dataset.images) - num_train,
            "version": own_version(),
        }

    # ------------------------------------------------------------------------------ visits

    def _prepared(self, settings: dict[str, Any]) -> Ready:
        text = json.dumps(settings, sort_keys=True)
        if self._ready is not None and self._ready.settings == text:
            return self._ready
        config, data = updated(Config(), settings["config"]).check(), settings["data"]
        about = about_data(data)
        method = make_method(config, num_train=[1], **about)
        network = described(settings["architecture"], config, about)
        sizes = {name: int(settings[name]) for name in ("batch_size", "rest_size")}
        method = replace(method, training=replace(method.training, **sizes))
        kernels.choose(config.kernels, self._log)
        common_to_all = {name: tuple(data[name]) for name in ("mean", "std")}
        dataset, num_train = self.own_data(config, data["classes"], **common_to_all)
        num_test = len(dataset.images) - num_train
        rows = np.arange(num_train), num_train + np.arange(num_test)
        widths = int(settings["train_width"]), int(settings["test_width"])
        tables = [
            np.pad(row, (0, width - len(row))) for row, width in zip(rows, widths, strict=True)
        ]
        numbers = jax.tree.map(
            lambda x: np.asarray(x, np.uint32 if np.asarray(x).dtype.kind == "u" else np.float32),
            method,
        )
        weight = num_train if config.aggregation == "samples" else 1.0
        common = Common(
            jax.device_put(numbers),
            jnp.asarray(dataset.images),
            jnp.asarray(dataset.labels, jnp.int32),
            server={},
            key=jax.random.key_data(jax.random.key(config.seed)),
            round=jnp.int32(0),
        )
        slot = Slots(
            client=jnp.int32(self.client),
            train=jnp.asarray(tables[0], jnp.int32),
            num_train=jnp.int32(num_train),
            test=jnp.asarray(tables[1], jnp.int32),
            num_test=jnp.int32(num_test),
            weight=jnp.float32(weight),
            place=jnp.int32(0),
        )
        card = {
            "format": CARD_FORMAT,
            "method": config.method,
            "title": type(method).title,
            "architecture": network.name,
            "client": self.client,
            "finished": False,
            "accuracy": {},
            "run": {},
            "predictions": settings["predictions"],
            "data": data | {"source": dataset.source},
            "config": settings["config"],
            "versions": {"pfedafm_jax": own_version()},
            "federation": settings["federation"],
        }
        shapes = _shapes(method, network)
        seen = len(np.unique(dataset.labels[:num_train]))
        cost = dict(vars(method.cost(network, float(num_train), seen)))
        averaged = shapes["server"] if method.statistics == "averaged" else {}
        for way in ("floats_up", "floats_down"):
            cost[way] += sum(int(np.prod(x.shape)) for x in statistics_of(averaged).values())
        about = config, method, network, common, slot, int(settings["start"]), shapes, cost, card
        self._ready = Ready(text, *about)
        return self._ready

    def _state(self, ready: Ready, after: int) -> Tree:
        """This client's state as the server last knew it."""
        if after == 0:
            key = jax.random.key(ready.config.seed)
            return client_start(ready.method, key, ready.start, ready.network)
        if after not in self.states.rounds():
            have = ", ".join(map(str, self.states.rounds())) or "none"
            raise PfedafmError(
                f"no state after round {after} in {self.states.place}; there is {have}"
            )
        card, weights = self.states.read(after)
        if (card["federation"], card["client"]) != (ready.card["federation"], self.client):
            raise PfedafmError(f"{self.states.place} has the state of another client or federation")
        return fitted(ready.shapes, weights)["client"]

    def _visit(self, ready: Ready, number: int, after: int, body: bytes) -> tuple[Head, bytes]:
        method, state = ready.method, self._state(ready, after)
        server = unpack(ready.shapes["server"], body)
        common = ready.common._replace(server=jax.device_put(server), round=jnp.int32(number))
        with matmul_precision(ready.config.precision):
            visit = _work(ready.network, common, state, ready.slot)
            info = dict(visit.info)
            if not any(name.startswith("accuracy/") for name in info):
                info |= _evaluate(ready.network, common, visit.state, ready.slot)
            new, stages = visit.state, [visit] if visit.info["finite"] else []
            if method.shared_parts and stages:
                parts = {name: new[name] for name in (*method.shared_parts, OWN) if name in new}
                second = _work(None, common, parts, ready.slot)
                info |= second.info
                stages += [second] if second.info["finite"] else []
                new = {**new, **{name: second.state[name] for name in parts if name == OWN}}
        sent = [(one.upload, one.weight) for one in stages]
        numbers = ready.cost | {name: float(value) for name, value in info.items()}
        head: Head = {"round": number, "stages": len(sent), "info": numbers}
        card = ready.card | {"accuracy": self._accuracies(head["info"])}
        self.states.write(number, card, new, server)
        own = card["accuracy"][ready.card["predictions"][0]]
        self._log(f"round {number}: accuracy {100 * own:.2f} %, loss {head['info']['loss']:.4g}")
        return head, pack(jax.device_get(sent))

    def _evaluated(self, ready: Ready, number: int, after: int, body: bytes) -> tuple[Head, bytes]:
        state, server = self._state(ready, after), unpack(ready.shapes["server"], body)
        common = ready.common._replace(server=jax.device_put(server), round=jnp.int32(0))
        with matmul_precision(ready.config.precision):
            found = _evaluate(ready.network, common, state, ready.slot)
        info = {name: float(value) for name, value in found.items()}
        if after:  # it predicts with what it was sent last
            card = ready.card | {"accuracy": self._accuracies(info)}
            self.states.write(after, card, state, server)
        return {"round": number, "stages": 0, "info": info}, b""

    def _accuracies(self, info: dict[str, float]) -> dict[str, float]:
        return {
            name.removeprefix("accuracy/"): round(value, 6)
            for name, value in info.items()
            if name.startswith("accuracy/")
        }
