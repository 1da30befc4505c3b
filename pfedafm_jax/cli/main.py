"""`pfedafm COMMAND …`, or `python -m pfedafm_jax COMMAND …`: finds the command and ends it.

A command is a module of `commands/` with a function `main(words) -> exit code`, imported when it is
asked for.
"""

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pfedafm_jax.base.aborts import explain_aborts
from pfedafm_jax.base.errors import Interrupted, PfedafmError, Unread, bad, known, reason
from pfedafm_jax.base.terminal import clean

COMMANDS = {
    "run": "one run of one method",
    "compare": "several methods, or seeds, side by side",
    "sweep": "settings, chosen on held-out training data",
    "plot": "runs in one plot",
    "report": "runs as one page",
    "predict": "classify images with a trained client",
    "export": "write a trained client for use elsewhere",
    "join": "admit a newcomer to a trained run",
    "serve": "the server of a real federation, on Flower",
    "node": "one client of a real federation",
    "certs": "certificates and keys for a real federation",
}
"""The commands, and what each is for."""


def main() -> NoReturn:
    """The command line; never returns."""
    guarded(command)


def command(words: list[str]) -> int:
    """Carries out a command line; returns its exit code.

    Args:
        words: the words behind `pfedafm`.
    """
    if not words or words[0] in ("-h", "--help"):
        print("usage: pfedafm COMMAND …      (pfedafm COMMAND --help says more)\n")
        for name, purpose in COMMANDS.items():
            print(f"  {name:<9}{purpose}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        raise bad("command", name, known(name, COMMANDS))
    sys.argv[0] = f"pfedafm {name}"
    return importlib.import_module(f"pfedafm_jax.cli.commands.{name}").main(words[1:])


def guarded(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a command with its arguments, and exits with the code that it returns.

    A `PfedafmError` becomes one message and its exit code; Ctrl-C becomes the conventional 130, and
    a reader of the output who leaves (`| head`) ends it in silence.
    """
    explain_aborts()
    try:
        code = main(sys.argv[1:])
        print(end="", flush=True)
        sys.exit(code)
    except (Unread, BrokenPipeError):
        message, code = "", Unread.exit_code
    except Interrupted as error:
        message, code = str(error), error.exit_code
    except PfedafmError as error:
        message, code = f"error: {error}", error.exit_code
    except OSError as error:  # a full or missing disk outside the rounds; a name too long
        message = f"error: {error}"
        code = 2 if error.errno == errno.ENAMETOOLONG else 1
    except KeyboardInterrupt:
        message, code = "\ninterrupted", 130
    except SystemExit as leaving:
        if is_ours(leaving):
            flush()
            raise
        *_, last = traceback.extract_tb(leaving.__traceback__)
        where = f"{last.filename}, line {last.lineno}"
        message, code = (f"error: {where}: code of a plugin calls sys.exit({leaving.code!r})", 2)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = reason(error) or type(error).__name__
        message, code = f"error: not enough memory on this machine ({why})", 1
    if message:
        print(clean(message), file=sys.stderr, flush=True)
    flush()
    if is_one_of_several_processes():
        os._exit(code)  # a normal exit waits for the other processes, which may have died
    sys.exit(code)


def is_ours(leaving: SystemExit) -> bool:
    """Whether the command line itself ends the process: after its work, or after `--help` (of
    argparse, in scripts of `experiments/`)."""
    *_, last = traceback.extract_tb(leaving.__traceback__)
    if Path(last.filename).name == "argparse.py":
        return True
    return Path(last.filename).is_relative_to(Path(__file__).parent)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, in Python or in XLA."""
    if isinstance(error, MemoryError):
        return True
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)


def is_one_of_several_processes() -> bool:
    """Whether this process trains together with others."""
    jax = sys.modules.get("jax")  # where nobody has imported it, there are no others
    return jax is not None and jax.distributed.is_initialized()


def flush() -> None:
    """Writes what is left to standard output, or gives it up."""
    try:
        print(end="", flush=True)
    except OSError:  # Python would retry at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
