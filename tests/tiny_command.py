"""`experiments/run.py` itself, with a network small enough to start and run in seconds:
`--architectures tiny`; and functions that start it in a process of its own."""

import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import pytest

from pfedafm_jax.cli.commands import run as command
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.models.architecture import register_extractor
from pfedafm_jax.models.cnn import linear
from pfedafm_jax.results import plots

ROOT = Path(__file__).parent.parent


class Tiny(nn.Module):
    """The mean of each quarter of the image, and a linear layer."""

    features: int = 8

    @nn.compact
    def __call__(self, images):
        quarters = images.reshape(images.shape[0], 2, 16, 2, 16, 3).mean(axis=(2, 4))
        return nn.relu(linear(self.features, quarters.reshape(-1, 12), "torch", "fc1"))


SETTINGS = [
    "--dataset", "synthetic", "--synthetic-samples", "240", "--num-clients", "12", "--participation", "0.25",
    "--architectures", "tiny", "--shared-extractor", "tiny", "--feature-size", "8", "--local-epochs", "1",
    "--devices", "1", "--eval-every", "50", "--checkpoint-every", "1",
]  # fmt: skip


def start(folder: Path, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen:
    """The command with this run folder, as a user starts it; `before` stands before Python."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is most of its time
    environment.pop("XLA_FLAGS", None)
    words = [*before, sys.executable, __file__, "--run-dir", str(folder), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment, text=True, **pipes)


def run_here(folder: Path, *arguments: str) -> int:
    """The same in this process and without pictures, in a fraction of the time."""
    register_extractor("tiny", Tiny())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *arguments: None)
        return command.main([*SETTINGS, "--run-dir", str(folder), *arguments])


def run_and_leave(folder: Path, arguments: Sequence[str], calls: int = 0) -> None:
    """`run_here` as a process of its own; SIGKILL at the file operation of this number, if any."""
    sys.stdout = sys.stderr = io.StringIO()
    left = [calls]

    def deadly(operation):
        def call(*words, **options):
            left[0] -= 1
            if left[0] == 0 and calls % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            done = operation(*words, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    for name in ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir", "pwrite", "truncate"):
        setattr(os, name, deadly(getattr(os, name)))
    sys.argv = ["run.py"]
    guarded(lambda words: run_here(folder, *arguments))


def end(process: subprocess.Popen, timeout: float = 900) -> tuple[int, str, str]:
    """(exit code, output, errors) once it has ended."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def rows(folder: Path) -> list[dict]:
    """Whole lines of `rounds.jsonl`, without times."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / "rounds.jsonl").read_text().split("\n")[:-1]
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    return []


if __name__ == "__main__":
    register_extractor("tiny", Tiny())
    script = str(ROOT / "experiments" / "run.py")
    sys.argv = [script, *SETTINGS, *sys.argv[1:]]
    with contextlib.suppress(OSError):
        print("everything is imported", flush=True)
    runpy.run_path(script, run_name="__main__")
