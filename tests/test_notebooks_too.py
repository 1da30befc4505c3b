"""The other half of `test_notebooks.py`, so that two processes can run them at the same time."""

import pytest
from test_notebooks import NOTEBOOKS, run_notebook


@pytest.mark.parametrize("path", NOTEBOOKS[1::2], ids=lambda path: path.stem)
def test_the_notebook_runs(path):
    run_notebook(path)
