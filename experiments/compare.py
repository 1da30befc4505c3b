"""Methods side by side on the same split and seeds: `python experiments/compare.py --config NAME --methods all`."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from pfedafm_jax import cli, plots
from pfedafm_jax.compare import collect, markdown
from pfedafm_jax.errors import Interrupted, PfedafmError
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.records import RunFolder
from pfedafm_jax.runner import finished_summary, run_into

CONFIGS = Path(__file__).parent / "configs"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods", default="all", metavar="A,B,…", help=f"all, or some of: {', '.join(method_names())}"
    )
    parser.add_argument("--seeds", default="", metavar="0,1,…", help="several seeds give mean and deviation")


def main() -> int:
    config, options = cli.parse(sys.argv[1:], CONFIGS, "experiments/compare.py", __doc__ or "", add_options)
    methods = method_names() if options.more.methods == "all" else options.more.methods.split(",")
    methods = list(dict.fromkeys(methods))
    for name in methods:
        find_method(name)
    try:
        seeds = [int(seed) for seed in options.more.seeds.split(",")] if options.more.seeds else [config.seed]
    except ValueError:
        raise PfedafmError(
            f"seeds = {options.more.seeds!r} cannot be used; accepted: whole numbers like 0,1,2"
        ) from None
    first = options.start(config.devices)
    base = Path(f"{options.run_dir}-compare") if options.more.run_dir is None else options.run_dir
    if first:
        RunFolder(base).check()
    plan = [
        (name, seed, base / f"{name}-seed{seed}", replace(config, method=name, seed=seed).check())
        for seed in dict.fromkeys(seeds)
        for name in methods
    ]
    # All folders are looked at before the first run starts.
    finished = [finished_summary(settings, run_dir, options.fresh, first) for _, _, run_dir, settings in plan]
    runs, shared = [], {}
    with Interruption() as interruption, cli.Watch(config.rounds, len(plan)) as watch:
        for (name, seed, run_dir, settings), done in zip(plan, finished, strict=True):
            summary = done
            watch.next_run(find_method(name).title, done=summary is not None)
            if summary is None:
                if seed not in shared:
                    dataset = load_data(settings, options.data_dir, cli.console.print)
                    shared = {seed: (dataset, split(settings, dataset))}
                experiment = Experiment(settings, *shared[seed])
                experiment.compile()
                summary, _ = run_into(
                    run_dir,
                    experiment,
                    options.command,
                    watch.show,
                    resumed=watch.resume,
                    fresh=options.fresh,
                    interruption=interruption,
                    log=cli.console.print,
                )
            runs.append((name, seed, run_dir, summary))
            if interruption.signal_number is not None:
                raise Interrupted("stopped between two runs; the same command goes on", interruption.signal_number)
    if not first:
        return 0
    rows = collect([(name, summary) for name, _, _, summary in runs])
    cli.print_comparison(rows)
    curves = {find_method(name).title: [str(r[2]) for r in runs if r[0] == name] for name in methods}
    picture = plots.save(plots.compare_runs(curves, f"{config.dataset}, {options.name}"), base / "compare.png")
    (base / "compare.json").write_text(json.dumps(rows, indent=2) + "\n")
    (base / "compare.md").write_text(markdown(rows))
    for path in (picture, base / "compare.md", base / "compare.json"):
        cli.console.print(f"  {path}")
    return 0


if __name__ == "__main__":
    cli.guarded(main)
