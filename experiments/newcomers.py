"""Newcomers: clients held out of training (`--held-out-clients`) join finished runs.

    python experiments/newcomers.py runs/newcomers/* --visits 10

Every held-out client of a run's split joins it with its own training images, in the architecture
that its number would have given it, and is evaluated on its own test images after every visit. A
run of Standalone shares nothing: its newcomers train alone, on the same images. Differences are
paired by newcomer, and their ± is a standard error with the newcomer as the unit.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from full_length import write
from matplotlib.figure import Figure
from paper.by_client import with_error
from paper.by_seed import OURS

from pfedafm_jax import PfedafmError, TrainedRun, load_data, load_run
from pfedafm_jax.base.errors import bad
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli import options
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.data.load import held_out
from pfedafm_jax.methods import find_method
from pfedafm_jax.results import style
from pfedafm_jax.results.tables import markdown, mean_and_deviation, percent


def joined(run: TrainedRun, visits: int, data_dir: str | None) -> np.ndarray:
    """Accuracies of the newcomers with the method's own prediction, `[newcomers, visits + 1]`."""
    config = run.config
    dataset = load_data(config, data_dir)
    images = dataset.images
    if dataset.dtype == "float32":  # features are loaded standardised, and `join` does it again
        images = (images * np.array(dataset.std) + dataset.mean).astype(np.float32)
    shares, rows = held_out(config, dataset), []
    if dataset.digest != run.run.about["data"]["digest"]:
        raise PfedafmError(f"{run.folder} was trained on other data than {dataset.source}")
    for number, (train, test) in enumerate(zip(shares.train, shares.test, strict=True)):
        place = (config.num_clients + number) % len(config.architectures)
        client = run.join(
            images[train],
            dataset.labels[train],
            None if type(run.method).one_network else config.architectures[place],
            visits,
            test_images=images[test],
            test_labels=dataset.labels[test],
            seed=number,
        )
        own = client.predictions[0]
        rows.append([accuracies[own] for accuracies in client.history])
        console.print(f"{type(run.method).title}, newcomer {number}: {100 * rows[-1][-1]:.1f} %")
    return np.array(rows)


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Accuracies after some visits, and differences to training alone and to pFedAFM."""
    scores = {name: np.array(one["accuracies"]) for name, one in found.items()}
    visits = min(rows.shape[1] for rows in scores.values()) - 1
    shown = sorted({0, 1, 2, 5, visits} & set(range(visits + 1)))
    heads = [f"{number} visit{'s' * (number != 1)}" for number in shown]
    rows = []
    for name, one in found.items():
        cells = [percent(*mean_and_deviation(scores[name][:, v].tolist())) for v in shown]
        rows.append([one["title"], *cells, percent(one["clients"])])
    parts = {"Newcomers, %": markdown(["method", *heads, "clients of the run"], rows)}
    titles = {name: find_method(name).title for name in found}
    pairs = [(name, "standalone") for name in found] + [(OURS, name) for name in found]
    pairs = [(a, b) for a, b in dict.fromkeys(pairs) if a != b and a in found and b in found]
    rows = []
    for a, b in pairs:
        gains = 100 * (scores[a] - scores[b])[:, shown]
        rows.append([f"{titles[a]} − {titles[b]}", *map(with_error, gains.T)])
    parts["Differences, points"] = markdown(["points", *heads], rows) if rows else ""
    return parts


def picture(found: Mapping[str, Any]) -> Figure:
    """Mean over the newcomers after each visit."""
    figure, axes = style.plain_figure()
    for name, one in found.items():
        rows = 100 * np.array(one["accuracies"])
        colour = style.method_colour(name)
        axes.plot(rows.mean(axis=0), "o-", color=colour, markersize=3, label=one["title"])
    axes.set(xlabel="visits of the newcomer", ylabel="newcomers' test accuracy, %", ylim=(0, 100))
    style.whole_numbers(axes.xaxis)
    style.legend_below(figure)
    return figure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "experiments/newcomers.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folders of runs with --held-out-clients")
    add("--visits", type=int, default=10, metavar="V", help="of each newcomer (default: 10)")
    add("--data-dir", metavar="DIR", help="folder or archive with the dataset")
    add("--out", type=Path, default=Path("newcomers"), metavar="NAME", help="NAME.md, .png, .json")
    asked = parser.parse_args(argv)
    numbers, *_ = options.outputs(asked.out, ".json", ".md", ".png")
    found, runs = {}, [load_run(folder, console.print) for folder in asked.runs]
    for run in runs:
        if not run.config.held_out_clients:
            raise bad("held_out_clients", 0, f"runs that kept clients out; {run.folder} did not")
        if sum(one.config.method == run.config.method for one in runs) > 1:
            raise PfedafmError(f"two runs are of {run.config.method}; give one of each method")
    for run in runs:
        rows = joined(run, asked.visits, asked.data_dir)
        alone = not jax.tree.leaves(run.server)
        title = f"{type(run.method).title} ({'alone' if alone else f'{run.round} rounds'})"
        about = {"title": title, "command": run.run.about["command"]}
        about["clients"] = None if alone else run.run.summary.final_all_clients_accuracy
        found[run.config.method] = about | {"accuracies": rows.round(6).tolist()}
    write_atomically(numbers, json.dumps(found, indent=1) + "\n")
    write(tables(found), picture(found), asked.out)
    return 0


if __name__ == "__main__":
    guarded(main)
