"""Rates and knobs that were tried on held-out data, as tables: all methods side by side.

    python experiments/choices.py runs/evidence/rates/*/*/* --file experiments/results/choices.json

adds the finished runs of sweeps to the file (none: nothing is added) and prints its two tables. An
entry is a method, its learning rate, its knob (the setting of `KNOBS`) and the accuracy of all
clients on held-out data after the last round.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfedafm_jax import Config, PfedafmError
from pfedafm_jax.base.errors import naming
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.config.config import updated
from pfedafm_jax.methods import find_method
from pfedafm_jax.results.run import Run, flat, read_runs
from pfedafm_jax.results.tables import markdown, percent

KNOBS = {
    "pfedafm": "pfedafm.mix_learning_rate",
    "fedrep": "fedrep.head_epochs",
    "fedper": "weight_decay",
    "fml": "fml.alpha",
    "fedproto": "fedproto.lambda_mse",
    "fd": "fd.gamma",
    "fedapen": "fedapen.lambda_start",
    "lg_fedavg": "weight_decay",
    "standalone": "weight_decay",
    "fedkd": "fedkd.t_start",
}  # results/PROTOCOL.md has the values
Entry = dict[str, Any]  # method, rate, knob (a value), accuracy, commit


def usual(method: str) -> tuple[float, Any, Any]:
    """The rate and the knob that a method's runs have, and the knob's default."""
    config = updated(Config.load("hetero_cifar10"), {"method": method})
    own, default = flat(config.as_dict()), flat(Config(method=method).as_dict())
    return config.rate, own[KNOBS[method]], default[KNOBS[method]]


def entry(run: Run) -> Entry:
    method = run.config["method"]
    if method not in KNOBS or not run.settings["validation_fraction"]:
        raise PfedafmError(f"{run.name} is no run of a sweep over {', '.join(KNOBS)}")
    commit = run.about["versions"].get("pfedafm_jax", "").partition("(")[2][:7]
    accuracy = run.summary.final_all_clients_accuracy
    found = {"method": method, "rate": run.rate, "knob": run.settings[KNOBS[method]]}
    return found | {"accuracy": accuracy, "commit": commit}


def by_value(entries: Sequence[Entry], method: str, axis: str) -> dict[float, str]:
    """A method's accuracies by `rate`, its knob at the default, or by `knob`, at the rate used; the
    best is bold."""
    rate, _, default = usual(method)
    fixed, value = ("knob", default) if axis == "rate" else ("rate", rate)
    own = {
        one[axis]: one["accuracy"] or 0.0
        for one in sorted(entries, key=lambda one: one[axis])
        if one["method"] == method and one[fixed] == value
    }
    best = max(own.values(), default=0.0)
    return {at: f"**{percent(x)}**" if x == best else percent(x) for at, x in own.items()}


def rates(entries: Sequence[Entry]) -> str:
    """Accuracy by learning rate, knobs at their defaults, with the rate that is used."""
    values = sorted({one["rate"] for one in entries})
    rows = []
    for method in KNOBS:
        found = by_value(entries, method, "rate")
        cells = [found.get(value, "") for value in values]
        rows.append([find_method(method).title, *cells, f"{usual(method)[0]:g}"])
    return markdown(["method", *(f"{value:g}" for value in values), "used"], rows)


def knobs(entries: Sequence[Entry]) -> str:
    """Accuracy by the method's own setting, at the rate that is used."""
    rows = []
    for method, setting in KNOBS.items():
        cells = [f"{at:g}: {x}" for at, x in by_value(entries, method, "knob").items()]
        if len(cells) > 1:
            cells += [""] * (3 - len(cells))
            rows.append([find_method(method).title, setting, *cells, f"{usual(method)[1]:g}"])
    return markdown(["method", "setting", "", "", "", "used"], rows) if rows else ""


def main(argv: list[str]) -> int:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser("experiments/choices.py", description=about)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders of a sweep's runs")
    parser.add_argument("--file", type=Path, required=True, help="JSON file to read and add to")
    asked = parser.parse_args(argv)
    runs = [run for run in read_runs(asked.runs) if run.finished] if asked.runs else []
    known = {}
    with naming(f"{str(asked.file)!r} is no file that this command wrote"):
        found: list[Entry] = json.loads(asked.file.read_text()) if asked.file.exists() else []
        for one in [*found, *map(entry, runs)]:
            known[list(KNOBS).index(one["method"]), one["rate"], one["knob"]] = one
    entries = [known[key] for key in sorted(known)]
    if runs:
        lines = ",\n ".join(json.dumps(one) for one in entries)
        write_atomically(asked.file, f"[{lines}]\n")
    for text in filter(None, (rates(entries), knobs(entries))):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    guarded(main)
