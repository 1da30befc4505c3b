"""`pfedafm sweep` from a copy of the repository: `python experiments/sweep.py --grid …`."""

from pfedafm_jax.cli.commands.sweep import main
from pfedafm_jax.cli.main import guarded

if __name__ == "__main__":
    guarded(main)
