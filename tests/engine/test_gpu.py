"""For the owner of a GPU: `python -m pytest -m gpu`, on CPU devices in the layout of GPUs elsewhere.

And what XLA compiles for a card that is not there, by `python -m pytest -m compiler`: it needs the
extra `cuda12`.
"""

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gpu_programs
import jax
import numpy as np
import pytest
from small import (
    METHODS,
    assert_close,
    assert_equals_plain_loop,
    engine_of,
    play,
    small_config,
    small_data,
)

from pfedafm_jax.config.config import updated
from pfedafm_jax.runs.drive import run
from pfedafm_jax.runs.experiment import Experiment

SCRIPT = Path(gpu_programs.__file__)
# Kernels and products of a training step and loops that wait for the host, by program: not more.
COUNTS = {
    "pfedafm": {"train 0": (66, 14, 0), "shared 0": (58, 13, 0), "evaluate 0": (33, 9, 0)},
    "standalone": {"train 0": (63, 14, 0), "evaluate 0": (18, 5, 0)},
    "fml": {"train 0": (115, 28, 0), "evaluate 0": (31, 10, 0)},
}


def lockstep(method="pfedafm", **changes):
    return engine_of(small_config(method, layout="lockstep", **changes), *small_data())


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, 0])  # one, and all there are
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_equal_the_plain_loop(method, devices):
    assert_equals_plain_loop(lockstep(method, devices=devices))


@pytest.mark.gpu
def test_a_run_that_was_stopped_is_resumed_to_the_same_bits(config, dataset, partition, tmp_path):
    config = updated(config, layout="lockstep", devices=0, checkpoint_every=1)
    whole = run(config, dataset, partition, progress=False)
    short = updated(config, rounds=2)
    run(short, dataset, partition, run_dir=tmp_path, progress=False)
    resumed = run(config, dataset, partition, run_dir=tmp_path, progress=False)
    for one, other in zip(whole.records, resumed.records, strict=True):
        assert dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)
    for client in range(config.num_clients):
        ours, theirs = (made.state.clients.state(client) for made in (whole, resumed))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_rougher_products_change_little_in_two_rounds(precision):
    if precision == "tf32" and jax.local_devices()[0].platform == "cpu":
        pytest.skip("a CPU has no tf32")
    exact, rough = (play(lockstep(precision=one), [0, 1, 2], [3]) for one in ("highest", precision))
    assert_close(rough[:2], exact[:2], rtol=0.1, atol=0.02)


@pytest.mark.gpu
def test_a_run_says_what_it_ran_on(config, dataset, partition):
    about = Experiment(updated(config, layout="lockstep"), dataset, partition).about()
    kind = jax.local_devices()[0].platform
    assert kind == "cpu" or jax.local_devices()[0].device_kind in about["devices"]
    assert about["config"]["precision"] == "highest"
    assert kind == "cpu" or about["kernels"].startswith("xla")


def programs_of(tmp_path: Path, *words: str) -> dict:
    """What the benchmark says, in a process of its own."""
    words = ("--json", str(tmp_path / "found.json"), *words)
    command = [sys.executable, str(SCRIPT), *words]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(len, done.stdout.splitlines())) <= 80
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.slow
def test_without_the_extra_programs_are_lowered_for_cuda(tmp_path):
    if find_spec("jax_plugins") and find_spec("jax_plugins.xla_cuda12"):
        pytest.skip("the extra cuda12 is installed")
    found = programs_of(tmp_path, "--method", "standalone", "--architectures", "cnn2,cnn5")
    assert not found["compiled"] and found["why"]
    assert {row["program"] for row in found["programs"]} >= {"train 0", "evaluate 0", "place 1"}
    assert all(row["products"] > 10 for row in found["programs"] if row["program"] == "train 0")


@pytest.mark.compiler
@pytest.mark.parametrize("method", COUNTS)
def test_a_step_has_no_more_kernels_than_it_had(method, tmp_path):
    found = programs_of(tmp_path, "--method", method)
    assert found["compiled"], found["why"]
    rows = {row["program"]: row for row in found["programs"]}
    for name, most in COUNTS[method].items():
        row = rows[name]
        counts = row["step_kernels"], row["step_products"], row["waits"]
        assert all(a <= b for a, b in zip(counts, most, strict=True)), (name, counts, most)
    assert found["waits"] == 0 and found["round"]["trips"] <= 2
    states = found["round"]["participants' states"]
    assert max(found["round"]["bytes up"], found["round"]["bytes down"]) <= 1.1 * states
    assert 1 <= found["client_bytes"] / found["client_bytes_compiled"] <= 2.5
    used = [row["instructions"] for row in found["programs"]]
    assert not any(one["tf32"] + one["bfloat16"] for one in used)


@pytest.mark.compiler
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_precision_is_that_of_the_instructions(precision, tmp_path):
    found = programs_of(tmp_path, "--method", "standalone", "--precision", precision)
    train = found["programs"][0]["instructions"]
    assert train[precision] > 0
