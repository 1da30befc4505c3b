"""This package's version."""

import subprocess
from functools import cache
from pathlib import Path


@cache
def own_version() -> str:
    """This package's version; in a checkout with the commit, and `+` if files were changed."""
    from pfedafm_jax import __version__ as version  # here, since it imports this module

    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return version
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version} ({found})" if found else version
