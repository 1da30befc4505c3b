"""`pfedafm compare` from a copy of the repository: `python experiments/compare.py …`."""

from pfedafm_jax.cli.commands.compare import main
from pfedafm_jax.cli.main import guarded

if __name__ == "__main__":
    guarded(main)
