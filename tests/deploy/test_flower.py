"""Real federations on real processes at 127.0.0.1: `python -m pytest -m flower -n 0`."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small import same

from pfedafm_jax import load_client, load_data, load_run
from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.inference.states import States

pytest.importorskip("flwr", exc_type=ImportError)
pytestmark = pytest.mark.flower
ROOT = Path(__file__).parents[2]
CLIENTS, ROUNDS = 3, 5
NETWORKS = """
import flax.linen as nn
from pfedafm_jax.models.cnn import linear
from pfedafm_jax.models.architecture import register_extractor

class Tiny(nn.Module):
    hidden: int
    features: int = 8

    @nn.compact
    def __call__(self, images):
        quarters = images.reshape(images.shape[0], 2, 16, 2, 16, 3).mean(axis=(2, 4))
        hidden = nn.relu(linear(self.hidden, quarters.reshape(-1, 12), "torch", "fc1"))
        return nn.relu(linear(self.features, hidden, "torch", "fc2"))

register_extractor("tiny_a", Tiny(hidden=8))
register_extractor("tiny_b", Tiny(hidden=5))
"""
HOSTILE = """
import numpy as np
from pfedafm_jax.deploy.node import Node

honest = Node._visit

def visit(self, ready, number, after, body):
    head, body = honest(self, ready, number, after, body)
    kinds = {{"huge": bytes(200 * 2**20), "shape": body[4:], "nan": body[:-8] + b"\\xff" * 4 + body[-4:]}}
    return head, kinds["{kind}"]

Node._visit = visit
"""


class Place:
    """A folder, a port, and the processes of one federation."""

    def __init__(self, folder: Path, method: str = "pfedafm", certs: bool = False, **settings):
        self.folder, self.processes = folder, {}
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = self.nodes_port = one.getsockname()[1]
        (folder / "networks.py").write_text(NETWORKS)
        usual = {"dataset": "synthetic", "synthetic_samples": 300, "num_clients": CLIENTS}
        usual |= {"architectures": "tiny_a,tiny_b", "shared_extractor": "tiny_b", "seed": 3}
        usual |= {"participation": 0.7, "feature_size": 8, "local_epochs": 2, "batch_size": 16}
        usual |= {"rounds": ROUNDS, "method": method, "devices": 1, **settings}
        self.settings = [w for n, v in usual.items() for w in (f"--{n.replace('_', '-')}", str(v))]
        self.certs = folder / "certs" if certs else None
        if certs:
            words = ["certs", "--out", str(self.certs), "--clients", str(CLIENTS)]
            assert self.start("certs", *words).wait(120) == 0

    def start(self, name: str, *words: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "pfedafm_jax", *words]
            about = {"cwd": self.folder, "env": environment, "stdout": log, "stderr": log}
            self.processes[name] = subprocess.Popen(command, **about)
        return self.processes[name]

    def serve(self, *more: str) -> subprocess.Popen:
        words = ["--plugin", "networks.py", "--listen", f"127.0.0.1:{self.port}", *self.settings]
        words += ["--certs", str(self.certs)] if self.certs else []
        return self.start("serve", "serve", "--run-dir", "run", *words, *more)

    def node(
        self, client: int, *more: str, name: str = "", certs: Path | None = None
    ) -> subprocess.Popen:
        certs = certs or self.certs
        words = ["--client", str(client), "--data", "synthetic", "--plugin", "networks.py"]
        words += ["--server", f"127.0.0.1:{self.nodes_port}", *more]
        words += ["--certs", str(certs)] if certs else []
        name = name or f"node-{client}"
        return self.start(name, "node", "--state", f"state-{name}", *words)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def log(self, name: str = "serve") -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{name}.log").read_text(errors="replace")
        return ""

    def records(self) -> list[dict]:
        return list(map(json.loads, (self.folder / "run/rounds.jsonl").read_text().splitlines()))

    def rounds(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "run" / "rounds.jsonl").read_text().count("\n")
        return 0

    def until(self, found, seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < end, self.log()[-3000:] + self.log("node-0")[-2000:]
            time.sleep(0.2)

    def finished(self, seconds: float = 900) -> None:
        code = self.processes["serve"].wait(seconds)
        assert code == 0, self.log()[-3000:]
        for name, process in self.processes.items():
            if name.startswith("node-"):
                assert process.wait(60) == 0, self.log(name)[-2000:]

    def simulated(self):
        words = ["run", "--plugin", "networks.py", "--run-dir", "simulated", *self.settings]
        assert self.start("run", *words).wait(600) == 0, self.log("run")[-2000:]
        load_plugin(self.folder / "networks.py")
        return load_run(self.folder / "simulated")

    def equals_the_simulation(self) -> None:
        """Every float: what is shared, what each client keeps, and the records."""
        expected, found = self.simulated(), load_run(self.folder / "run")
        assert same(found.server, expected.server)
        for client in range(CLIENTS):
            states = States(self.folder / f"state-node-{client}")
            if states.rounds():
                assert same(load_client(states.place).params, expected.client(client).params)
        for one, other in zip(found.run.records, expected.run.records, strict=True):
            rows = [dict(row.as_dict(), seconds=0) for row in (one, other)]
            assert rows[0] == rows[1]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def place(tmp_path):
    with contextlib.ExitStack() as closing:

        def made(*words, **settings):
            one = Place(tmp_path, *words, **settings)
            closing.callback(one.close)
            return one

        yield made


@pytest.mark.parametrize("method", ["pfedafm", "fedproto", "fml", "standalone"])
def test_a_federation_over_processes_is_the_simulation_bit_for_bit(method, place):
    one = place(method)
    for client in range(CLIENTS):
        one.node(client)
    one.serve()
    one.finished()
    one.equals_the_simulation()


def test_nodes_and_server_may_be_killed_at_any_moment(place):
    """A node in a round, one between rounds, and the server: nobody is lost in the end, since there
    is time to return, and the result is that of a simulation."""
    one, patient = place("pfedafm"), ["--absent-timeout", "600", "--min-replies", "2"]
    for client in range(CLIENTS):
        one.node(client)
    one.serve(*patient)
    one.until(lambda: one.rounds() >= 1)
    one.kill("node-0")  # as soon as round 1 is over: in round 2, or before it
    one.node(0)
    one.until(lambda: one.rounds() >= 2)
    time.sleep(np.random.default_rng().uniform(0, 2))
    one.kill("node-1")
    one.kill("serve")
    one.node(1)
    one.serve(*patient)
    one.finished()
    one.equals_the_simulation()


def test_a_round_goes_on_without_a_node_that_stays_away(place):
    one = place("fml", participation=1.0, rounds=3)
    for client in range(CLIENTS):
        one.node(client)
    one.serve("--absent-timeout", "2", "--min-replies", "2")
    one.until(lambda: one.rounds() >= 1)
    one.kill("node-2")
    one.finished()
    lost = [row.get("dropped") for row in one.records()]
    assert lost[0] is None and lost[-1] == [2] and "client 2 is not there" in one.log()


def test_with_keys_only_those_who_have_them_take_part(place, tmp_path):
    one = place("fedproto", certs=True, rounds=2, participation=1.0)
    words = ["certs", "--out", str(tmp_path / "other"), "--clients", str(CLIENTS)]
    assert one.start("other", *words).wait(120) == 0
    mixed = tmp_path / "mixed"  # the right authority, and keys that nobody has registered
    (mixed / "nodes").mkdir(parents=True)
    (mixed / "ca.crt").write_bytes((tmp_path / "certs/ca.crt").read_bytes())
    keys = {client: (tmp_path / f"other/nodes/client-{client}") for client in (0, 1)}
    (mixed / "nodes/client-0").write_bytes(keys[0].read_bytes())
    (mixed / "nodes/client-1").write_bytes((tmp_path / "certs/nodes/client-2").read_bytes())
    one.serve()
    one.until(lambda: "0 of 3 nodes" in one.log())
    claims = one.node(1, name="claims", certs=mixed)  # the key of client 2
    assert claims.wait(300) == 2
    assert "it says it is client 1 and has the key of 2" in one.log()
    one.node(0, name="unknown", certs=mixed)
    one.node(1, name="stranger", certs=tmp_path / "other")  # trusts another authority
    one.until(lambda: "trying again" in one.log("unknown"))
    one.until(lambda: (tmp_path / "state-stranger/flower/supernode.log").exists())
    assert "0 of 3 nodes" in one.log() and "1 of 3 nodes" not in one.log()
    for name in ("unknown", "stranger", "claims"):
        one.kill(name)
    for client in range(CLIENTS):
        one.node(client)
    one.finished()
    one.equals_the_simulation()
    assert (
        tmp_path / "state-node-0" / States(tmp_path / "state-node-0").path(2).name
    ).stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("kind", ["huge", "shape", "nan"])
def test_hostile_uploads_are_refused_by_name_and_the_round_goes_on(kind, place, tmp_path):
    one = place("fml", rounds=2, participation=1.0)
    (tmp_path / "hostile.py").write_text(HOSTILE.format(kind=kind))
    for client in range(CLIENTS):
        one.node(client, *(["--plugin", "hostile.py"] if client == 1 else []))
    one.serve("--min-replies", "2")
    one.finished()
    assert one.log().count("client 1's reply is refused: ") == 2
    rows = one.records()
    assert [row["dropped"] for row in rows] == [[1], [1]] and all(row["loss"] > 0 for row in rows)


def test_nothing_private_is_on_the_wire(place, tmp_path):
    one, seen = place("pfedafm", rounds=2, participation=1.0), {"up": b"", "down": b""}
    with socket.create_server(("127.0.0.1", 0)) as door:
        one.nodes_port = door.getsockname()[1]
        threading.Thread(target=tapped, args=(door, one.port, seen), daemon=True).start()
        for client in range(CLIENTS):
            one.node(client)
        one.serve()
        one.finished()
    load_plugin(str(tmp_path / "networks.py"))
    shared = load_run(tmp_path / "run").server
    for leaf in jax.tree.leaves(shared):
        assert np.asarray(leaf).tobytes() in seen["down"]
    node = load_client(tmp_path / "state-node-0")
    assert len(seen["up"]) > 10_000
    for leaf in jax.tree.leaves(node.params):
        assert leaf.size < 8 or leaf.tobytes()[:32] not in seen["up"] + seen["down"]
    assert re.search(rb'"num_train', seen["up"])
    for image in load_data(load_run(tmp_path / "run").config).images:
        assert image.tobytes()[:64] not in seen["up"]


def tapped(door: socket.socket, port: int, seen: dict[str, bytes]) -> None:
    """Hands connections on to the server and keeps what passes."""

    def pump(source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                seen[way] += data
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def carry(near: socket.socket) -> None:
        # The server may not be there yet.
        server = "127.0.0.1", port
        with contextlib.suppress(OSError), near, socket.create_connection(server) as far:
            up = threading.Thread(target=pump, args=(near, far, "up"))
            up.start()
            pump(far, near, "down")
            up.join()

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=carry, args=(door.accept()[0],), daemon=True).start()


def test_a_message_whose_body_is_a_number_is_none_of_ours():
    from flwr.app import ConfigRecord, RecordDict

    from pfedafm_jax.deploy.flower import content, record

    assert content(record({"kind": "bye"}, b"xy")) == ({"kind": "bye"}, b"xy")
    with pytest.raises(ValueError, match="no message of ours"):
        content(RecordDict({"head": ConfigRecord({"json": "{}", "body": 2**62})}))
