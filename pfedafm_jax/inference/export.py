"""Exports a client's model to a folder that can be used without this package.

card.json              where it comes from: method, settings, data, classes, accuracies
weights.safetensors    client.… is what the client keeps, server.… what the server sent it
network.jax            the model as one program, for CPU and CUDA (`jax.export`)
network.onnx           the same for ONNX, if asked for
README.md              how to use them
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.client_files import ClientFile, client_bytes, read_client
from pfedafm_jax.base.errors import PfedafmError, bad, naming
from pfedafm_jax.base.files import check_writable, digest, read_bytes, write_atomically
from pfedafm_jax.base.trees import by_path, fitted
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.inference.client import CARD_FORMAT, TrainedClient, model_of
from pfedafm_jax.inference.states import States
from pfedafm_jax.models import kernels
from pfedafm_jax.results.tables import percent

CARD, WEIGHTS, PROGRAM, ONNX = "card.json", "weights.safetensors", "network.jax", "network.onnx"
PLATFORMS = ("cpu", "cuda")


def check_target(folder: str | Path) -> None:
    """Raises unless `export_client` can write to this folder."""
    place = Path(folder)
    check_writable(place, "out")
    names = {path.name for path in place.iterdir()} if place.is_dir() else set()
    # An interrupted export has no card yet.
    others = sorted(names - {WEIGHTS, PROGRAM, ONNX, "README.md"} - {CARD})
    others = [name for name in others if not (name[0] == "." and name.endswith(".tmp"))]
    if others and CARD not in names:
        accepted = f"a new or empty folder, or an earlier export; it holds {others[0]}"
        raise bad("out", str(place), accepted)


def export_client(client: TrainedClient, folder: str | Path, onnx: bool = False) -> list[Path]:
    """Writes a client's model.

    Args:
        folder: new, empty, or one that this function wrote before.
        onnx: also write `network.onnx` (needs the extra `onnx`), checked with onnxruntime.

    Returns:
        The files.
    """
    check_target(folder)
    place = Path(folder)
    if onnx and not (find_spec("jax2onnx") and find_spec("onnxruntime")):
        raise PfedafmError("onnx needs two more packages: pip install -e '.[onnx]' in a checkout")
    leaves = by_path({"client": client.params, "server": client.server})
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    card = client.card
    state = ClientFile(arrays, card.get("federation", ""), card["client"], card["round"], card)
    files: dict[str, bytes | bytearray] = {WEIGHTS: client_bytes(state), PROGRAM: program(client)}
    if onnx:
        files[ONNX] = _onnx(client)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    card = card | {"files": sums}
    card["sha256"] = digest(card)
    text = {"README.md": readme(client, files), CARD: json.dumps(card, indent=2) + "\n"}
    place.mkdir(parents=True, exist_ok=True)
    for name in (CARD, ONNX):  # the card is written last: it marks the folder as complete
        (place / name).unlink(missing_ok=True)
    for name, content in (files | text).items():
        write_atomically(place / name, content)
    return [place / name for name in (*files, *text)]


def is_client(folder: str | Path) -> bool:
    """Whether this is a folder for `load_client`."""
    return (Path(folder) / CARD).exists() or bool(States(folder).rounds())


def load_client(folder: str | Path) -> TrainedClient:
    """A client from the folder that `export_client` wrote, or in which a node of a federation keeps
    its state; each file is checked."""
    place, states = Path(folder), States(folder)
    if rounds := states.rounds():
        return client_of(*states.read(rounds[-1]))
    with naming(f"{str(place / CARD)!r} is no card of an exported client"):
        card: dict[str, Any] = json.loads(read_bytes(place / CARD))
        if card["format"] != CARD_FORMAT:
            raise PfedafmError(
                f"{place} has format {card['format']} and {CARD_FORMAT} is read here; export it again"
            )
        if card.pop("sha256") != digest(card):
            raise ValueError("it has changed since it was written")
        del card["files"]
        state = read_client(place / WEIGHTS)
        if state.card != card:
            raise PfedafmError(f"{str(place / WEIGHTS)!r} is not that of {CARD}; export it again")
    return client_of(card, state.arrays)


def client_of(card: dict[str, Any], weights: dict[str, np.ndarray]) -> TrainedClient:
    """A client from its card, and its weights by name: `client.…` and `server.…`."""
    model = model_of(card)
    both = fitted(model.shapes, weights)
    kernels.choose("xla" if model.config.kernels == "xla" else "auto")
    return TrainedClient(model.method, model.network, both["client"], both["server"], card)


def program(client: TrainedClient) -> bytes:
    """The model as a serialised program: uint8 `[any, height, width, channels]`, or what else it was
    trained on, → logits by name, weights included."""
    with kernels.using("xla"), matmul_precision("highest"):
        (count,) = jax.export.symbolic_shape("num")
        images = client.architecture.stored(count)
        made = jax.export.export(jax.jit(client.scores), platforms=PLATFORMS)(images)
        return bytes(made.serialize())


def _onnx(client: TrainedClient) -> bytes:
    """The model as ONNX; raises if onnxruntime computes something else."""
    runtime, to_onnx = import_module("onnxruntime"), import_module("jax2onnx").to_onnx
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    (count,) = jax.export.symbolic_shape("num")
    network, names = client.architecture, client.predictions
    with kernels.using("xla"):
        model: Any = to_onnx(
            lambda images: tuple(client.scores(images)[name] for name in names),
            [network.stored(count)],
            model_name=client.card["method"],
            input_names=["images"],
            output_names=names,
        )
    content = model.SerializeToString()
    most = 256 if network.dtype == "uint8" else 2  # token ids that every network knows
    drawn = np.random.default_rng(0).integers(0, most, (3, *network.image_shape))
    images = drawn.astype(network.dtype)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = zip(names, session.run(names, {"images": images}), strict=True)
    expected = client.predict(images)
    for name, logits in found:
        if not np.allclose(logits, expected[name], rtol=1e-3, atol=1e-4):
            raise PfedafmError(
                f"ONNX gives other scores for {name} than the client does; export without --onnx, or "
                "try another version of jax2onnx"
            )
    return content


def readme(client: TrainedClient, files: Iterable[str]) -> str:
    """The card as a README."""
    card, network = client.card, client.architecture
    data, run, names = card["data"], card["run"], client.predictions
    who = f"Client {card['client']}" if card["client"] is not None else "A newcomer"
    settings = updated(Config(), card["config"]).toml().strip()
    shape = ", ".join(map(str, network.image_shape))
    mean, std = ([float(f"{value:.4g}") for value in data[name]] for name in ("mean", "std"))
    what = f"{network.dtype} [num, {shape}]"
    if mean:
        scale = " of values from 0 to 1" if network.dtype == "uint8" else ""
        what += f"; normalised inside the program: mean {mean}, deviation {std}{scale}"
    state = "" if card["finished"] else ", an unfinished run"
    lines = [
        f"# {who} of {card['title']}, {client.architecture.name}",
        "",
        f"Trained on {data['source']}, {card['round']} rounds{state}.",
        "",
        f"- images: {what}",
        f"- classes: {', '.join(client.classes)}",
        f"- scores: {', '.join(names)}; the first is the method's own",
        *_accuracies(card, run),
        f"- made with: {', '.join(f'{n} {v}' for n, v in card['versions'].items())}",
        "",
        "Settings that differ from the defaults:",
        "```toml",
        settings,
        "```",
        "",
        "With JAX alone (`pip install jax flatbuffers`):",
        "```python",
        "import jax, numpy",
        f'program = jax.export.deserialize(open("{PROGRAM}", "rb").read())',
        f"images = numpy.zeros((1, {shape}), numpy.{network.dtype})",
        f'logits = program.call(images)["{names[0]}"]',
        "```",
        "With pfedafm-jax: `pfedafm predict THIS_FOLDER --images FOLDER --out y.csv`, or",
        "`pfedafm_jax.load_client(folder).predict(images)`.",
    ]
    if ONNX in files:
        lines.append(f"With ONNX: `{ONNX}`, input `images`, outputs {', '.join(names)}.")
    return "\n".join(lines) + "\n"


def _accuracies(card: dict[str, Any], run: dict[str, Any]) -> list[str]:
    found = ", ".join(f"{name} {percent(value)} %" for name, value in card["accuracy"].items())
    if "newcomer" in card:
        joined = card["newcomer"]
        start = f"- accuracy on its own test images after {joined['visits']} visits"
        return [f"{start} with {joined['num_train']} training images: {found}"]
    if not found:
        return ["- accuracy: not evaluated after this round"]
    own = f"- accuracy on this client's own test images after the last round: {found}"
    if "best_mean_accuracy" not in run:  # of a node, which knows nothing of the others
        return [own]
    return [
        own,
        f"- of the whole run: mean over a round's participants, best round "
        f"{percent(run['best_mean_accuracy'])} %, last ten rounds "
        f"{percent(run['last_ten_mean_accuracy'])} %; all clients at the end "
        f"{percent(run['final_all_clients_accuracy'])} %",
    ]
