"""The server of a federation: rounds as questions to nodes.

`Nodes` does what `engine` does for a run, `run_round` and `evaluate`, by asking; `Federation` is an
`Experiment` whose clients are elsewhere. Everything else of a run, records, checkpoints, observers,
pictures, is as in a simulation.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from pfedafm_jax import engine
from pfedafm_jax.base.errors import Interrupted
from pfedafm_jax.base.trees import num_bytes
from pfedafm_jax.config.config import Config
from pfedafm_jax.deploy.roster import Roster, stand_in
from pfedafm_jax.deploy.wire import Head, Tree, pack, unpack
from pfedafm_jax.engine import Programs, RoundResult, State
from pfedafm_jax.engine.programs import shapes_of
from pfedafm_jax.engine.round import aggregate, calls_of, participants_of
from pfedafm_jax.engine.state import start_number
from pfedafm_jax.engine.visit import StageResult, Totals, added, totals_of, work
from pfedafm_jax.methods import Method
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of
from pfedafm_jax.runs.experiment import Experiment

LOOK = 1.0  # seconds between two looks at who is there
Place = tuple[int, str]  # a node, and when it came
# What goes wrong where a stranger's message is taken for one of ours.
WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
COSTS = ("floats_up", "floats_down", "flops")


class Nodes:
    """Clients that are asked over a network.

    Attributes:
        last: int `[clients]`: the last round of which each one's visit counts; it starts the next
            one from the state after that round.
    """

    def __init__(
        self,
        link: Any,
        roster: Roster,
        log: Callable[[str], Any],
        *,
        seconds: float = 600.0,
        patience: float = 60.0,
        least: int = 1,
        stopped: Callable[[], int | None] = lambda: None,  # the signal, if one was received
    ):
        self.roster, self.config = roster, roster.config
        self.last = np.zeros(self.config.num_clients, int)
        self._link, self._log = link, log
        self._seconds, self._patience, self._least = seconds, patience, least
        self._stopped = stopped
        self._where: dict[int, Place] = {}  # where each client is
        self._greeted: dict[Place, str] = {}  # by which question; empty: it was answered
        self._looked = 0.0

    # ---------------------------------------------------------------------------- who is there

    def gather(self) -> None:
        """Waits until every client has said what it has, once."""
        said = -1
        while not self.roster.complete:
            self._heard({})
            if said != len(self.roster.nodes):
                said = len(self.roster.nodes)
                self._log(f"{said} of {self.config.num_clients} nodes are there")
            time.sleep(0.05)

    def dismiss(self, seconds: float = 10.0) -> None:
        """Tells the nodes that it is over."""
        bye, end = {"kind": "bye"}, time.monotonic() + seconds
        asked = {self._link.ask(node, bye, b"", seconds) for node, _ in self._where.values()}
        while asked and time.monotonic() < end:
            asked -= {question for question, _, _ in self._link.replies(list(asked))}
            time.sleep(0.05)

    def _look(self) -> None:
        """Greets nodes that have come, forgets those that have gone."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        there = set(self._link.nodes().items())
        for client, at in list(self._where.items()):
            if at not in there:
                del self._where[client]
                self._log(f"client {client} is gone")
        about = {name: self.roster.about[name] for name in ("classes", "federation")}
        hello = {"kind": "hello", "config": self.config.as_dict(), **about}
        self._greeted = {at: self._greeted[at] for at in there if at in self._greeted}
        for at in there - self._greeted.keys():
            self._greeted[at] = self._link.ask(at[0], hello, b"", self._seconds)

    def _heard(self, questions: dict[str, int]) -> list[tuple[int, Head, bytes]]:
        """(client, head, body) of questions that are answered, which are removed; greetings are dealt
        with here."""
        self._look()
        greeted = {question: at for at, question in self._greeted.items()}
        found = []
        for question, head, body in self._link.replies([*questions, *greeted]):
            if question in questions:
                found.append((questions.pop(question), head, body))
            elif question in greeted:
                self._greeted[greeted[question]] = ""
                if "lost" not in head:
                    self._admit(greeted[question], head)
        return found

    def _admit(self, at: Place, head: Head) -> None:
        client, owners = head.get("client"), self._link.owners
        try:
            if "error" in head:
                raise ValueError(str(head["error"])[:500])
            if owners is not None and owners.get(at[0]) is None:
                raise ValueError("its key is not among those of this federation")
            if owners is not None and owners[at[0]] != client:
                raise ValueError(
                    f"it says it is client {client} and has the key of {owners[at[0]]}"
                )
            if type(client) is not int or not 0 <= client < self.config.num_clients:
                raise ValueError(f"client {client!r}; accepted: 0 to {self.config.num_clients - 1}")
            self.roster.admit(client, head)
        except WRONG as error:
            why = f"node {at[0]} is refused: {error}"
            self._log(why)
            self._link.ask(at[0], {"kind": "bye", "why": why}, b"", self._seconds)
            return
        self._where[client] = at
        one = self.roster.nodes[client]
        self._log(f"client {client} is there: {one['architecture']}, {one['num_train']} images")

    # ---------------------------------------------------------------------------- asking

    def _ask(
        self, heads: dict[int, Head], body: bytes, accept: Callable[[int, Head, bytes], None]
    ) -> None:
        """Asks these clients and has their replies accepted, as far as they come in time and are as
        they should be. One whose node has gone is asked again when it returns, within that time."""
        asked: dict[int, Place] = {}
        seen = dict.fromkeys(heads, time.monotonic())  # when each client was last there
        questions: dict[str, int] = {}
        waiting, end = set(heads), time.monotonic() + self._seconds
        self._looked = 0.0  # who is there now
        while waiting and time.monotonic() < end:
            for client, head, content in self._heard(questions):
                if client not in waiting:
                    continue
                if "lost" in head and client not in self._where:  # with its node
                    asked.pop(client, None)
                    continue
                waiting.discard(client)
                try:
                    if why := head.get("error", head.get("lost")):
                        raise ValueError(str(why)[:500])
                    accept(client, head, content)
                except WRONG as error:
                    self._log(f"client {client}'s reply is refused: {error}")
            for client in list(waiting):
                if (at := self._where.get(client)) is not None:
                    seen[client] = time.monotonic()
                    if asked.get(client) != at:
                        asked[client] = at
                        question = self._link.ask(at[0], heads[client], body, self._seconds)
                        questions[question] = client
                elif time.monotonic() - seen[client] > self._patience:
                    self._log(f"client {client} is not there")
                    waiting.discard(client)
            time.sleep(0.05)
        for client in waiting:
            self._log(f"client {client} has not answered within {self._seconds:g} s")

    def _heads(
        self, programs: Programs, clients: Sequence[int], kind: str, number: int
    ) -> dict[int, Head]:
        """Questions of this kind, with all that a node needs to know; nothing of other clients but
        how long tables are."""
        config, about, training = self.config, self.roster.about, programs.method.training
        data = {name: about[name] for name in ("classes", "image_shape", "dtype", "mean", "std")}
        if training.mean:
            data |= {"mean": training.mean, "std": training.std}
        settings = {
            "config": config.as_dict(),
            "federation": about["federation"],
            "data": data,
            "batch_size": training.batch_size,
            "rest_size": training.rest_size,
            "train_width": programs.train_rows.shape[1],
            "test_width": programs.test_rows.shape[1],
            "predictions": programs.predictions,
        }
        heads: dict[int, Head] = {}
        for client in clients:
            group = int(programs.groups[client])
            own = {
                "architecture": programs.architectures[group].name,
                "start": start_number(config, programs.method, client, group),
            }
            heads[client] = {"kind": kind, "round": number, "after": int(self.last[client])}
            heads[client]["settings"] = settings | own
        return heads

    # ---------------------------------------------------------------------------- the loop of a run

    def run_round(self, programs: Programs, state: State, t: int) -> tuple[State, RoundResult]:
        """One round, see `engine.run_round`; repeated until enough participants have answered."""
        (order, dropped), (templates, known) = participants_of(self.config, t), _expected(programs)
        required = {"loss", "finite", *COSTS, *_accuracies(programs)}
        self._link.largest = sum(map(num_bytes, templates)) + 2**16
        numbers: dict[int, dict[str, float]] = {}
        sent: list[dict[int, Tree]] = [{} for _ in templates]

        def accept(client: int, head: Head, body: bytes) -> None:
            if int(head["round"]) != t:
                raise ValueError(f"it is about round {head['round']}, asked was {t}")
            found = unpack(templates[: int(head["stages"])], body)
            largest = max(float(programs.num_train[client]), 1.0)
            for leaf in (leaf for _, weight in found for leaf in weight.values()):
                if (leaf < 0).any() or (leaf > largest).any():
                    raise ValueError(f"weights of its upload are not within 0 and {largest:g}")
            numbers[client] = _checked(head["info"], required, required | known)
            for stage, upload in zip(sent, found, strict=False):
                stage[client] = upload

        body = pack(jax.device_get(broadcast_of(state.server)))
        least = min(self._least, len(order))
        while True:
            asked = [client for client in order if client not in numbers]
            self._ask(self._heads(programs, asked, "visit", t), body, accept)
            if len(numbers) >= least:
                break
            if (number := self._stopped()) is not None:
                words = f"stopped in round {t}, which had {len(numbers)} of {least} replies"
                raise Interrupted(f"{words}; the same command goes on after round {t - 1}", number)
            self._log(f"round {t}: {len(numbers)} replies, {least} are needed: it is repeated")
            time.sleep(1.0)
        self.last[list(numbers)] = t
        totals = [_summed(programs, order, own, stage > 0) for stage, own in enumerate(sent)]
        state = aggregate(programs, state, t, order, totals)
        there = [client for client in order if client in numbers]
        names = dict.fromkeys(name for client in there for name in numbers[client])
        info = {name: [numbers[client].get(name, np.nan) for client in there] for name in names}
        arrays = {  # costs are whole numbers beyond float32
            name: np.array(values, np.float64 if name in COSTS else np.float32)
            for name, values in info.items()
        }
        dropped = [*dropped, *(client for client in order if client not in numbers)]
        return state, RoundResult(np.array(there, int), arrays, dropped)

    def evaluate(self, programs: Programs, state: State) -> dict[str, np.ndarray]:
        """Accuracies of all clients, see `engine.evaluate`; NaN of those that are not there."""
        clients = range(self.config.num_clients)
        found = {name: np.full(len(clients), np.nan) for name in _accuracies(programs)}

        def accept(client: int, head: Head, body: bytes) -> None:
            for name, value in _checked(head["info"], set(found), set(found)).items():
                found[name][client] = value

        heads = self._heads(programs, clients, "evaluate", int(self.last.max()))
        self._ask(heads, pack(jax.device_get(judged_of(state.server))), accept)
        return found


def _accuracies(programs: Programs) -> list[str]:
    return [f"accuracy/{name}" for name in programs.predictions]


def _checked(info: Any, required: set[str], known: set[str]) -> dict[str, float]:
    """What a node reports: numbers by name, of those that the method reports."""
    if not required <= info.keys() <= known:
        names = ", ".join(map(str, info.keys()))[:200]
        raise ValueError(f"it reports {names}; expected is {', '.join(sorted(required))}")
    numbers = {name: float(value) for name, value in info.items()}
    if not all(0 <= numbers.get(name, 0) < 1e18 for name in COSTS):
        raise ValueError("what it says of its costs cannot be")
    return numbers


def _expected(programs: Programs) -> tuple[list[Tree], set[str]]:
    """Shapes of (upload, weight) of each stage, and names of what is reported."""
    shapes = shapes_of(programs.form)
    stages = [(programs.architectures[0], shapes.starts[0])]
    stages += [(None, shapes.parts)] if shapes.parts else []
    results = [
        jax.eval_shape(partial(work, network), shapes.common, state, shapes.slot)
        for network, state in stages
    ]
    names = {name for one in results for name in one.info}
    return [(one.upload, one.weight) for one in results], names


@jax.jit
def _add(method: Method, totals: Totals, upload: Tree, weight: Tree, rank: jax.Array) -> Totals:
    rows = totals_of(method, StageResult(None, upload, weight, {}))
    return added(method, totals, jax.tree.map(lambda row: row[None], rows), rank[None])


def _summed(
    programs: Programs, order: list[int], sent: dict[int, Tree], shared_stage: bool
) -> Totals:
    """The totals of a stage, added up in the order of the engine on one device."""
    zeros = programs.compiled.zeros[int(shared_stage)]
    totals = jax.tree.map(lambda leaf: np.asarray(leaf)[0], zeros)
    for call in calls_of(programs, list(sent), programs.num_train, shared_stage=shared_stage):
        for client in call.clients.reshape(-1).tolist():
            if client >= 0:
                rank = np.int32(order.index(client))
                totals = _add(programs.method_on_devices, totals, *sent[client], rank)
    return programs.devices.split(jax.tree.map(lambda leaf: np.asarray(leaf)[None], totals))


# --------------------------------------------------------------------------------- the experiment


class Federation(Experiment):
    """A run whose clients are nodes; the roster must be complete."""

    def __init__(self, config: Config, nodes: Nodes):
        super().__init__(config, *stand_in(config, nodes.roster))
        names = [one.name for one in self.programs.architectures]
        own = [nodes.roster.nodes[client]["architecture"] for client in range(config.num_clients)]
        groups = np.array([names.index(name) for name in own])
        self.programs = replace(self.programs, groups=groups, only=("update", "sum"))
        self.state = engine.start(self.programs)
        self.nodes: Nodes = nodes
        self._loop: Any = nodes

    def history(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        details, arrays = super().history()
        return details | {"last": self.nodes.last.tolist()}, arrays

    def resume(self, details: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.nodes.last[:] = details["last"]
        super().resume(details, arrays)

    def about(self, command: str = "") -> dict[str, Any]:
        return super().about(command) | {"nodes": True}
