"""Admits a newcomer to a trained run: `pfedafm join RUN --data mine.npz --out DIR`."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from pfedafm_jax.base.terminal import clean, console
from pfedafm_jax.cli.options import CommandOptions, read_options
from pfedafm_jax.cli.plugins import load_plugin


class JoinOptions(CommandOptions):
    """What `pfedafm join` takes."""

    placeholders: ClassVar[dict[str, str]] = {
        "run": "RUN",
        "data": "PATH",
        "architecture": "NAME",
        "out": "DIR",
        "plugin": "FILE.py",
    }
    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: str
    """The folder of a run."""
    data: str
    """.npz (images, labels) or a folder per class."""
    architecture: str | None = None
    """Of its network; if it is not given, the run's first."""
    visits: int = 5
    """Rounds of local training."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Of its start and its batches."""
    out: str
    """A new folder for its model, as of export."""
    plugin: tuple[str, ...] = ()
    """As the run had it."""


def main(words: list[str]) -> int:
    """Trains the newcomer that these words describe, and writes its model."""
    asked = read_options(words, "join", __doc__ or "", JoinOptions)

    import jax

    from pfedafm_jax.data.sources.folder import read_own
    from pfedafm_jax.inference.export import check_target, export_client
    from pfedafm_jax.inference.opened import load_run
    from pfedafm_jax.results.tables import percent

    check_target(asked.out)
    for file in asked.plugin:
        load_plugin(file)
    run = load_run(asked.run, console.print)
    images, labels, *tests = read_own(asked.data, run.classes, run.config.image_size)
    if not jax.tree.leaves(run.server):
        console.print(f"{type(run.method).title} shares nothing: the newcomer trains alone")

    def show(visit: int, accuracies: dict[str, float]) -> None:
        words = "  ".join(f"{name} {percent(value)} %" for name, value in accuracies.items())
        console.print(f"after {visit} visit{'s' * (visit != 1)}:  {words}")

    own_tests = {}
    if len(tests[0]):
        own_tests = dict(zip(("test_images", "test_labels"), tests, strict=True))
    client = run.join(
        images, labels, asked.architecture, asked.visits, seed=asked.seed, log=show, **own_tests
    )
    for file in export_client(client, asked.out):
        console.print(f"  {clean(str(file))}  {file.stat().st_size / 1e6:.1f} MB")
    return 0
