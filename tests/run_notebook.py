"""Runs a notebook from top to bottom in a fresh kernel of this Python: `python
tests/run_notebook.py NOTEBOOK [COPY]`.

`COPY` gets the notebook with its outputs. A cell that fails ends it with the cell's traceback and
code 1.
"""

import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


class ThisPython(KernelSpecManager):
    """Whatever kernels are installed on the machine, the one of this interpreter is used."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def main(path: Path, copy: Path | None) -> int:
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    client = NotebookClient(
        notebook, km=manager, timeout=300, resources={"metadata": {"path": str(path.parent)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if copy is not None:
            nbformat.write(notebook, copy)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
