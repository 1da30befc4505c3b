"""A federation of five nodes on this machine beside the simulator: equality, overhead, bytes, kills.

    python benchmarks/federation.py                  # equality, overhead of a warm round, bytes
    python benchmarks/federation.py --kills 20       # kill -9 of nodes and server at random moments

Needs the extra `flower`. Between nodes and server stands a tap that counts what passes.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jax
import numpy as np

from pfedafm_jax import load_client, load_run
from pfedafm_jax.engine import setup_devices

CLIENTS = 5


class Processes:
    """The commands of one federation in a folder."""

    def __init__(self, folder: Path, settings: list[str]):
        self.folder, self.settings, self.running = folder, settings, {}
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.door = socket.create_server(("127.0.0.1", 0))
        self.passed = {"up": 0, "down": 0}
        self.warm = []  # bytes up in rounds after the first
        threading.Thread(target=self._tap, daemon=True).start()

    def start(self, name: str, *words: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "pfedafm_jax", *words],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
                stdout=log,
                stderr=log,
            )
        return self.running[name]

    def serve(self) -> None:
        listen = ["--listen", f"127.0.0.1:{self.port}", "--run-dir", "run"]
        patient = ["--absent-timeout", "3000", "--round-timeout", "3000"]
        self.start("serve", "serve", *listen, *patient, *self.settings)

    def node(self, client: int) -> None:
        place = [
            "--server",
            f"127.0.0.1:{self.door.getsockname()[1]}",
            "--state",
            f"state-{client}",
        ]
        self.start(f"node-{client}", "node", "--client", str(client), "--data", "synthetic", *place)

    def rounds(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            lines = (self.folder / "run/rounds.jsonl").read_text().splitlines()
            return list(map(json.loads, lines))
        return []

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def _tap(self) -> None:
        def pump(source: socket.socket, sink: socket.socket, way: str) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(2**16):
                    self.passed[way] += len(data)
                    sink.sendall(data)
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

        while True:
            near, _ = self.door.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                near.close()
                continue
            for way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=pump, args=way, daemon=True).start()


def equal(folder: Path) -> str:
    """Every float of the two runs: what is shared, and what clients keep."""
    expected, found = load_run(folder / "simulated"), load_run(folder / "run")
    pairs = [(found.server, expected.server)]
    for client in range(CLIENTS):
        pairs.append(
            (load_client(folder / f"state-{client}").params, expected.client(client).params)
        )
    leaves = [
        (np.asarray(a), np.asarray(b))
        for one in pairs
        for a, b in zip(*map(jax.tree.leaves, one), strict=True)
    ]
    same, count = sum(int((a == b).sum()) for a, b in leaves), sum(a.size for a, _ in leaves)
    dropped = sum(len(record.dropped) for record in found.run.records)
    return f"{same:,} of {count:,} floats equal, {dropped} visits lost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="pfedafm")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    asked = parser.parse_args()
    settings = ["--dataset", "synthetic", "--synthetic-samples", "600", "--num-clients", str(CLIENTS),
                "--participation", "1", "--local-epochs", "1", "--eval-every", "1000", "--devices", "1",
                "--method", asked.method, "--rounds", str(asked.rounds)]  # fmt: skip
    setup_devices(1)
    chance = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        one = Processes(folder, settings)
        try:
            for client in range(CLIENTS):
                one.node(client)
            one.serve()
            _watch(one, asked.kills, chance)
            one.start("run", "run", "--run-dir", "simulated", *settings).wait()
            print(equal(folder), flush=True)
            if not asked.kills:
                _figures(one, folder, asked.rounds)
        finally:
            one.close()


def _watch(one: Processes, kills: int, chance: random.Random) -> None:
    """Until the server has ended; meanwhile kills, each followed by the same command again."""
    passed, said = dict(one.passed), 0
    while True:
        serve = one.running["serve"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = serve.wait(chance.uniform(5, 40) if kills and one.rounds() else 1)
            log = (one.folder / "serve.log").read_text()[-2000:]
            assert code == 0, log
            break
        for record in one.rounds()[said:]:
            said = record["round"]
            up, down = (one.passed[way] - passed[way] for way in ("up", "down"))
            passed = dict(one.passed)
            one.warm += [up] if said > 1 else []
            print(
                f"round {said}: {record['seconds']} s, {up:,} bytes up, {down:,} down", flush=True
            )
        if kills and one.rounds():
            name = chance.choice(["serve", *(f"node-{client}" for client in range(CLIENTS))])
            one.running[name].send_signal(signal.SIGKILL)
            one.running[name].wait()
            print(f"killed {name} after round {len(one.rounds())}", flush=True)
            one.serve() if name == "serve" else one.node(int(name[-1]))
            kills -= 1


def _figures(one: Processes, folder: Path, rounds: int) -> None:
    runs = [load_run(folder / name) for name in ("run", "simulated")]
    seconds = [min(record.seconds for record in run.run.records[1:]) for run in runs]
    print(
        f"a warm round, the shortest of {rounds - 1}: {seconds[0]:.2f} s, simulated {seconds[1]:.2f} s"
    )
    raw = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(runs[0].server))
    print(f"{raw:,} bytes are shared; passed a visit, with all of HTTP:", end=" ")
    print(f"{min(one.warm) / CLIENTS / raw:.4f} × up in a warm round; from start to end", end=" ")
    # All clients are sent the last broadcast once more, to be evaluated.
    messages = {"up": rounds * CLIENTS, "down": (rounds + 1) * CLIENTS}
    print(", ".join(f"{one.passed[way] / messages[way] / raw:.4f} × {way}" for way in messages))


if __name__ == "__main__":
    main()
