"""`pfedafm plot` from a copy of the repository: `python experiments/plot.py RUN_DIR`."""

from pfedafm_jax import cli
from pfedafm_jax.commands.plot import main

if __name__ == "__main__":
    cli.guarded(main)
