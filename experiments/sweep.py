"""Settings chosen by validation data: `python experiments/sweep.py --method fedproto --grid fedproto.lambda_mse=0.1,1,10`.

Without --grid it is the paper's own grid. The choice is by the accuracy of all clients after the last round on a part of
their training data; test data are not touched. best.toml is the result: run.py --config …/best.toml
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from pfedafm_jax import cli, plots
from pfedafm_jax.config import Config, bad
from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import find_method
from pfedafm_jax.progress import console
from pfedafm_jax.records import RunFolder, read_rounds
from pfedafm_jax.reproduce import grid
from pfedafm_jax.reproduce.execute import carry_out
from pfedafm_jax.reproduce.plan import Run, estimator, in_words, look

HELD_OUT = 0.1  # of each client's training data, where the settings say nothing


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", action="append", default=[], metavar="SETTING=A,B,…",
                        help="values of a setting; may be given several times (default: the paper's grid)")  # fmt: skip
    parser.add_argument("--seeds", default="", metavar="0,1,…", help="several seeds: the choice is by their mean")
    parser.add_argument("--halving", action="store_true",
                        help="a quarter of the rounds for all, half for the better half, all for the best quarter")  # fmt: skip
    parser.add_argument(
        "--drop-checkpoints", action="store_true", help="remove a run's checkpoints when it is finished"
    )


def accuracy_after(folder: Path, rounds: int, final: float | None) -> float | None:
    """Accuracy of all clients after so many rounds; at the end, where a longer run has not evaluated them then."""
    found = read_rounds(folder)[rounds - 1]["all_clients_accuracy"]
    return final if found is None else found


class Sweep:
    """A grid, its runs and its result."""

    def __init__(self, config: Config, options: cli.Options):
        more = options.more
        if more.coordinator is not None:
            raise bad("coordinator", more.coordinator, "nothing: a sweep is run by one process")
        self.options, self.given = options, config
        self.grid = grid.parse_grid(more.grid) if more.grid else grid.paper_grid(config.method)
        try:
            self.seeds = (
                list(dict.fromkeys(int(seed) for seed in more.seeds.split(","))) if more.seeds else [config.seed]
            )
        except ValueError:
            raise bad("seeds", more.seeds, "whole numbers like 0,1,2") from None
        self.stages = [config.rounds]
        if more.halving:
            if more.drop_checkpoints:
                raise bad("drop_checkpoints", True, "off beside --halving, which goes on from them")
            if config.rounds % 4 or "rounds" in self.grid:
                raise bad("rounds", config.rounds, "a multiple of 4, and not in the grid, beside --halving")
            if config.method == "fedkd" and config.fedkd.coding != "none":
                raise bad(
                    "halving",
                    True,
                    "off for FedKD, whose coding depends on the last round, unless fedkd.coding is none",
                )
            self.stages = [config.rounds // 4, config.rounds // 2, config.rounds]
        self.base = options.run_dir if more.run_dir else Path("runs") / f"sweep-{options.name}"
        held_out = config.validation_fraction or HELD_OUT
        # What --halving decides by must be evaluated at the end of each stage.
        self.config = replace(config, validation_fraction=held_out, eval_every=max(1, self.stages[0]))
        self.points = grid.points(self.grid)
        for point in self.points:
            self.run(point, self.seeds[0], None)  # raises on the first that cannot work

    def run(self, point: grid.Point, seed: int, rounds: int | None) -> Run:
        config = replace(grid.at(self.config, point), seed=seed)
        config = config if rounds is None else replace(config, rounds=rounds)
        find_method(config.method)
        return Run(self.base / grid.label(point) / f"seed{seed}", config.check())

    def stage(self, chosen: list[grid.Point], rounds: int | None) -> list[grid.Score]:
        """Runs of these points with this many rounds (None: as their settings say), and what they gave."""
        runs = [(point, seed) for point in chosen for seed in self.seeds]
        standings = [look(self.run(point, seed, rounds)) for point, seed in runs]
        if self.options.fresh and rounds in (None, self.stages[0]):
            standings = [replace(standing, state="again") for standing in standings]
        seconds_left = estimator(standings, 45.0)
        left = sum(map(seconds_left, standings))
        done = sum(standing.state == "done" for standing in standings)
        length = f" of {rounds} rounds" if rounds else ""
        console.print(f"{len(runs)} runs{length}, {done} of them done; the rest takes about {in_words(left)}")
        summaries = carry_out(
            standings,
            seconds_left,
            data_dir=self.options.data_dir,
            command=self.options.command,
            split_of=grid.validation_split,
            drop_checkpoints=self.options.more.drop_checkpoints,
        )
        accuracies = [
            accuracy_after(standing.run.folder, rounds or summary["rounds"], summary["final_all_clients_accuracy"])
            for standing, summary in zip(standings, summaries, strict=True)
        ]
        count = len(self.seeds)
        return [
            grid.Score(point, summaries[i * count : (i + 1) * count], accuracies[i * count : (i + 1) * count])
            for i, point in enumerate(chosen)
        ]

    def carry_out(self) -> list[grid.Score]:
        """All points' scores; with --halving those of the points that went on are the later ones."""
        scores, chosen = {}, self.points
        for number, rounds in enumerate(self.stages):
            found = self.stage(chosen, rounds if len(self.stages) > 1 else None)
            scores |= {grid.label(score.point): score for score in found}
            keep = -(-len(self.points) // 2 ** (number + 1))
            chosen = [score.point for score in grid.ranked(found)[:keep]]
        return list(scores.values())

    def best(self, scores: list[grid.Score]) -> grid.Score:
        """The choice: among those that went all the way."""
        longest = max(summary["rounds"] for score in scores for summary in score.summaries)
        last = scores if len(self.stages) == 1 else [s for s in scores if s.summaries[0]["rounds"] == longest]
        best = grid.ranked(last)[0]
        if best.accuracy is None:
            raise PfedafmError(f"nothing to choose: all runs of {self.base} diverged; try lower learning rates")
        return best

    def write(self, scores: list[grid.Score]) -> list[Path]:
        """Table, picture, numbers and the configuration that was chosen."""
        table, method = grid.table(scores), find_method(self.given.method).title
        held_out = f"{100 * self.config.validation_fraction:g} % of each client's training data"
        picture = plots.save(grid.heat_map(scores, f"{method}, {self.given.dataset}"), self.base / "sweep.png")
        text = f"# {method} on {self.given.dataset}: {len(scores)} settings, judged on {held_out}\n\n`{self.options.command}`\n\n![heat map](sweep.png)\n\n{table.markdown()}"
        content = [
            {"point": s.point, "accuracy": s.accuracy, "validation": list(s.validation), "diverged": s.diverged,
             "rounds": [summary["rounds"] for summary in s.summaries], "seeds": self.seeds}
            for s in grid.ranked(scores)
        ]  # fmt: skip
        files = {"sweep.md": text, "sweep.json": json.dumps(content, indent=2) + "\n"}
        table.show(console)
        for name, words in files.items():
            write_atomically(self.base / name, lambda file, words=words: file.write(words.encode()))
        best = self.best(scores)
        about = (
            f"The best of {len(scores)} settings, {100 * (best.accuracy or 0):.2f} % of all clients' validation images right\n"
            f"({held_out}, seeds {', '.join(map(str, self.seeds))}), chosen by\n  {self.options.command}"
        )
        chosen = grid.at(self.given, best.point).toml(about)
        write_atomically(self.base / "best.toml", lambda file: file.write(chosen.encode()))
        return [self.base / "sweep.md", picture, self.base / "sweep.json", self.base / "best.toml"]


def main() -> int:
    config, options = cli.parse(sys.argv[1:], "experiments/sweep.py", __doc__ or "", add_options)
    sweep = Sweep(config, options)
    options.start(config.devices)
    RunFolder(sweep.base).check()
    axes = ", ".join(f"{name} ({len(values)})" for name, values in sweep.grid.items())
    console.print(f"[bold]{find_method(config.method).title}[/bold] on {config.dataset}: {axes}")
    for path in sweep.write(sweep.carry_out()):
        console.print(f"  {path}")
    return 0


if __name__ == "__main__":
    cli.guarded(main)
