"""`pfedafm compare` from a copy of the repository: `python experiments/compare.py …`."""

from pfedafm_jax import cli
from pfedafm_jax.commands.compare import main

if __name__ == "__main__":
    cli.guarded(main)
