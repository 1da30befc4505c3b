"""Methods side by side, same split and seeds: `pfedafm compare --methods paper,controls`."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from pfedafm_jax.cli.options import RunOptions, parse


class CompareOptions(RunOptions):
    """What `pfedafm compare` takes beside the settings."""

    placeholders: ClassVar[dict[str, str]] = {
        **RunOptions.placeholders,
        "methods": "A,B,…",
        "seeds": "0,1,…",
    }

    methods: tuple[str, ...] = ("paper",)
    """Names, or paper, controls, all. paper: its eight; controls: four in which all clients have
    one network or one extractor; all: every method."""
    seeds: tuple[Annotated[int, Ge(0), Lt(2**32)], ...] = ()
    """Several seeds give mean and deviation."""


def main(words: list[str]) -> int:
    """Trains, or resumes, the runs that these words ask for, and compares them."""
    asked = parse(words, "compare", __doc__ or "", CompareOptions)
    options = asked.options
    run_dir = asked.run_dir
    if options.run_dir is None:
        run_dir = run_dir.with_name(f"{run_dir.name}-compare")

    from pfedafm_jax import compare
    from pfedafm_jax.runs.signals import Signals

    with Signals() as signals:
        shared = asked.start()
        compare(
            asked.config,
            options.methods,
            options.seeds or None,
            run_dir=run_dir,
            fresh=options.fresh,
            signals=signals,
            **shared,
        )
    return 0
