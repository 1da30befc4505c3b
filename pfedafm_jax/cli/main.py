"""`pfedafm COMMAND …`, or `python -m pfedafm_jax COMMAND …`: commands, errors, exit codes."""

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax

from pfedafm_jax.base.aborts import explain_aborts
from pfedafm_jax.base.errors import Interrupted, PfedafmError, Unread, bad, known, reason
from pfedafm_jax.runs.progress import clean

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


def main() -> None:
    def command(argv: list[str]) -> int:
        if not argv or argv[0] in ("-h", "--help"):
            print("usage: pfedafm COMMAND …      (pfedafm COMMAND --help says more)\n")
            print("\n".join(f"  {name:<9}{about}" for name, about in COMMANDS.items()))
            return 0
        if argv[0] not in COMMANDS:
            raise bad("command", argv[0], known(argv[0], COMMANDS))
        sys.argv[0] = f"pfedafm {argv[0]}"
        return importlib.import_module(f"pfedafm_jax.cli.commands.{argv[0]}").main(argv[1:])

    guarded(command)


def guarded(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a command with its arguments, and exits with the code that it returns.

    A `PfedafmError` becomes one message and its exit code; Ctrl-C becomes the conventional 130, and
    a reader of the output who leaves (`| head`) ends it in silence.
    """
    explain_aborts()
    try:
        code = main(sys.argv[1:])
        print(end="", flush=True)
    except (Unread, BrokenPipeError):
        message, code = "", Unread.exit_code
    except PfedafmError as error:
        stopped = isinstance(error, Interrupted)
        message, code = f"{'' if stopped else 'error: '}{error}", error.exit_code
    except OSError as error:  # a full or missing disk outside the rounds; a name too long
        message, code = f"error: {error}", 2 if error.errno == errno.ENAMETOOLONG else 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = reason(error) or type(error).__name__
        message, code = f"error: not enough memory on this machine ({why})", 1
    except KeyboardInterrupt:
        message, code = "\ninterrupted", 130
    except SystemExit as leaving:
        *_, last = traceback.extract_tb(leaving.__traceback__)
        if Path(last.filename).name in ("argparse.py", "options.py"):  # after --help, or bad words
            _flush()
            raise
        where = f"{last.filename}, line {last.lineno}"
        message, code = f"error: {where}: code of a plugin calls sys.exit({leaving.code!r})", 2
    else:
        sys.exit(code)
    if message:
        print(clean(message), file=sys.stderr, flush=True)
    _flush()
    if jax.distributed.is_initialized():
        os._exit(code)  # a normal exit waits for the other processes, which may have died
    sys.exit(code)


def _flush() -> None:
    try:
        print(end="", flush=True)
    except OSError:  # Python would retry at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
