"""Every notebook installs what it needs and is stored without outputs, and runs from top to bottom."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT = 300  # seconds
INSTALLS = r"try:\n +import pfedafm_jax.*except ImportError:\n +%pip install"


def run_notebook(path: Path) -> None:
    """Raises where a cell fails or the whole takes longer than the limit; it has a process and a
    kernel of its own."""
    before = sorted(path.parent.iterdir())
    command = [sys.executable, str(ROOT / "tests" / "run_notebook.py"), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, re.sub(r"\x1b\[[0-9;]*m", "", result.stderr)[-4000:]
    assert sorted(path.parent.iterdir()) == before, "it leaves files beside it"


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_the_notebook_runs(path):
    run_notebook(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_the_notebook_installs_the_package_and_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    title, *cells = notebook["cells"]
    assert title["cell_type"] == "markdown" and "".join(title["source"]).startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert re.search(INSTALLS, "".join(code[0]["source"]), re.DOTALL)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    identifiers = {cell["id"] for cell in cells}
    assert len(identifiers) == len(cells)
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.reads(path.read_text(), as_version=4))
