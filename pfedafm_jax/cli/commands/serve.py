"""The server of a real federation: `pfedafm serve --config hetero_cifar10 --num-clients 5`."""

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.cli.options import parse
from pfedafm_jax.deploy import address, check_free, needed
from pfedafm_jax.deploy.roster import Roster, classes_of, federation_of
from pfedafm_jax.deploy.server import Nodes, NodesExecutor
from pfedafm_jax.methods import find_method
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.models import kernels
from pfedafm_jax.results import plots
from pfedafm_jax.results.records import RunFolder
from pfedafm_jax.runs.drive import pictures_in, progress_of, say_finished
from pfedafm_jax.runs.existing import Task, find_existing
from pfedafm_jax.runs.progress import console, print_summary
from pfedafm_jax.runs.signals import Signals
from pfedafm_jax.runs.train import train


def main(argv: list[str]) -> int:
    serve(argv)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Federation").add_argument
    add("--listen", default="127.0.0.1:18000", metavar="HOST:PORT",
        help="where nodes reach the server (127.0.0.1:18000)")  # fmt: skip
    add("--certs", metavar="DIR",
        help="certificates from `pfedafm certs`; optional on 127.0.0.1")  # fmt: skip
    add("--classes", metavar="N|A,B",
        help="number or names of the classes, if the dataset does not imply them")  # fmt: skip
    add("--round-timeout", type=float, default=600.0, metavar="S",
        help="seconds to wait for a reply (600)")  # fmt: skip
    add("--absent-timeout", type=float, default=60.0, metavar="S",
        help="seconds to wait for a missing node (60)")  # fmt: skip
    add("--min-replies", type=int, metavar="M",
        help="fewest replies for a round to count (half)")  # fmt: skip


def serve(argv: list[str], link: Any = None) -> None:
    """Runs a federation; `link` is that of a superlink which is there already."""
    config, options = parse(argv, "serve", __doc__ or "", add_options)
    more = options.more
    if more.coordinator is not None:
        raise PfedafmError("--coordinator is for simulations; a server is one process")
    if find_method(config.method).in_turn:
        raise bad("method", config.method, "one whose clients do not depend on one another")
    # What nodes keep allows for a server that is two rounds back, and no more.
    config = replace(config, devices=1, layout="loop", checkpoint_every=1)
    classes, most = classes_of(config, more.classes), config.num_participants
    least = -(-most // 2) if more.min_replies is None else more.min_replies
    for name in ("round_timeout", "absent_timeout"):
        if not 0 < getattr(more, name) < 10**7:
            raise bad(name, getattr(more, name), "seconds, above 0")
    if not 1 <= least <= most:
        raise bad("min_replies", least, f"1 to {most}, the participants of a round")
    where = address("listen", more.listen, more.certs)
    if more.certs is not None:
        last = f"nodes/client-{config.num_clients - 1}.pub"
        for name in ("ca.crt", "server.crt", "server.key", last):
            if not (Path(more.certs) / name).is_file():
                accepted = (
                    f"a folder of pfedafm certs --clients {config.num_clients}; {name} is missing"
                )
                raise bad("certs", more.certs, accepted)
    flower = needed("flower")
    with Signals() as signals, contextlib.ExitStack() as open_:
        shared = options.start(1)
        task = find_existing(Task(config, options.run_dir), fresh=more.fresh, nodes=True)
        if task.state == "done" and task.run is not None:
            say_finished(task, task.run.summary)
            return
        if link is None:
            check_free(*where)
        with RunFolder(options.run_dir).lock():
            pass  # the folder is ours before anything is written to it
        if task.state == "again":
            (options.run_dir / "nodes.json").unlink(missing_ok=True)
        roster = Roster(options.run_dir / "nodes.json", config, classes)
        if link is None:
            certs, place = more.certs and Path(more.certs), options.run_dir / "flower"
            opened = flower.superlink(*where, certs, place, config.num_clients)
            link = open_.enter_context(opened)
            console.print(f"nodes may come to {more.listen}; {place}/superlink.log is Flower's")
        limits = {"seconds": more.round_timeout, "patience": more.absent_timeout}
        nodes = Nodes(link, roster, console.print, **limits)
        nodes.gather()
        kernels.choose(config.kernels, console.print)
        federation = federation_of(check_names(config), roster)
        executor = NodesExecutor(federation, nodes, least=least, stopped=lambda: signals.received)
        with progress_of(task, federation, executor, options.name, shown=True) as bar:
            history, _ = train(
                federation,
                executor,
                task.folder,
                restart=task.state == "again",
                command=options.command,
                observers=(bar, *shared["observers"]),
                signals=signals,
                log=console.print,
            )
        plots.draw_all(history.result(), None, options.run_dir, console.print)
        print_summary(history.summary(), pictures_in(options.run_dir))
        nodes.dismiss()
