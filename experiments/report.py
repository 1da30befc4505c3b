"""`pfedafm report` with the paper's numbers beside ours: `python experiments/report.py RUN_DIR`."""

from functools import partial

from paper.numbers import published

from pfedafm_jax.cli.commands.report import main
from pfedafm_jax.cli.main import guarded

if __name__ == "__main__":
    guarded(partial(main, published=published))
