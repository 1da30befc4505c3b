"""`pfedafm run` from a copy of the repository: `python experiments/run.py --config NAME`."""

from pfedafm_jax.cli.commands.run import main
from pfedafm_jax.cli.main import guarded

if __name__ == "__main__":
    guarded(main)
