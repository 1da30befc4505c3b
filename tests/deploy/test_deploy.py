"""A federation without a network: nodes answer in this process, all else is as over Flower.
`test_flower.py` has the same over real processes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from small import METHODS, assert_close, same, slow_but, small_config, small_data

from pfedafm_jax import PfedafmError, load_client, load_run, run
from pfedafm_jax.base.errors import Interrupted
from pfedafm_jax.base.trees import num_bytes
from pfedafm_jax.config.config import updated
from pfedafm_jax.deploy import server, wire
from pfedafm_jax.deploy.node import Node
from pfedafm_jax.deploy.roster import Roster, classes_of, federation_of
from pfedafm_jax.deploy.server import Nodes, NodesExecutor
from pfedafm_jax.inference.export import readme
from pfedafm_jax.inference.states import States
from pfedafm_jax.runs.existing import Task, find_existing
from pfedafm_jax.runs.history import History
from pfedafm_jax.runs.observers import observed
from pfedafm_jax.runs.train import evaluation_is_due, train

CLASSES = [str(number) for number in range(4)]
DATA, PARTITION = small_data()


class Local(Node):
    """A node with a client's rows of the small data, as if they were its own."""

    def own_data(self, config, classes, **statistics):
        return DATA, PARTITION.train[self.client], PARTITION.test[self.client]


class Wire:
    """A link whose nodes are objects. `away` are not reached, `hands[k]` changes k's replies;
    everything that would travel is in `sent`."""

    def __init__(self, *nodes):
        self.all, self.owners, self.largest = dict(enumerate(nodes, start=100)), None, 0
        self.away, self.hands, self.sent, self._waiting = set(), {}, [], {}

    def nodes(self):
        return {number: "now" for number in self.all if number - 100 not in self.away}

    def ask(self, number, head, body, seconds):
        question, node = str(len(self.sent)), self.all[number]
        if number - 100 in self.away:
            return question
        try:
            reply = node.answer(json.loads(json.dumps(head)), body)
        except (PfedafmError, ValueError) as error:
            reply = {"error": str(error)}, b""
        hand = self.hands.get(node.client)
        if hand and head["kind"] == "visit":
            reply = hand(*reply)
        self.sent.append((head, body, *reply))
        self._waiting[question] = question, *reply
        return question

    def replies(self, questions):
        return [self._waiting.pop(one) for one in questions if one in self._waiting]


class Made:
    """A run over the nodes of a link, round by round."""

    def __init__(self, config, nodes, least):
        self.config, self.nodes = config, nodes
        self.federation = federation_of(config, nodes.roster)
        self.executor = NodesExecutor(self.federation, nodes, least=least)
        self.history = History(self.federation, self.executor)
        self.state = self.executor.start()

    @property
    def records(self):
        return self.history.records

    def run_round(self):
        t = self.history.rounds_done + 1
        self.state, result = self.executor.run_round(self.state, t)
        due = evaluation_is_due(self.config, t)
        return self.history.add(result, self.executor.evaluate(self.state) if due else None, 0.0)

    def last_rounds(self):
        return [self.executor.last_round(self.state, client) for client in range(4)]

    def train_in(self, folder):
        """Its rounds with files, as the command has them."""
        task = find_existing(Task(self.config, folder), nodes=True)
        self.history, self.state = train(self.federation, self.executor, task.folder)


def federation(folder, method, *, link=None, log=print, least=1, **changes):
    """(federation, link) with a node a client, its files in `folder`; nothing has been run."""
    config = small_config(method, checkpoint_every=1, **changes)
    nodes = [Local(k, States(folder / f"node-{k}"), "", log=lambda line: None) for k in range(4)]
    link = link or Wire(*nodes)
    (folder / "run").mkdir(exist_ok=True)
    roster = Roster(folder / "nodes.json", config, CLASSES)
    nodes = Nodes(link, roster, log, seconds=60.0, patience=0.2)
    nodes.gather()
    return Made(config, nodes, least), link


def played(folder, method, **changes):
    made, link = federation(folder, method, **changes)
    for _ in range(made.config.rounds):
        made.run_round()
    return made, link


@pytest.mark.parametrize("method", slow_but(("pfedafm",), [*METHODS, "fedavg", "fedprox"]))
def test_a_federation_is_the_simulation_bit_for_bit(method, tmp_path):
    made, _ = played(tmp_path, method, rounds=3)
    expected = run(small_config(method, rounds=3), DATA, PARTITION, progress=False)
    assert same(made.state.server, expected.state.server)
    for client in range(4):
        states = States(tmp_path / f"node-{client}")
        if states.rounds():
            assert same(load_client(states.place).params, expected.state.clients.state(client))
    for one, other in zip(made.records, expected.records, strict=True):
        assert replace(one, seconds=0) == replace(other, seconds=0)
    assert same(made.history.evaluations[3], expected.history.evaluations[3])


def test_only_what_is_shared_travels_and_states_are_the_nodes_own(tmp_path):
    made, link = played(tmp_path, "pfedafm", rounds=2, eval_every=1)
    shared = num_bytes(made.state.server)
    for head, body, reply, back in link.sent:
        assert len(body) in (0, shared) and len(back) in (0, shared + 4)  # weights, and n_k
        assert len(json.dumps(head)) < 4000 and len(json.dumps(reply)) < 1000
    assert (
        "vectors/mix" not in observed(made.history, made.state, made.records[-1]).clients
    )  # they are with the nodes
    place = tmp_path / "node-1"
    assert "accuracy on this client's own test images" in readme(load_client(place), [])
    private = load_client(place).params["local_extractor"]
    for leaf in jax.tree.leaves(private):
        assert not any(leaf.tobytes() in back for _, _, _, back in link.sent if leaf.size > 8)
    path = States(place).path(States(place).rounds()[-1])
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(PfedafmError, match="changed since it was written"):
        load_client(place)


@pytest.mark.slow
def test_those_that_are_lost_have_no_part_and_are_taken_again(tmp_path):
    lines = []
    made, link = federation(tmp_path, "fedproto", rounds=3, participation=1.0, log=lines.append)
    link.away.add(1)
    first = made.run_round()
    assert first.dropped == [1] and first.not_finite == 0 and "client 1 is not there" in lines
    assert made.last_rounds() == [1, 0, 1, 1]
    link.away.clear()
    assert made.run_round().dropped == [] and made.last_rounds() == [2, 2, 2, 2]
    # A reply that was lost: the visit is repeated from the state before it, to the same bits.
    client = link.all[100]
    kept = client.states.read(2)[1]
    made.state.clients.write(0, {}, 1)
    made.records.pop()
    client._last = None
    asked = made.executor.questions(made.state, [0], "visit", 2)[0]
    body = next(body for head, body, *_ in link.sent if head.get("round") == 2)
    client.answer(asked, body)
    assert same(client.states.read(2)[1], kept) and client.states.rounds() == [1, 2]


def garbled(head, body):
    return head, body[:-4]


def infinite(head, body):
    return head, np.float32(np.inf).tobytes() + body[4:]


def heavy(head, body):
    return head, body[:-4] + np.float32(1e9).tobytes()


def test_replies_that_cannot_be_are_refused_and_the_round_goes_on(tmp_path):
    lines, changes = [], {"participation": 1.0, "architectures": ("dense_b",)}
    made, link = federation(tmp_path, "fml", log=lines.append, **changes)
    link.hands = {0: garbled, 1: infinite, 2: heavy}
    assert sorted(made.run_round().dropped) == [0, 1, 2]
    assert made.last_rounds() == [0, 0, 0, 1]
    size = num_bytes(made.state.server)
    assert f"client 0's reply is refused: {size} bytes of weights instead of {size + 4}" in lines
    assert "client 1's reply is refused: weights that are not finite" in lines
    assert "client 2's reply is refused: weights of its upload are not within 0 and 3" in lines
    visits = [reply for head, *_, reply in link.sent if head["kind"] == "visit"]
    sent = next(reply for reply in reversed(visits) if len(reply) > size)
    assert_close(jax.device_get(made.state.server), wire.unpack(made.state.server, sent[:-4]))
    assert made.history.about()["nodes"]
    lines.clear()
    link.hands = {
        0: lambda head, body: (head | {"round": 1}, body),
        1: lambda head, body: (head | {"info": {"loss": 0.5}}, body),
        2: lambda head, body: (head | {"info": head["info"] | {"flops": -1.0}}, body),
    }
    assert sorted(made.run_round().dropped) == [0, 1, 2]
    assert "client 0's reply is refused: it is about round 1, asked was 2" in lines
    assert any("client 1's reply is refused: it reports loss; expected is acc" in x for x in lines)
    assert "client 2's reply is refused: what it says of its costs cannot be" in lines
    nodes = Nodes(link, made.nodes.roster, lines.append, seconds=60.0, patience=0.1)
    least = NodesExecutor(made.federation, nodes, least=2)
    link.hands, link.away = {}, {0, 1, 2}

    def back(line):
        if "it is repeated" in line:
            link.away = {0, 1}

    nodes.log, nodes._where = back, dict(made.nodes._where)
    _, result = least.run_round(made.state, 3)
    assert result.reports["finite"].sum() == 2 and sorted(result.dropped) == [0, 1]
    least._stopped, link.away = (lambda: 15), {0, 1, 2, 3}  # SIGTERM, and nobody is there
    with pytest.raises(Interrupted, match="0 of 2 replies; the same command goes on after round 3"):
        least.run_round(made.state, 4)


def test_who_cannot_take_part_is_told_so_before_round_1(tmp_path):
    lines, config = [], small_config("fedproto")
    roster = Roster(tmp_path / "nodes.json", config, CLASSES)
    link = Wire(*(Local(k, States(tmp_path / str(k)), "") for k in (0, 1)))
    link.all[100].architecture, link.owners = "dense_c", {100: 0, 101: 2}
    nodes = Nodes(link, roster, lines.append)
    nodes._heard({})
    lines.sort(key=lambda line: "node 101" in line)
    assert "its architecture is dense_c; the federation has dense_a, dense_b" in lines[0]
    assert "it says it is client 1 and has the key of 2" in lines[1]
    assert link.all[100].left == lines[0] and not roster.nodes
    with pytest.raises(PfedafmError, match="classes = None"):
        classes_of(updated(config, dataset="npz:mine.npz"), None)
    other = tmp_path / "mine.npz"
    np.savez(other, images=DATA.images[:9], labels=DATA.labels[:9])
    with pytest.raises(PfedafmError, match="9 training and 0 test images; both are needed"):
        Node(0, States(tmp_path / "s"), str(other)).own_data(config, CLASSES)
    with pytest.raises(PfedafmError, match="label 3 needs num_classes above 3, it is 2"):
        Node(0, States(tmp_path / "s"), str(other)).own_data(config, CLASSES[:2])


class Idle(Local):
    """A node whose visits do nothing."""

    def answer(self, head, body):
        return ({}, b"") if head["kind"] == "visit" else super().answer(head, body)


def greeted(folder, lines, seconds=60.0):
    """Questions to two nodes that are there, and their link."""
    config = updated(small_config("fedproto"), num_clients=2)
    link = Wire(*(Idle(k, States(folder / str(k)), "") for k in (0, 1)))
    roster = Roster(folder / "nodes.json", config, CLASSES)
    nodes = Nodes(link, roster, lines.append, seconds=seconds)
    nodes.gather()
    return nodes, link


def test_a_node_that_is_lost_is_asked_again_when_it_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "LOOK", 0.0)
    lines, replies = [], []
    nodes, link = greeted(tmp_path, lines)

    def lost(head, body):
        link.away, link.hands[0] = {0}, lambda head, body: ({"round": 2}, b"new")
        return {"lost": "its connection"}, b""

    def log(line):
        lines.append(line)
        link.away = set()  # it is back as soon as it is missed

    nodes.log, link.hands = log, {0: lost, 1: lambda head, body: ({"error": "no memory"}, b"")}
    nodes.ask({k: {"kind": "visit"} for k in (0, 1)}, b"", lambda *one: replies.append(one))
    assert replies == [(0, {"round": 2}, b"new")]
    assert {"client 0 is gone", "client 1's reply is refused: no memory"} <= set(lines)
    nodes.dismiss()
    assert [one.left for one in link.all.values()] == ["", ""]


def test_who_does_not_answer_in_time_is_named(tmp_path):
    lines = []
    nodes, link = greeted(tmp_path, lines, seconds=0.1)
    link.replies = lambda questions: []
    nodes.ask({1: {"kind": "visit"}}, b"", lambda *one: None)
    assert lines[-1] == "client 1 has not answered within 0.1 s"


def test_a_node_refuses_what_is_not_its_own(tmp_path):
    config = updated(small_config("fedproto"), dataset="synthetic", synthetic_samples=120)
    hello = {"kind": "hello", "config": config.as_dict(), "classes": CLASSES, "federation": "b"}
    own = Local(0, States(tmp_path), "")
    with pytest.raises(PfedafmError, match="asks for 'dance' with kind; is it of another version"):
        own.answer({"kind": "dance"}, b"")
    own.states.write(1, {"federation": "a", "client": 0}, {}, {})
    with pytest.raises(PfedafmError, match="has the state of another federation"):
        own.answer(hello, b"")
    ready = SimpleNamespace(start="its start", card={"federation": "b"})
    assert own._state(ready, 0) == "its start"
    for after, said in ((1, "another client or federation"), (2, "after round 2 .* there is 1")):
        with pytest.raises(PfedafmError, match=said):
            own._state(ready, after)
    with pytest.raises(PfedafmError, match="client = 4 cannot be used; accepted: 0 to 3"):
        Node(4, States(tmp_path), "synthetic").answer(hello, b"")


@pytest.mark.slow
def test_a_server_goes_on_where_it_was_and_its_run_can_be_used(tmp_path):
    made, link = federation(tmp_path, "fml", rounds=3, architectures=("dense_b",))
    made.train_in(tmp_path / "run")
    opened = load_run(tmp_path / "run")
    assert same(opened.server, made.state.server) and opened.finished
    with pytest.raises(PfedafmError, match="is with its node"):
        opened.client(0)
    assert opened.join(DATA.images[:20], DATA.labels[:20], visits=1).history
    config = updated(made.config, rounds=4)
    again, _ = federation(tmp_path, "fml", link=link, rounds=4, architectures=("dense_b",))
    again.train_in(tmp_path / "run")
    assert again.history.rounds_done == 4 and max(again.last_rounds()) == 4
    expected = run(updated(config, eval_every=10), DATA, PARTITION, progress=False)
    assert same(again.state.server, expected.state.server)


def test_a_node_reads_a_file_or_its_share_of_what_all_have(tmp_path):
    config = small_config("fml", dataset="synthetic", synthetic_samples=120)
    path = tmp_path / "mine.npz"
    arrays = {"images": DATA.images[:8], "labels": DATA.labels[:8]}
    np.savez(path, **arrays, test_images=DATA.images[8:10], test_labels=DATA.labels[8:10])
    own, train, test = Node(0, States(tmp_path), str(path)).own_data(config, CLASSES)
    assert (len(train), test.tolist(), own.class_names) == (8, [8, 9], tuple(CLASSES))
    names = [str(number) for number in range(10)]
    _, train, test = Node(1, States(tmp_path), "synthetic").own_data(config, names)
    assert 0 < len(test) < len(train) and len(train) + len(test) < 120


def test_a_folder_of_states_is_one_nodes_alone_and_gives_back_what_it_was_given(tmp_path):
    states = States(tmp_path / "mine")
    for number in range(1, 6):
        states.write(number, {"client": 1}, {"count": np.float32(number)}, {"w": np.ones((2, 3)).T})
    assert states.rounds() == [3, 4, 5]
    card, weights = states.read(5)
    assert card == {"client": 1, "round": 5}
    assert same(weights, {"client.count": np.float32(5), "server.w": np.ones((3, 2))})
    states.write(4, {}, {}, {})  # round 4 again: what came after it no longer counts
    assert states.rounds() == [3, 4]
    with (
        states.locked(),
        pytest.raises(PfedafmError, match="no other node uses"),
        States(tmp_path / "mine").locked(),
    ):
        pass
