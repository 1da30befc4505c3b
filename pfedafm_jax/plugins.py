"""`--plugin FILE.py`: methods and extractors from a file of one's own, registered before settings are read."""

import argparse
import importlib.util
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pfedafm_jax.config import bad
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.models import extractor_names


def load_plugin(path: str | Path) -> None:
    """Runs a Python file, which registers what it has; files beside it can be imported from it."""
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise bad("plugin", str(path), "a Python file that is there, FILE.py")
    name = f"pfedafm_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file always has both"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: nothing of ours is hidden by what is there
    try:
        spec.loader.exec_module(module)
    except PfedafmError as error:
        raise PfedafmError(f"plugin {path}: {error}") from error
    except Exception as error:  # the file may fail in any way; say where
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = (
            getattr(error, "lineno", None) if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        )
        raise PfedafmError(f"plugin {path}, line {line}: {type(error).__name__}: {error}") from error


def load_plugins(argv: Sequence[str]) -> None:
    """The files of every `--plugin FILE` on a command line, in order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE.py")
    for path in parser.parse_known_args(argv)[0].plugin:
        load_plugin(path)


def registered() -> str:
    """What can be named in settings, for `--help`."""
    kinds = {"methods": method_names(), "architectures": extractor_names()}
    lines = [textwrap.fill(f"{kind}: {', '.join(names)}", 80, subsequent_indent="  ") for kind, names in kinds.items()]
    for name in method_names():
        own = find_method(name).Settings
        if own is not None:
            lines += [f"--set {name}.{field.name}={field.default}" for field in fields(own)]
    return "\n".join(lines)
