"""Runs told apart by their settings: a label for each, and groups of those that agree."""

import json
from collections.abc import Sequence

from pfedafm_jax.base.errors import bad, suggestion
from pfedafm_jax.results.run import Run, comparable, differing, matters


def labels(runs: Sequence[Run]) -> list[str]:
    """For each run the settings in which it differs from the others, its name if there are none;
    its length, name, folder or number where others have the same settings."""
    names = differing(runs)
    found = [_label(run, names) or run.name for run in runs]
    more = [(f"{len(run.records)} rounds", run.name, run.folder) for run in runs]
    for words in [*zip(*more, strict=True), range(1, len(runs) + 1)]:
        for label in {one for one in found if found.count(one) > 1}:
            alike = [number for number, one in enumerate(found) if one == label]
            if len({words[number] for number in alike}) > 1:
                for number in alike:
                    found[number] = f"{label} ({words[number]})"
    return found


def _label(run: Run, names: Sequence[str]) -> str:
    """These settings of a run in words: `pFedAFM, gamma 0.1, seed 1`."""
    found = []
    for name in (name for name in names if matters(run, name)):
        value, words = run.settings[name], name.rpartition(".")[2].replace("_", " ")
        if name == "method":
            words = run.title
        elif isinstance(value, bool | None):
            words = words if value else f"no {words}"
        elif isinstance(value, list):
            words = "+".join(map(str, value))
        else:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            words = str(value) if name in ("dataset", "partition") else f"{words} {value}"
        found.append(words)
    return ", ".join(found)


def grouped(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    """Runs grouped by these settings: label → runs."""
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    for name in names:
        if name not in settings:
            near = suggestion(name, settings)
            raise bad("group", name, f"names of settings with commas between them{near}")
    alike: dict[str, list[Run]] = {}
    for run in runs:
        values = {name: comparable(run.settings[name]) for name in names if matters(run, name)}
        alike.setdefault(json.dumps(values), []).append(run)
    found: dict[str, list[Run]] = {}
    for own in alike.values():
        label = _label(own[0], names) or f"without {', '.join(names)}"
        taken = label in found  # by a method with the same title
        found[f"{label} ({own[0].config['method']})" if taken else label] = own
    return found
