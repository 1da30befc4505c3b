"""`--plugin FILE.py`: your own methods and networks, registered before settings are read."""

import importlib.util
import sys
import traceback
from pathlib import Path

from pfedafm_jax.base.errors import PfedafmError, bad


def load_plugin(path: str | Path) -> None:
    """Runs a Python file, which registers its contents and may import files next to it."""
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise bad("plugin", str(path), "a Python file that is there, FILE.py")
    name = f"pfedafm_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has both"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes look their module up
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that it shadows nothing
    try:
        spec.loader.exec_module(module)
    except PfedafmError as error:
        raise PfedafmError(f"plugin {path}: {error}") from error
    except (Exception, SystemExit) as error:  # the file may fail in any way; say where
        where = f"plugin {path}, line {line_of(error, spec.origin)}"
        raise PfedafmError(f"{where}: {type(error).__name__}: {error}") from error


def line_of(error: BaseException, file: str | None) -> int | None:
    """The last line of a file that an error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return lines[-1] if lines else None
