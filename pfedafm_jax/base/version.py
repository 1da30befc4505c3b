"""This package's version."""

import subprocess
from functools import cache
from pathlib import Path

VERSION = "0.1.0"


@cache
def own_version() -> str:
    """This package's version; in a checkout with the commit, and `+` if files were changed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return VERSION
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return VERSION
    return f"{VERSION} ({found})" if found else VERSION
