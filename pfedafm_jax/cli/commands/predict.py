"""Classifies images with a trained client: `pfedafm predict RUN --client 3 --images FOLDER`."""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import check_writable, write_atomically
from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.data.dataset import noun_of
from pfedafm_jax.inference.client import TrainedClient, softmax
from pfedafm_jax.inference.export import is_client, load_client
from pfedafm_jax.inference.opened import load_run
from pfedafm_jax.results.tables import percent
from pfedafm_jax.runs.progress import clean, console

SHOWN = 10  # images shown in the terminal, without --out


def add_client(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a client."""
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run, an exported client, or a node's state")
    add("--client", type=int, metavar="K", help="its number, 0 to N - 1")
    add("--plugin", action="append", default=[], metavar="FILE.py", help="as the run had it")


def chosen(asked: argparse.Namespace) -> TrainedClient:
    """The client that these options select."""
    for file in asked.plugin:
        load_plugin(file)
    if is_client(asked.run):
        if asked.client is not None:
            raise bad("client", asked.client, f"nothing: {asked.run} is one client's own folder")
        return load_client(asked.run)
    run = load_run(asked.run, console.print)
    if asked.client is None:
        raise PfedafmError(f"choose a client: --client K, 0 to {run.num_clients - 1}")
    return run.client(asked.client)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("pfedafm predict", description=__doc__, allow_abbrev=False)
    add_client(parser)
    add = parser.add_argument
    add("--images", required=True, metavar="PATH", help=".npy, .npz, an image, or a folder of them")
    add("--out", type=Path, metavar="FILE", help="y.npz or y.csv; otherwise a few are shown")
    asked = parser.parse_args(argv)
    if asked.out is not None:
        if asked.out.suffix not in (".npz", ".csv") or asked.out.is_dir():
            raise bad("out", str(asked.out), "a file whose name ends in .npz or .csv")
        check_writable(asked.out.parent, "out")
    client = chosen(asked)
    start = time.perf_counter()
    pixels, names = client.pictures(asked.images)
    logits = client.predict(pixels)
    own = next(iter(logits))
    probabilities = softmax(logits)
    best = logits[own].argmax(axis=1)
    classes = np.array(client.classes)
    noun = noun_of(client.architecture.image_shape, client.architecture.dtype)
    console.print(f"{len(names)} {noun}, {time.perf_counter() - start:.1f} s")
    if asked.out is None:
        table = Table(noun[:-1], "class", "probability", box=None, pad_edge=False)
        for name, place, row in list(zip(names, best, probabilities[own], strict=True))[:SHOWN]:
            table.add_row(clean(name), clean(classes[place]), f"{percent(row[place])} %")
        console.print(table)
        if len(names) > SHOWN:
            console.print(f"and {len(names) - SHOWN} more; --out y.csv has all of them")
    elif asked.out.suffix == ".csv":
        write_atomically(asked.out, _csv(names, classes, best, probabilities[own], logits[own]))
    else:
        arrays = {"images": np.array(names), "classes": classes, "predicted": best}
        for name, scores in logits.items():
            arrays |= {f"logits/{name}": scores, f"probabilities/{name}": probabilities[name]}
        write_atomically(asked.out, lambda file: np.savez(file, **arrays))
    if asked.out is not None:
        console.print(f"  {clean(str(asked.out))}")
    return 0


def _csv(names, classes, best, probabilities, logits) -> str:
    """One line per image: its name, its class, then every class's probability and score."""
    own = {"image": names, "class": classes[best], "probability": probabilities.max(axis=1)}
    columns = [f"{kind} {name}" for kind in ("probability", "logit") for name in classes]
    numbers = pd.DataFrame(np.concatenate([probabilities, logits], axis=1), columns=columns)
    table = pd.concat([pd.DataFrame(own), numbers], axis=1)
    return table.to_csv(index=False, float_format="%.7g", lineterminator="\r\n")
