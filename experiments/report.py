"""`pfedafm report` with the paper's numbers beside ours: `python experiments/report.py RUN_DIR`."""

from functools import partial

from paper.numbers import published

from pfedafm_jax import cli
from pfedafm_jax.commands.report import main

if __name__ == "__main__":
    cli.guarded(partial(main, published=published))
