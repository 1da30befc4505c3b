"""The server of a real federation: `pfedafm serve --config hetero_cifar10 --num-clients 5`."""

import contextlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.options import RunOptions, parse
from pfedafm_jax.config.config import Config, updated

Seconds = Annotated[float, Gt(0), Lt(10**7)]


class ServeOptions(RunOptions):
    """What `pfedafm serve` takes beside the settings."""

    heading: ClassVar[str] = "Federation"
    placeholders: ClassVar[dict[str, str]] = {
        **RunOptions.placeholders,
        "certs": "DIR",
        "classes": "N|A,B",
        "min_replies": "M",
    }

    listen: str = "127.0.0.1:18000"
    """Where nodes reach the server."""
    certs: str | None = None
    """Certificates from `pfedafm certs`. Optional on 127.0.0.1."""
    classes: str | None = None
    """Number or names of the classes. Needed if the dataset does not imply them."""
    round_timeout: Seconds = 600.0
    """Seconds to wait for a reply."""
    absent_timeout: Seconds = 60.0
    """Seconds to wait for a missing node."""
    min_replies: Annotated[int, Ge(1)] | None = None
    """Fewest replies for a round to count (half)."""


def main(words: list[str]) -> int:
    """Runs the federation that these words ask for."""
    serve(words)
    return 0


def check_certs(folder: str, config: Config) -> None:
    """Raises if a folder has not the certificates of this federation."""
    last_client = f"nodes/client-{config.num_clients - 1}.pub"
    for name in ("ca.crt", "server.crt", "server.key", last_client):
        if not (Path(folder) / name).is_file():
            made_by = f"pfedafm certs --clients {config.num_clients}"
            raise bad("certs", folder, f"a folder of {made_by}; {name} is missing")


def serve(words: list[str], link: Any = None) -> None:
    """Runs a federation; `link` is that of a superlink which is there already."""
    asked = parse(words, "serve", __doc__ or "", ServeOptions)
    options = asked.options

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
    from pfedafm_jax.runs.progress import print_summary
    from pfedafm_jax.runs.signals import Signals
    from pfedafm_jax.runs.train import train

    if options.coordinator is not None:
        raise PfedafmError("--coordinator is for simulations; a server is one process")
    if find_method(asked.config.method).in_turn:
        accepted = "one whose clients do not depend on one another"
        raise bad("method", asked.config.method, accepted)
    # What nodes keep allows for a server that is two rounds back, and no more.
    config = updated(asked.config, devices=1, layout="loop", checkpoint_every=1)
    classes = classes_of(config, options.classes)
    most = config.num_participants
    least = -(-most // 2) if options.min_replies is None else options.min_replies
    if least > most:
        raise bad("min_replies", least, f"1 to {most}, the participants of a round")
    where = address("listen", options.listen, options.certs)
    if options.certs is not None:
        check_certs(options.certs, config)
    flower = needed("flower")
    run_dir = asked.run_dir
    with Signals() as signals, contextlib.ExitStack() as opened:
        shared = asked.start(1)
        task = find_existing(Task(config, run_dir), fresh=options.fresh, nodes=True)
        if task.state == "done" and task.run is not None:
            say_finished(task, task.run.summary)
            return
        if link is None:
            check_free(*where)
        with RunFolder(run_dir).lock():
            pass  # the folder is ours before anything is written to it
        if task.state == "again":
            (run_dir / "nodes.json").unlink(missing_ok=True)
        roster = Roster(run_dir / "nodes.json", config, classes)
        if link is None:
            certs = options.certs and Path(options.certs)
            folder = run_dir / "flower"
            superlink = flower.superlink(*where, certs, folder, config.num_clients)
            link = opened.enter_context(superlink)
            log = f"{folder}/superlink.log is Flower's"
            console.print(f"nodes may come to {options.listen}; {log}")
        nodes = Nodes(
            link,
            roster,
            console.print,
            seconds=options.round_timeout,
            patience=options.absent_timeout,
        )
        nodes.gather()
        kernels.choose(config.kernels, console.print)
        federation = federation_of(check_names(config), roster)
        executor = NodesExecutor(federation, nodes, least=least, stopped=lambda: signals.received)
        with progress_of(task, federation, executor, asked.name, shown=True) as bar:
            history, _ = train(
                federation,
                executor,
                task.folder,
                restart=task.state == "again",
                command=asked.command,
                observers=(bar, *shared["observers"]),
                signals=signals,
                log=console.print,
            )
        plots.draw_all(history.result(), None, run_dir, console.print)
        print_summary(history.summary(), pictures_in(run_dir))
        nodes.dismiss()
