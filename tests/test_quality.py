"""Lint, format and types are part of the tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["basedpyright", "--pythonpath", sys.executable],
}


def test_files_are_opened_by_what_refuses_pipes():
    """By `files.reading`; others would wait for a pipe or device, which strangers may put there."""
    other = r"\.read_(text|bytes)\(|open\([^)]*\"rb?\"|(np\.load|tarfile\.open)\(path"
    own = ("__file__", "CONFIGS", "SOURCE", "PROGRAM", "/proc/", "library.read_bytes()")
    for path in (ROOT / "pfedafm_jax").rglob("*.py"):
        for line in path.read_text().splitlines() if path.name != "files.py" else []:
            assert not re.search(other, line) or any(word in line for word in own), line


@pytest.mark.parametrize("name", COMMANDS)
def test_the_code_is_clean(name):
    tool = shutil.which(COMMANDS[name][0], path=str(Path(sys.executable).parent)) or shutil.which(
        COMMANDS[name][0]
    )
    assert tool, f"{COMMANDS[name][0]} is not installed: pip install -e '.[dev]'"
    result = subprocess.run(
        [tool, *COMMANDS[name][1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
