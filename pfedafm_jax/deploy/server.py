"""The server of a federation: rounds as questions to nodes.

`Nodes` is who is there and how they are asked; `NodesExecutor` does the rounds of a run by asking
them. Everything else of a run, records, checkpoints, observers, is as in a simulation.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import Interrupted
from pfedafm_jax.base.trees import num_bytes
from pfedafm_jax.deploy.roster import Roster
from pfedafm_jax.deploy.wire import Head, Tree, pack, unpack
from pfedafm_jax.engine import ClientStore, Devices, Federation, Processes, RoundResult, State
from pfedafm_jax.engine.aggregator import Aggregator
from pfedafm_jax.engine.engine import calls_of
from pfedafm_jax.engine.programs import ProgramKey, compiled, shapes_of
from pfedafm_jax.engine.round import participants_of
from pfedafm_jax.engine.state import start_number
from pfedafm_jax.engine.visit import StageResult, Totals, added, totals_of, work
from pfedafm_jax.methods import Method
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of
from pfedafm_jax.models import kernels
from pfedafm_jax.training.batches import table_width

LOOK = 1.0  # seconds between two looks at who is there
Place = tuple[int, str]  # a node, and when it came
# What goes wrong where a stranger's message is taken for one of ours.
WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
COSTS = ("floats_up", "floats_down", "flops")


class Nodes:
    """Clients that are asked over a network: who is there, and what they answer.

    Args:
        link: sends questions and receives replies, see `flower.py`.
        roster: who takes part.
        log: called with single lines.
        seconds: how long a reply is waited for.
        patience: how long a node that is not there is waited for.
    """

    def __init__(
        self,
        link: Any,
        roster: Roster,
        log: Callable[[str], Any],
        *,
        seconds: float = 600.0,
        patience: float = 60.0,
    ):
        self.roster, self.config = roster, roster.config
        self.log = log
        self._link = link
        self._seconds, self._patience = seconds, patience
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
                self.log(f"{said} of {self.config.num_clients} nodes are there")
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
                self.log(f"client {client} is gone")
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
            self.log(why)
            self._link.ask(at[0], {"kind": "bye", "why": why}, b"", self._seconds)
            return
        self._where[client] = at
        one = self.roster.nodes[client]
        self.log(f"client {client} is there: {one['architecture']}, {one['num_train']} images")

    # ---------------------------------------------------------------------------- asking

    def expect(self, largest: int) -> None:
        """Says how many bytes the largest reply may have."""
        self._link.largest = largest

    def ask(
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
                    self.log(f"client {client}'s reply is refused: {error}")
            for client in list(waiting):
                if (at := self._where.get(client)) is not None:
                    seen[client] = time.monotonic()
                    if asked.get(client) != at:
                        asked[client] = at
                        question = self._link.ask(at[0], heads[client], body, self._seconds)
                        questions[question] = client
                elif time.monotonic() - seen[client] > self._patience:
                    self.log(f"client {client} is not there")
                    waiting.discard(client)
            time.sleep(0.05)
        for client in waiting:
            self.log(f"client {client} has not answered within {self._seconds:g} s")


# ----------------------------------------------------------------------------------- the executor


class NodesExecutor:
    """Does rounds by asking the nodes of a federation: an `Executor`.

    Of a client the server keeps one number, `last_round`: the last round of which its visit counts.
    The node starts its next visit from the state after that round.

    Args:
        federation: that of the nodes' roster, see `federation_of`.
        nodes: all of whom have been there once, see `Nodes.gather`.
        least: fewest replies for a round to count.
        stopped: the signal, if one was received.
    """

    def __init__(
        self,
        federation: Federation,
        nodes: Nodes,
        *,
        least: int = 1,
        stopped: Callable[[], int | None] = lambda: None,
    ):
        config = federation.config
        self.federation, self.nodes = federation, nodes
        self.devices = Devices(config.devices)
        self.processes = Processes()
        self._least, self._stopped = least, stopped
        self.program_key = ProgramKey(
            method=jax.tree.structure(federation.method),
            architectures=federation.architectures,
            num_images=1,  # none of the programs that are compiled sees any
            train_width=table_width(federation.num_train.tolist()),
            test_width=table_width(federation.num_test.tolist()),
            devices=self.devices,
            num_participants=config.num_participants,
            lockstep=False,
            clients_per_step=config.clients_per_step,
            precision=config.precision,
            kernels=str(kernels.implementation()),
            only=("update", "sum"),
        )

    @cached_property
    def aggregator(self) -> Aggregator:
        """The server's part of a round."""
        programs = compiled(self.program_key)
        method = self.federation.method
        return Aggregator(self.federation, method, programs, self.devices, self.processes)

    def prepare(self) -> None:
        """Compiles what averages."""
        _ = self.aggregator

    def start(self) -> State:
        """The state before round 1."""
        before = [{"last_round": np.int32(0)} for _ in self.federation.architectures]
        server = self.devices.replicate(self.federation.initial_server())
        return State(server, ClientStore(before, self.federation.groups, place="memory"))

    def run_round(self, state: State, t: int) -> tuple[State, RoundResult]:
        """Round `t`, see `Executor`; repeated until enough participants have answered."""
        order, dropped = participants_of(self.federation.config, t)
        templates = self._templates
        self.nodes.expect(sum(map(num_bytes, templates)) + 2**16)
        numbers: dict[int, dict[str, float]] = {}
        sent: list[dict[int, Tree]] = [{} for _ in templates]

        def accept(client: int, head: Head, body: bytes) -> None:
            if int(head["round"]) != t:
                raise ValueError(f"it is about round {head['round']}, asked was {t}")
            uploads = unpack(templates[: int(head["stages"])], body)
            self._check_weights(client, uploads)
            numbers[client] = _checked(head["info"], self._required, self._known)
            for stage, upload in zip(sent, uploads, strict=False):
                stage[client] = upload

        body = pack(jax.device_get(broadcast_of(state.server)))
        least = min(self._least, len(order))
        while True:
            asked = [client for client in order if client not in numbers]
            self.nodes.ask(self.questions(state, asked, "visit", t), body, accept)
            if len(numbers) >= least:
                break
            if (number := self._stopped()) is not None:
                words = f"stopped in round {t}, which had {len(numbers)} of {least} replies"
                raise Interrupted(f"{words}; the same command goes on after round {t - 1}", number)
            words = f"round {t}: {len(numbers)} replies, {least} are needed: it is repeated"
            self.nodes.log(words)
            time.sleep(1.0)
        there = [client for client in order if client in numbers]
        for client in there:
            state.clients.write(client, {"last_round": np.int32(t)})
        totals = [self._summed(order, uploads, stage > 0) for stage, uploads in enumerate(sent)]
        server = self.aggregator.next_server(state.server, t, order, totals)
        dropped = [*dropped, *(client for client in order if client not in numbers)]
        result = RoundResult(np.array(there, int), _columns(numbers, there), dropped)
        return state._replace(server=server), result

    def evaluate(self, state: State) -> dict[str, np.ndarray]:
        """Accuracies of all clients, see `Executor`; NaN of those that are not there."""
        clients = range(self.federation.config.num_clients)
        scores = {name: np.full(len(clients), np.nan) for name in self._accuracies}

        def accept(client: int, head: Head, body: bytes) -> None:
            for name, value in _checked(head["info"], set(scores), set(scores)).items():
                scores[name][client] = value

        last = max(self.last_round(state, client) for client in clients)
        body = pack(jax.device_get(judged_of(state.server)))
        self.nodes.ask(self.questions(state, clients, "evaluate", last), body, accept)
        return scores

    def last_round(self, state: State, client: int) -> int:
        """The last round of which a client's visit counts; 0: none does."""
        return int(state.clients.state(client)["last_round"])

    # ---------------------------------------------------------------------------- its questions

    def questions(self, state: State, clients: Sequence[int], kind: str, t: int) -> dict[int, Head]:
        """Questions of this kind, with all that a node needs to know; nothing of other clients but
        how long tables are."""
        federation, about = self.federation, self.nodes.roster.about
        config, training = federation.config, federation.method.training
        data = {name: about[name] for name in ("classes", "image_shape", "dtype", "mean", "std")}
        if training.mean:
            data |= {"mean": training.mean, "std": training.std}
        settings = {
            "config": config.as_dict(),
            "federation": about["federation"],
            "data": data,
            "batch_size": training.batch_size,
            "rest_size": training.rest_size,
            "train_width": self.program_key.train_width,
            "test_width": self.program_key.test_width,
            "predictions": federation.prediction_names,
        }
        heads: dict[int, Head] = {}
        for client in clients:
            group = int(federation.groups[client])
            own = {
                "architecture": federation.architectures[group].name,
                "start": start_number(config, federation.method, client, group),
            }
            heads[client] = {
                "kind": kind,
                "round": t,
                "after": self.last_round(state, client),
                "settings": settings | own,
            }
        return heads

    # ---------------------------------------------------------------------------- their replies

    @cached_property
    def _stages(self) -> list[StageResult]:
        """Shapes of what a client's visit results in, stage by stage."""
        shapes = shapes_of(self.program_key)
        stages = [(self.federation.architectures[0], shapes.starts[0])]
        stages += [(None, shapes.parts)] if shapes.parts else []
        return [
            jax.eval_shape(partial(work, network), shapes.inputs, state, shapes.slot)
            for network, state in stages
        ]

    @property
    def _templates(self) -> list[Tree]:
        """Shapes of (upload, weight) of each stage."""
        return [(stage.upload, stage.weight) for stage in self._stages]

    @property
    def _accuracies(self) -> list[str]:
        return [f"accuracy/{name}" for name in self.federation.prediction_names]

    @property
    def _required(self) -> set[str]:
        """Names of what every participant reports."""
        return {"loss", "finite", *COSTS, *self._accuracies}

    @property
    def _known(self) -> set[str]:
        """Names of what a participant may report."""
        return self._required | {name for stage in self._stages for name in stage.info}

    def _check_weights(self, client: int, uploads: list[Tree]) -> None:
        """Raises if a client claims more weight in the average than its samples give it."""
        largest = max(float(self.federation.num_train[client]), 1.0)
        for leaf in (leaf for _, weight in uploads for leaf in weight.values()):
            if (leaf < 0).any() or (leaf > largest).any():
                raise ValueError(f"weights of its upload are not within 0 and {largest:g}")

    def _summed(self, order: list[int], sent: dict[int, Tree], shared_stage: bool) -> Totals:
        """The totals of a stage, added up in the order of the engine on one device."""
        zeros = self.aggregator.zeros(shared_stage)
        totals = jax.tree.map(lambda leaf: np.asarray(leaf)[0], zeros)
        samples = self.federation.num_train
        calls = calls_of(self.federation, self.program_key, list(sent), samples, shared_stage)
        for call in calls:
            for client in call.clients.reshape(-1).tolist():
                if client >= 0:
                    rank = np.int32(order.index(client))
                    totals = _add(self.aggregator.method, totals, *sent[client], rank)
        return self.devices.split(jax.tree.map(lambda leaf: np.asarray(leaf)[None], totals))


def _columns(numbers: dict[int, dict[str, float]], clients: list[int]) -> dict[str, np.ndarray]:
    """What these clients report, by name; NaN where one does not."""
    names = dict.fromkeys(name for client in clients for name in numbers[client])
    columns = {}
    for name in names:
        values = [numbers[client].get(name, np.nan) for client in clients]
        # Costs are whole numbers beyond float32.
        columns[name] = np.array(values, np.float64 if name in COSTS else np.float32)
    return columns


def _checked(info: Any, required: set[str], known: set[str]) -> dict[str, float]:
    """What a node reports: numbers by name, of those that the method reports."""
    if not required <= info.keys() <= known:
        names = ", ".join(map(str, info.keys()))[:200]
        raise ValueError(f"it reports {names}; expected is {', '.join(sorted(required))}")
    numbers = {name: float(value) for name, value in info.items()}
    if not all(0 <= numbers.get(name, 0) < 1e18 for name in COSTS):
        raise ValueError("what it says of its costs cannot be")
    return numbers


@jax.jit
def _add(method: Method, totals: Totals, upload: Tree, weight: Tree, rank: jax.Array) -> Totals:
    rows = totals_of(method, StageResult(None, upload, weight, {}))
    return added(method, totals, jax.tree.map(lambda row: row[None], rows), rank[None])
