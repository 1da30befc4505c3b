"""One client of a federation: its data, its private state in files, its answers to the server."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.trees import fitted
from pfedafm_jax.base.version import own_version
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Dataset, dataset_from_arrays
from pfedafm_jax.data.dataset import DATASETS
from pfedafm_jax.data.load import load_data, split
from pfedafm_jax.data.sources.folder import read_own
from pfedafm_jax.deploy.wire import Head, Tree, pack, unpack
from pfedafm_jax.engine.state import client_start
from pfedafm_jax.engine.visit import SingleClient
from pfedafm_jax.inference.client import Model, make_card, model_of
from pfedafm_jax.inference.states import States
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.models import kernels

VISIT = {"settings", "round", "after"}
QUESTIONS: dict[Any, set[str]] = {
    "hello": {"config", "classes", "federation"}, "visit": VISIT, "evaluate": VISIT, "bye": set(),
}  # fmt: skip
"""What the server asks, and what its question must have."""


class Ready(NamedTuple):
    """What visits need, made once from the server's settings and this node's data."""

    settings: str
    model: Model
    client: SingleClient
    start: Tree  # its state before its first visit
    cost: dict[str, float]  # of a visit, without statistics, which the server adds
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
        self._ready: Ready | None = None
        self._last: tuple[Any, tuple[Head, bytes]] | None = None

    def answer(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        """The reply to a question: of kind hello, visit, evaluate or bye."""
        kind = head.get("kind")
        if kind not in QUESTIONS or not QUESTIONS[kind] <= head.keys():
            asked = f"{str(kind)[:40]!r} with {', '.join(map(str, head))}"
            raise PfedafmError(f"the server asks for {asked[:200]}; is it of another version?")
        if kind == "hello":
            return self._hello(head), b""
        if kind == "bye":
            self.left = str(head.get("why", ""))
            return {}, b""
        asked = json.dumps(head, sort_keys=True), hashlib.sha256(body).digest()
        if self._last is None or self._last[0] != asked:
            ready = self._prepared(head["settings"])
            reply = self._visit if kind == "visit" else self._evaluated
            self._last = asked, reply(ready, int(head["round"]), int(head["after"]), body)
        return self._last[1]  # where only the reply was lost, it is sent again

    # ------------------------------------------------------------------------------ the data

    def own_data(
        self, config: Config, classes: Sequence[str], **statistics: Any
    ) -> tuple[Dataset, np.ndarray, np.ndarray]:
        """A dataset, and which rows of it this client trains and tests on.

        Files and folders are all this client's. Of what everybody can have, CIFAR and the like, it
        takes the share that the simulator would give it, to rehearse.

        Args:
            config: the server's settings.
            classes: names of all classes of the federation; this client may lack some.
            statistics: `mean` and `std` of the federation's data, once they are known.
        """
        if self.data in DATASETS or self.data.startswith("tfds:"):
            config = updated(config, dataset=self.data)
            dataset = load_data(config, self._data_dir, self._log)
            shares = split(config, dataset)
            if not 0 <= self.client < shares.num_clients:
                raise bad("client", self.client, f"0 to {shares.num_clients - 1}")
            train, test = shares.train[self.client], shares.test[self.client]
        else:
            arrays = read_own(self.data, classes, config.image_size)
            about = {"num_classes": len(classes), "class_names": classes, "source": self.data}
            dataset = dataset_from_arrays(self.data, *arrays, **about, **statistics)
            train, test = np.split(np.arange(len(dataset.images)), [dataset.num_train])
        if not len(train) or not len(test):
            raise PfedafmError(
                f"{self.data} has {len(train)} training and {len(test)} test images; both are needed "
                "(in a .npz file: images, labels, test_images, test_labels)"
            )
        return dataset, train, test

    def _hello(self, head: Head) -> Head:
        config = check_names(updated(Config(), head["config"]))
        dataset, train, test = self.own_data(config, head["classes"])
        std = np.array(dataset.std)
        if dataset.dtype == "float32":  # features were divided by these, constant ones by 1
            std *= dataset.images[train].reshape(-1, len(std)).std(axis=0, dtype=np.float64)
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
            "std": std.tolist(),
            "num_train": len(train),
            "num_test": len(test),
            "version": own_version(),
        }

    # ------------------------------------------------------------------------------ visits

    def _prepared(self, settings: dict[str, Any]) -> Ready:
        text = json.dumps(settings, sort_keys=True)
        if self._ready is not None and self._ready.settings == text:
            return self._ready
        data, model = settings["data"], model_of(settings)
        config, network = check_names(model.config), model.network
        sizes = {name: int(settings[name]) for name in ("batch_size", "rest_size")}
        method = replace(model.method, training=replace(model.method.training, **sizes))
        kernels.choose(config.kernels, self._log)
        common_to_all = {name: tuple(data[name]) for name in ("mean", "std")}
        dataset, train, test = self.own_data(config, data["classes"], **common_to_all)
        client = SingleClient.of(
            method,
            network,
            seed=config.seed,
            precision=config.precision,
            client=self.client,
            images=dataset.images,
            labels=dataset.labels,
            rows=(train, test),
            widths=(int(settings["train_width"]), int(settings["test_width"])),
            weight=len(train) if config.aggregation == "samples" else 1.0,
        )
        key, seen = jax.random.key(config.seed), len(np.unique(dataset.labels[train]))
        start = client_start(method, key, int(settings["start"]), network)
        cost = dict(vars(method.cost(network, float(len(train)), seen)))
        card = make_card(
            method,
            network,
            self.client,
            finished=False,
            run={},
            predictions=settings["predictions"],
            data=data | {"source": dataset.source},
            config=settings["config"],
            versions={"pfedafm_jax": own_version()},
            federation=settings["federation"],
        )
        self._ready = Ready(text, model, client, start, cost, card)
        return self._ready

    def _state(self, ready: Ready, after: int) -> Tree:
        """This client's state as the server last knew it."""
        if after == 0:
            return ready.start
        if after not in (rounds := self.states.rounds()):
            have = ", ".join(map(str, rounds)) or "none"
            raise PfedafmError(
                f"no state after round {after} in {self.states.place}; there is {have}"
            )
        card, weights = self.states.read(after)
        if (card["federation"], card["client"]) != (ready.card["federation"], self.client):
            raise PfedafmError(f"{self.states.place} has the state of another client or federation")
        return fitted(ready.model.shapes, weights)["client"]

    def _visit(self, ready: Ready, number: int, after: int, body: bytes) -> tuple[Head, bytes]:
        server, client = unpack(ready.model.shapes["server"], body), ready.client
        state, stages = client.visit(self._state(ready, after), server, number)
        info = {name: value for stage in stages for name, value in stage.info.items()}
        if not any(name.startswith("accuracy/") for name in info):
            info |= client.evaluate(stages[0].state, server)
        numbers = ready.cost | {name: float(value) for name, value in info.items()}
        accuracy = self._keep(ready, number, numbers, state, server)
        own = accuracy[ready.card["predictions"][0]]
        self._log(f"round {number}: accuracy {100 * own:.2f} %, loss {numbers['loss']:.4g}")
        sent = [(stage.upload, stage.weight) for stage in stages if stage.info["finite"]]
        head = {"round": number, "stages": len(sent), "info": numbers}
        return head, pack(jax.device_get(sent))

    def _evaluated(self, ready: Ready, number: int, after: int, body: bytes) -> tuple[Head, bytes]:
        state, server = self._state(ready, after), unpack(ready.model.shapes["server"], body)
        found = ready.client.evaluate(state, server)
        info = {name: float(value) for name, value in found.items()}
        if after:  # it predicts with what it was sent last
            self._keep(ready, after, info, state, server)
        return {"round": number, "stages": 0, "info": info}, b""

    def _keep(
        self, ready: Ready, number: int, info: dict[str, float], state: Tree, server: Tree
    ) -> dict[str, float]:
        """Writes the state after a round; returns its accuracies by name of the prediction."""
        found = {name: info.get(f"accuracy/{name}") for name in ready.card["predictions"]}
        accuracy = {name: round(value, 6) for name, value in found.items() if value is not None}
        self.states.write(number, ready.card | {"accuracy": accuracy}, state, server)
        return accuracy
