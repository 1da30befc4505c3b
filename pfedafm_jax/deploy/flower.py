"""Flower under server and nodes: its processes, its messages. The only file that imports it.

A superlink and a supernode run with `--isolation process`: what they would start for every message,
our own processes do, which stay alive. So nothing that travels is ever executed, neither on the
server nor on a node, and a round starts no process. `server_app` and `client_app` are the same for
people who have superlinks and supernodes of their own.
"""

# pyright: reportMissingImports=false

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from pfedafm_jax.deploy.wire import Head
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.files import read_bytes

logging.getLogger("flwr").setLevel(logging.WARNING)
Log = Callable[[str], Any]
POLL = 0.15  # seconds between two questions for messages
PIECE = 5 * 2**20  # Flower sends arrays in pieces of this size
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
APP = b"""[project]
name = "pfedafm"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "pfedafm"
[tool.flwr.app.components]
serverapp = "pfedafm_jax.deploy.flower:server_app"
clientapp = "pfedafm_jax.deploy.flower:client_app"
[tool.flwr.app.config]
arguments = ""
"""


def record(head: Head, body: bytes) -> RecordDict:
    """A message of ours as one of Flower's."""
    found = RecordDict({"head": ConfigRecord({"json": json.dumps(head)})})
    if body:
        found["body"] = ArrayRecord({"bytes": Array("uint8", (len(body),), "bytes", body)})
    return found


def content(record: RecordDict) -> tuple[Head, bytes]:
    """What `record` was made of; `ValueError` for anything else."""
    try:
        head: Any = json.loads(str(record.config_records["head"]["json"]))
        bodies = list(record.array_records.values())
        body = bodies[0]["bytes"].data if bodies else b""
    except (KeyError, RecursionError) as error:
        raise ValueError(f"no message of ours: {error}") from error
    if not isinstance(head, dict):
        raise ValueError("no message of ours")
    return head, body


# -------------------------------------------------------------------------------------- the server


class Reply(NamedTuple):
    """What came back for a question: `head` is None where `why` says what went wrong."""

    question: str
    head: Head | None
    body: bytes
    why: str = ""


class Link:
    """Questions to nodes and their replies.

    `owners` says whose node each is, by the key it was registered with; None: nodes have no keys,
    and are whom they say they are.
    """

    def __init__(self, grid: Any, owners: dict[int, int] | None = None):
        self.owners, self._grid = owners, grid
        self.largest = 0  # bytes of a reply; a larger one is not even fetched
        self._refused: list[Reply] = []
        if isinstance(grid, HttpGrid):
            client: Any = grid._runtime_client
            client.PullMessages = self._only_small(client.PullMessages)

    def nodes(self) -> dict[int, str]:
        """Nodes that are there, each with the time at which it came."""
        with _answering():
            if not isinstance(self._grid, HttpGrid):
                return dict.fromkeys(self._grid.get_node_ids(), "")
            return {one.node_id: one.last_activated_at for one in self._grid.get_nodes()}

    def ask(self, node: int, head: Head, body: bytes, seconds: float) -> str:
        """Sends a question, which nobody has to answer after so many seconds; its number."""
        kind = "query" if head["kind"] == "hello" else "train"
        message = Message(record(head, body), node, kind, ttl=seconds)
        with _answering():
            (number,) = self._grid.push_messages([message])
        return number or ""  # it has gone: nothing will come

    def replies(self, questions: Sequence[str]) -> list[Reply]:
        """Replies that have come."""
        questions = [question for question in questions if question]
        with _answering():
            messages = list(self._grid.pull_messages(questions)) if questions else []
        found, self._refused = self._refused, []
        for message in messages:
            question = message.metadata.reply_to_message_id
            if message.has_error():
                found.append(Reply(question, None, b"", f"Flower says: {message.error.reason}"))
                continue
            try:
                found.append(Reply(question, *content(message.content)))
            except ValueError as error:
                found.append(Reply(question, None, b"", str(error)))
        return found

    def _only_small(self, pull: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Flower's list of replies without those of more pieces than any that is expected."""

        def pulled(request: Any) -> Any:
            response = pull(request)
            listed = zip(response.messages_list, response.message_object_trees, strict=True)
            for place, (one, tree) in reversed(list(enumerate(listed))):
                pieces = sum(1 for _ in iterate_object_tree(tree))
                if pieces > 16 + self.largest // PIECE:
                    del response.messages_list[place], response.message_object_trees[place]
                    why = f"a message in {pieces} pieces, larger than any that is expected"
                    question = one.metadata.reply_to_message_id
                    self._refused.append(Reply(question, None, b"", why))
            return response

        return pulled


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, RuntimeError) as error:
        words = "Flower's superlink does not answer; the same command goes on"
        raise PfedafmError(f"{words} ({type(error).__name__}: {str(error)[:200]})") from error


@contextlib.contextmanager
def superlink(listen: str, certs: Path | None, place: Path, num_clients: int) -> Iterator[Link]:
    """A superlink at `listen` for as long as this lasts, with a run whose `ServerApp` we are.

    Args:
        certs: as `certs.py` writes them: TLS, and nodes with keys. None: neither.
        place: a folder for Flower's files and the superlink's log.
        num_clients: keys of these clients are registered.
    """
    host, port = address(listen)
    flags = ["--host", host, "--port", str(port), "--isolation", "process"]
    flags += ["--disable-runtime-dependency-installation"]
    authority = certs and certs / "ca.crt"
    if certs is None:
        flags.append("--insecure")
    else:
        flags += ["--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certs / "server.crt")]
        flags += ["--ssl-keyfile", str(certs / "server.key"), "--enable-supernode-auth"]
    with _started("superlink", flags, place) as (process, secret):
        near = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        about: tuple[Any, ...] = (
            f"{near}:{port}",
            certs is None,
            authority and read_bytes(authority),
        )
        version = RuntimeVersionHttpInterceptor(component_name="pfedafm")
        with ControlHttpClient.from_server_address(*about, [version]) as control:  # pyright: ignore
            fab = build_fab_from_files({"pyproject.toml": APP})[0]
            bundle = fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
            _patiently(process, place, lambda: control.StartRun(StartRunRequest(fab=bundle)))
            owners: dict[int, int] = {}
            for client in range(num_clients) if certs else ():
                key = public_key(Path(certs or "") / "nodes" / f"client-{client}.pub")
                node = control.RegisterNode(RegisterNodeRequest(public_key=key)).node_id
                owners[node] = client
        token, _ = _task(_runtime(about, secret), TaskType.SERVER_APP)
        grid = HttpGrid(*about, token=token)  # pyright: ignore
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
        heartbeat.start()
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        grid.set_run(run_from_proto(given.run))
        grid._retry_invoker.max_time = 60.0
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        try:
            yield Link(grid, owners if certs else None)
        finally:
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                done = PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
                grid._retry_invoker.max_tries = 1
                grid._runtime_client.PushTaskOutput(done)
            if heartbeat.is_running:
                heartbeat.stop()
            grid.close()


def public_key(path: Path) -> bytes:
    """A node's public key from its file, as Flower registers it."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        return public_key_to_bytes(load_ssh_public_key(read_bytes(path)))  # pyright: ignore
    except (OSError, ValueError) as error:
        words = f"{path} is no public key of a node ({error}); pfedafm certs makes them"
        raise PfedafmError(words) from error


# ---------------------------------------------------------------------------------------- the node


def answer_forever(
    server: str, authority: Path | None, key: Path | None, place: Path, node: Any, log: Log
) -> None:
    """Runs a supernode, started again whenever it ends, until the server wants no more of it.

    Args:
        server: HOST:PORT of the superlink.
        authority: who signed its certificate; None: no TLS.
        key: this node's private key, if nodes have keys.
        place: a folder for Flower's files and the supernode's log.
        node: the `Node` that answers.
    """
    flags = ["--superlink", server, "--isolation", "process", "--host", "127.0.0.1"]
    flags += ["--root-certificates", str(authority)] if authority else ["--insecure"]
    flags += ["--auth-supernode-private-key", str(key)] if key else []
    wait = 1.0
    while node.left is None:
        port, began = free_port(), time.monotonic()
        with _started("supernode", [*flags, "--port", str(port)], place) as (process, secret):
            about: tuple[Any, ...] = (f"127.0.0.1:{port}", True, None)
            runtime = _runtime(about, secret)
            while process.poll() is None and node.left is None:
                try:
                    token, task = _task(runtime, TaskType.CLIENT_APP, process)
                    if task:
                        _answer(about, token, node.answer)
                except (httpx.HTTPError, RuntimeError, ValueError) as error:
                    log(f"a question was lost: {type(error).__name__}: {str(error)[:200]}")
                    time.sleep(POLL)
            if node.left is not None:
                time.sleep(2.0)  # for the last reply
                return
        # After kill -9 the superlink takes the same key again only when it has missed its heartbeats.
        wait = 1.0 if time.monotonic() - began > 60 else min(2 * wait, 10.0)
        log(f"{last_words(place / 'supernode.log')}; trying again in {wait:.0f} s")
        time.sleep(wait)


def _answer(about: Any, token: str, answer: Callable) -> None:
    """One question, from the supernode and back to it."""
    client = _runtime(about, token=token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    try:
        message, context, _, _ = pull_task_input(client)
        push_message(client, Message(reply_to(message, answer), reply_to=message), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    finally:
        heartbeat.stop()
        client.close()


def reply_to(message: Message, answer: Callable) -> RecordDict:
    """Our reply to a message of Flower's."""
    try:
        return record(*answer(*content(message.content)))
    except (PfedafmError, ValueError) as error:
        return record({"error": str(error)}, b"")


# ----------------------------------------------------------------------------------- what they share


@contextlib.contextmanager
def _started(which: str, flags: list[str], place: Path) -> Iterator[tuple[subprocess.Popen, bytes]]:
    """A process of Flower's, and the secret by which we may take its tasks."""
    place.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(32)
    with tempfile.NamedTemporaryFile() as file, (place / f"{which}.log").open("ab") as lines:
        file.write(secret)
        file.flush()
        script = str(Path(__file__).with_name("launch.py"))
        words = [sys.executable, "-P", script, which, str(os.getpid()), *flags]
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(place.absolute())}
        process = subprocess.Popen(
            [*words, "--superexec-auth-secret-file", file.name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            yield process, secret
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _runtime(about: tuple[Any, ...], secret: bytes = b"", token: str = "") -> RuntimeHttpClient:
    """A client of a superlink's or supernode's runtime, to take tasks or to do one."""
    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    own = RuntimeTokenHttpInterceptor(token) if token else None
    own = own or SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
    version = RuntimeVersionHttpInterceptor(component_name="pfedafm")
    return RuntimeHttpClient.from_server_address(*about, [version, own])  # pyright: ignore


def _task(
    runtime: RuntimeHttpClient, kind: Any, process: subprocess.Popen | None = None
) -> tuple[str, Any]:
    """Waits for a task of this kind, or for the end of the process: its token, or nothing."""
    while process is None or process.poll() is None:
        with contextlib.suppress(httpx.TransportError):  # it is still starting
            found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            if found.HasField("task") and found.token:
                return found.token, found.task
        time.sleep(POLL)
    return "", None


def _patiently(process: subprocess.Popen, place: Path, call: Callable[[], Any]) -> Any:
    """The result of a call to a superlink that may still be starting."""
    while True:
        try:
            return call()
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise PfedafmError(f"the server's own certificate is refused: {error}") from error
        if process.poll() is not None:
            last = last_words(place / "superlink.log")
            raise PfedafmError(f"Flower's superlink has ended: {last}")
        time.sleep(POLL)


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT` in two."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise PfedafmError(f"{text!r} is no address; accepted: HOST:PORT, such as 127.0.0.1:18000")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """A port of this machine that nobody uses at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def last_words(path: Path) -> str:
    """What a process of Flower's said of its end."""
    with contextlib.suppress(OSError):
        text = re.sub("\x1b\\[\\d+m", "", read_bytes(path)[-6000:].decode(errors="replace"))
        lines = text[max(text.rfind("ERROR"), 0) :].removeprefix("ERROR").strip(" :").splitlines()
        return "; ".join(line.strip() for line in lines[:3])
    return "it has ended"


# ------------------------------------------------------- for superlinks and supernodes of one's own

server_app, client_app = ServerApp(), ClientApp()
_nodes: dict[str, Any] = {}


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    from pfedafm_jax.commands.serve import serve

    serve(shlex.split(str(context.run_config["arguments"])), Link(grid))


@client_app.train()
@client_app.query()
def _node(message: Message, context: Context) -> Message:
    from pfedafm_jax.commands.node import node_of

    words = [
        word for name, value in context.node_config.items() for word in (f"--{name}", str(value))
    ]
    key = shlex.join(words)
    if key not in _nodes:
        _nodes[key] = node_of(words)
    return Message(reply_to(message, _nodes[key].answer), reply_to=message)
