"""Lint, format and types are part of the tests."""

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
