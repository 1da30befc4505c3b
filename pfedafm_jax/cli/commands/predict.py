"""Classifies images with a trained client: `pfedafm predict RUN --client 3 --images FOLDER`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.terminal import clean, console
from pfedafm_jax.cli.options import CommandOptions, read_options
from pfedafm_jax.cli.plugins import load_plugin

if TYPE_CHECKING:
    import numpy as np

    from pfedafm_jax.inference.client import TrainedClient

SHOWN = 10  # images shown in the terminal, without --out


class ClientOptions(CommandOptions):
    """What selects a trained client."""

    placeholders: ClassVar[dict[str, str]] = {"run": "RUN", "client": "K", "plugin": "FILE.py"}
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: str
    """The folder of a run, an exported client, or a node's state."""
    client: Annotated[int, Ge(0)] | None = None
    """Its number, 0 to N - 1."""
    plugin: tuple[str, ...] = ()
    """As the run had it."""


class PredictOptions(ClientOptions):
    """What `pfedafm predict` takes."""

    placeholders: ClassVar[dict[str, str]] = {
        **ClientOptions.placeholders,
        "images": "PATH",
        "out": "FILE",
    }

    images: str
    """.npy, .npz, an image, or a folder of them."""
    out: str | None = None
    """y.npz or y.csv; otherwise a few are shown."""


def find_client(asked: ClientOptions) -> "TrainedClient":
    """The client that these options select."""
    from pfedafm_jax.inference.export import is_client, load_client
    from pfedafm_jax.inference.opened import load_run

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


def main(words: list[str]) -> int:
    """Classifies the images that these words name, and writes or shows what they are."""
    asked = read_options(words, "predict", __doc__ or "", PredictOptions)

    import numpy as np

    from pfedafm_jax.base.files import check_writable, write_atomically
    from pfedafm_jax.data.dataset import noun_of
    from pfedafm_jax.inference.client import softmax

    out = None if asked.out is None else Path(asked.out)
    if out is not None:
        if out.suffix not in (".npz", ".csv") or out.is_dir():
            raise bad("out", asked.out, "a file whose name ends in .npz or .csv")
        check_writable(out.parent, "out")
    client = find_client(asked)
    start = time.perf_counter()
    pixels, names = client.pictures(asked.images)
    logits = client.predict(pixels)
    main_prediction = next(iter(logits))
    probabilities = softmax(logits)
    best = logits[main_prediction].argmax(axis=1)
    classes = np.array(client.classes)
    noun = noun_of(client.architecture.image_shape, client.architecture.dtype)
    console.print(f"{len(names)} {noun}, {time.perf_counter() - start:.1f} s")
    if out is None:
        show(names, classes, best, probabilities[main_prediction], noun)
        return 0
    if out.suffix == ".csv":
        scores = probabilities[main_prediction], logits[main_prediction]
        write_atomically(out, as_csv(names, classes, best, *scores))
    else:
        arrays = {"images": np.array(names), "classes": classes, "predicted": best}
        for name, values in logits.items():
            arrays |= {f"logits/{name}": values, f"probabilities/{name}": probabilities[name]}
        write_atomically(out, lambda file: np.savez(file, **arrays))
    console.print(f"  {clean(str(out))}")
    return 0


def show(
    names: Sequence[str],
    classes: "np.ndarray",
    best: "np.ndarray",
    probabilities: "np.ndarray",
    noun: str,
) -> None:
    """Prints the classes of the first images.

    Args:
        names: of the images.
        classes: names of the classes, `[classes]`.
        best: each image's class, `[images]`.
        probabilities: `[images, classes]`.
        noun: what samples are called, `images`.
    """
    from rich.table import Table

    from pfedafm_jax.results.tables import percent

    table = Table(noun[:-1], "class", "probability", box=None, pad_edge=False)
    rows = list(zip(names, best, probabilities, strict=True))
    for name, number, row in rows[:SHOWN]:
        table.add_row(clean(name), clean(classes[number]), f"{percent(row[number])} %")
    console.print(table)
    if len(names) > SHOWN:
        console.print(f"and {len(names) - SHOWN} more; --out y.csv has all of them")


def as_csv(names, classes, best, probabilities, logits) -> str:
    """One line per image: its name, its class, then every class's probability and score."""
    import numpy as np
    import pandas as pd

    first = {"image": names, "class": classes[best], "probability": probabilities.max(axis=1)}
    columns = [f"{kind} {name}" for kind in ("probability", "logit") for name in classes]
    numbers = pd.DataFrame(np.concatenate([probabilities, logits], axis=1), columns=columns)
    table = pd.concat([pd.DataFrame(first), numbers], axis=1)
    return table.to_csv(index=False, float_format="%.7g", lineterminator="\r\n")
