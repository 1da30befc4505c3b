"""What an installed package gives, outside a checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TINY = (
    "--dataset synthetic --synthetic-samples 240 --num-clients 4 --participation 0.5 --rounds 1 "
    "--local-epochs 1 --architectures cnn5 --feature-size 16"
)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13"])
def test_a_wheel_gives_the_commands_and_the_configurations(python, tmp_path):
    if not shutil.which(python) or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"there is no {python} here")

    def call(*words):
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=clean, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    call(python, "-m", "venv", "fresh")
    programs = tmp_path / "fresh" / "bin"
    call(programs / "pip", "install", "-q", wheel)
    pfedafm = programs / "pfedafm"
    assert "hetero_cifar10" in call(pfedafm, "run", "--config")
    words = "from importlib.resources import files; print(files('pfedafm_jax').joinpath('py.typed').is_file())"
    assert "True" in call(programs / "python", "-c", words)
    assert "admit a newcomer" in call(programs / "python", "-m", "pfedafm_jax")
    call(pfedafm, "run", *TINY.split(), "--run-dir", "runs/a")
    np.save(tmp_path / "x.npy", np.zeros((3, 32, 32, 3), np.uint8))
    call(pfedafm, "predict", "runs/a", "--client", "1", "--images", "x.npy", "--out", "y.csv")
    assert len((tmp_path / "y.csv").read_text().splitlines()) == 4
    call(pfedafm, "export", "runs/a", "--client", "1", "--out", "model")
    call(pfedafm, "report", "runs/a", "--out", "a.html")
    # The exported program in an environment that has jax and nothing of ours.
    call(python, "-m", "venv", "alone")  # an older JAX need not read what a newer one wrote
    call(tmp_path / "alone" / "bin" / "pip", "install", "-q", "jax", "flatbuffers")
    words = "import jax, numpy; from jax import export; "
    words += "p = export.deserialize(open('model/network.jax', 'rb').read()); "
    words += "print(p.call(numpy.load('x.npy'))['mixed'].shape)"
    assert "(3, 10)" in call(tmp_path / "alone" / "bin" / "python", "-c", words)
