"""Flower under server and nodes: its processes, its messages. The only file that imports it.

A superlink and a supernode run with `--isolation process`: what they would start for every message,
our own processes do, which stay alive. So nothing that travels is ever executed, neither on the
server nor on a node, and a round starts no process. `cli/flower_apps.py` has the same for people
who have superlinks and supernodes of their own.
"""

# pyright: reportMissingImports=false

import contextlib
import hashlib
import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from pfedafm_jax.base.errors import PfedafmError, naming
from pfedafm_jax.base.files import read_bytes
from pfedafm_jax.deploy.launch import POLL, free_port, last_words, retry_soon, started
from pfedafm_jax.deploy.wire import Head

logging.getLogger("flwr").setLevel(logging.WARNING)
retry_soon()
PIECE = 5 * 2**20  # Flower sends arrays in pieces of this size
APP = b"""[project]
name = "pfedafm"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "pfedafm"
[tool.flwr.app.components]
serverapp = "pfedafm_jax.cli.flower_apps:server_app"
clientapp = "pfedafm_jax.cli.flower_apps:client_app"
[tool.flwr.app.config]
arguments = ""
"""


def record(head: Head, body: bytes) -> RecordDict:
    """A message of ours as one of Flower's, in few pieces: each takes three requests."""
    small = body if len(body) <= PIECE else b""
    found = RecordDict({"head": ConfigRecord({"json": json.dumps(head), "body": small})})
    if body and not small:  # only arrays are cut into pieces
        found["body"] = ArrayRecord({"bytes": Array("uint8", (len(body),), "bytes", body)})
    return found


def content(record: RecordDict) -> tuple[Head, bytes]:
    """What `record` was made of; `ValueError` for anything else."""
    try:
        config: Any = record.config_records["head"]
        head, bodies = json.loads(str(config["json"])), list(record.array_records.values())
        body = bodies[0]["bytes"].data if bodies else config["body"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no message of ours: {error}") from error
    if not isinstance(head, dict) or not isinstance(body, bytes):
        raise ValueError("no message of ours")
    return head, body


# -------------------------------------------------------------------------------------- the server


class Link:
    """Questions to nodes and their replies.

    Attributes:
        owners: whose node each is, by the key it was registered with; None: nodes have no keys, and
            are whom they say they are.
        largest: bytes of a reply; a larger one is not even fetched.
    """

    def __init__(self, grid: Any, owners: dict[int, int] | None = None):
        self.owners, self.largest, self._grid = owners, 0, grid
        setattr(http_grid, "pull_objects", self._pulled)  # noqa: B010

    def nodes(self) -> dict[int, str]:
        """Nodes that are there, each with the time at which it came."""
        with _answering():
            if not isinstance(self._grid, http_grid.HttpGrid):
                return dict.fromkeys(self._grid.get_node_ids(), "")
            return {one.node_id: one.last_activated_at for one in self._grid.get_nodes()}

    def ask(self, node: int, head: Head, body: bytes, seconds: float) -> str:
        """Sends a question, which nobody has to answer after so many seconds; its number."""
        kind = "query" if head["kind"] == "hello" else "train"
        message = Message(record(head, body), node, kind, ttl=seconds)
        with _answering():
            (number,) = self._grid.push_messages([message])
        return number or ""  # it has gone: nothing will come

    def replies(self, questions: Sequence[str]) -> list[tuple[str, Head, bytes]]:
        """(question, head, body) of replies that have come. A head with `lost` is Flower's: it says
        why there will be none."""
        questions = [question for question in questions if question]
        with _answering():
            messages = list(self._grid.pull_messages(questions)) if questions else []
        return [(message.metadata.reply_to_message_id, *_reply(message)) for message in messages]

    def _pulled(self, object_ids: list[str], **options: Any) -> dict[str, bytes]:
        """Flower's `pull_objects`, not of messages in more pieces than any that is expected."""
        if len(object_ids) > 16 + self.largest // PIECE:
            why = f"it has {len(object_ids)} pieces, more than any that is expected"
            raise ObjectPullError(object_ids[0], why)
        return pull_objects(object_ids, **options)


def _reply(message: Message) -> tuple[Head, bytes]:
    if message.has_error():
        return {"lost": f"Flower says: {message.error.reason}"}, b""
    try:
        return content(message.content)
    except ValueError as error:
        return {"error": str(error)}, b""


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, RuntimeError) as error:
        words = "Flower's superlink does not answer; the same command goes on"
        raise PfedafmError(f"{words} ({type(error).__name__}: {str(error)[:200]})") from error


@contextlib.contextmanager
def superlink(
    host: str, port: int, certs: Path | None, place: Path, num_clients: int
) -> Iterator[Link]:
    """A superlink for as long as this lasts, with a run whose `ServerApp` we are.

    Args:
        host, port: where it listens.
        certs: as `certs.py` writes them: TLS, and nodes with keys. None: neither.
        place: a folder for Flower's files and the superlink's log.
        num_clients: keys of these clients are registered.
    """
    flags = ["--host", host, "--port", str(port), "--isolation", "process"]
    flags += ["--disable-runtime-dependency-installation"]
    near = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    about: tuple[Any, ...] = f"{near}:{port}", certs is None, certs and read_bytes(certs / "ca.crt")
    if certs is None:
        flags.append("--insecure")
    else:
        flags += ["--ssl-ca-certfile", f"{certs}/ca.crt", "--ssl-certfile", f"{certs}/server.crt"]
        flags += ["--ssl-keyfile", f"{certs}/server.key", "--enable-supernode-auth"]
    with started("superlink", flags, place) as (process, secret):

        def until(call: Callable[[], Any]) -> Any:
            if (found := _until(process, call)) is None:
                words = last_words(place / "superlink.log")
                raise PfedafmError(f"Flower's superlink has ended: {words}")
            return found

        version = RuntimeVersionHttpInterceptor(component_name="pfedafm")
        with ControlHttpClient.from_server_address(*about, [version]) as control:  # pyright: ignore
            fab = build_fab_from_files({"pyproject.toml": APP})[0]
            run = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {})))
            until(lambda: control.StartRun(run))
            owners: dict[int, int] = {}
            for client in range(num_clients) if certs else ():
                key = public_key(Path(certs or "") / "nodes" / f"client-{client}.pub")
                node = control.RegisterNode(RegisterNodeRequest(public_key=key)).node_id
                owners[node] = client
        runtime = _runtime(about, secret)
        token = until(lambda: _task(runtime, TaskType.SERVER_APP))
        grid = http_grid.HttpGrid(*about, token=token)  # pyright: ignore
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

    with naming(f"{path} is no public key of a node, as pfedafm certs makes them"):
        return public_key_to_bytes(load_ssh_public_key(read_bytes(path)))  # pyright: ignore


# ---------------------------------------------------------------------------------------- the node


def answer_forever(
    server: str,
    authority: Path | None,
    key: Path | None,
    place: Path,
    node: Any,
    log: Callable[[str], Any],
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
        with started("supernode", [*flags, "--port", str(port)], place) as (process, secret):
            about: tuple[Any, ...] = (f"127.0.0.1:{port}", True, None)
            runtime = _runtime(about, secret)
            while process.poll() is None and node.left is None:
                try:
                    if token := _until(process, lambda: _task(runtime, TaskType.CLIENT_APP)):  # noqa: B023
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
        push_message(client, reply_to(message, answer), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    finally:
        heartbeat.stop()
        client.close()


def reply_to(message: Message, answer: Callable) -> Message:
    """Our reply to a message of Flower's."""
    try:
        found = record(*answer(*content(message.content)))
    except (PfedafmError, ValueError) as error:
        found = record({"error": str(error)}, b"")
    return Message(found, reply_to=message)


# ----------------------------------------------------------------------------------- what they share


def _runtime(about: tuple[Any, ...], secret: bytes = b"", token: str = "") -> RuntimeHttpClient:
    """A client of a superlink's or supernode's runtime, to take tasks or to do one."""
    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    own = RuntimeTokenHttpInterceptor(token) if token else None
    own = own or SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
    version = RuntimeVersionHttpInterceptor(component_name="pfedafm")
    return RuntimeHttpClient.from_server_address(*about, [version, own])  # pyright: ignore


def _task(runtime: RuntimeHttpClient, kind: Any) -> str:
    """The token of a task of this kind; empty: there is none."""
    return runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token


def _until(process: subprocess.Popen, call: Callable[[], Any]) -> Any:
    """Calls a process, which may still be starting, until it has a result; None: it has ended."""
    while process.poll() is None:
        try:
            if found := call():
                return found
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise PfedafmError(f"the server's own certificate is refused: {error}") from error
        except httpx.HTTPStatusError as error:
            raise PfedafmError(f"what answers there is no superlink of ours: {error}") from error
        time.sleep(POLL)
    return None
