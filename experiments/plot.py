"""`pfedafm plot` from a copy of the repository: `python experiments/plot.py RUN_DIR`."""

from pfedafm_jax.cli.commands.plot import main
from pfedafm_jax.cli.main import guarded

if __name__ == "__main__":
    guarded(main)
