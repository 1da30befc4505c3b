"""`pfedafm sweep` from a copy of the repository: `python experiments/sweep.py --grid …`."""

from pfedafm_jax import cli
from pfedafm_jax.commands.sweep import main

if __name__ == "__main__":
    cli.guarded(main)
