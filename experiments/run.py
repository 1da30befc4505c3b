"""`pfedafm run` from a copy of the repository: `python experiments/run.py --config NAME`."""

from pfedafm_jax import cli
from pfedafm_jax.commands.run import main

if __name__ == "__main__":
    cli.guarded(main)
