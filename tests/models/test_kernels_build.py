"""How the native operations are built: once, whole, for every processor, or not at all and said."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.models import kernels
from pfedafm_jax.models.kernels import build


@pytest.mark.slow
def test_it_is_built_once_by_builders_that_do_not_harm_each_other_and_anew_when_damaged(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CXXFLAGS", "-O0")  # built in a second
    with ThreadPoolExecutor(2) as builders:
        libraries = list(builders.map(build.load, [tmp_path] * 2))
    assert all(library.RegisterWidth() >= 1 for library, _ in libraries)
    (folder,) = tmp_path.iterdir()  # nothing half-built is left
    library, loads = folder / "native.so", []
    first = library.stat().st_mtime_ns

    def note(path):
        loads.append(Path(path).stat().st_mtime_ns)

    monkeypatch.setattr(build.ctypes, "CDLL", note)
    build.load(tmp_path)
    assert loads == [first], "built again without need"
    library.write_bytes(library.read_bytes()[:-7] + b"garbage")
    build.load(tmp_path)
    assert loads[1] > first and b"garbage" not in library.read_bytes()[-7:]


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler", "CXX=no-such-compiler is not found"), ("false", "false failed")],
)
def test_without_a_compiler_one_line_says_so_and_the_form_of_xla_runs(
    compiler, said, tmp_path, monkeypatch
):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_found", {})
    lines: list[str] = []
    assert kernels.choose("auto", lines.append).name == "xla"
    assert len(lines) == 1 and lines[0].startswith("rounds take about twice as long")
    assert said in lines[0]
    with pytest.raises(PfedafmError, match="kernels = 'native' cannot be used"):
        kernels.choose("native")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("a file where the folder should be")
    with pytest.raises(build.Unavailable, match=r"cannot be written .*XDG_CACHE_HOME"):
        build.load(tmp_path / "file")


def test_a_library_of_somebody_else_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "native.so").write_bytes(b"library")
    (tmp_path / "sha256").write_text(build.hashlib.sha256(b"library").hexdigest())
    assert build._is_whole(tmp_path)
    others = os.stat_result((stat.S_IFREG, 0, 0, 1, os.getuid() + 1, 0, 7, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self: others)
    assert not build._is_whole(tmp_path)


CHECKED = """
import jax, jax.numpy as jnp, numpy as np
from pfedafm_jax.models import kernels
from pfedafm_jax.models.kernels.layers import conv_general_dilated
assert kernels.choose("native").name == "native"
rng = np.random.default_rng(0)
for _ in range(15):
    height, width = 2 * rng.integers(3, 10, 2)
    channels, outputs, batch, clients = rng.integers(1, 36, 4) % [36, 36, 5, 3] + 1
    images = rng.normal(size=(clients, batch, height, width, channels)).astype(np.float32)
    kernel = rng.normal(size=(clients, 5, 5, channels, outputs)).astype(np.float32)
    bias = rng.normal(size=(clients, outputs)).astype(np.float32)
    loss = lambda i, w: jnp.sum(kernels.conv_pool(i, *w) ** 2)
    slopes = jax.vmap(jax.grad(loss, (0, 1)))(images, (kernel, bias))
    jax.block_until_ready(jax.vmap(lambda w, g: kernels.sgd(w, w, g, learning_rate=0.1))((kernel, bias), slopes[1]))
for round in range(30):
    size, strides, dilation = rng.integers(1, [[6], [4], [3]], (3, 2))
    height, width = (size - 1) * dilation + rng.integers(1, 12, 2)
    channels, outputs, batch, groups = rng.integers(1, [36, 36, 18, 4])
    channels, outputs = (groups * channels, groups * outputs) if round % 3 else (channels, channels)
    groups = groups if round % 3 else channels
    images = rng.normal(size=(2, batch, height, width, channels)).astype(np.float32)
    kernel = rng.normal(size=(2, *size, channels // groups, outputs)).astype(np.float32)
    options = {"rhs_dilation": dilation.tolist(), "feature_group_count": int(groups)}
    options |= {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    pads = rng.integers(0, 4, (2, 2)).tolist()
    conv = lambda i, k: conv_general_dilated(i, k, strides.tolist(), pads, **options)
    jax.block_until_ready(jax.vmap(jax.grad(lambda i, k: jnp.sum(conv(i, k) ** 2), (0, 1)))(images, kernel))
print("clean")
"""


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["native", "x86-64-v3", "x86-64"])
def test_no_kernel_reads_or_writes_where_it_must_not(processor, tmp_path):
    """Address and undefined-behaviour sanitizers over random shapes, in the three forms of an x86
    processor."""

    def library(name):
        command = ["g++", f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    # The second, since exceptions of other libraries pass through.
    preload = " ".join(library(name) for name in ("libasan.so", "libstdc++.so"))
    sanitize = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    variables = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    variables |= {"CXX": "env -u LD_PRELOAD g++"}  # the compiler itself needs no sanitizer
    variables |= {"CXXFLAGS": f"-march={processor} {sanitize}", "LD_PRELOAD": preload}
    variables |= {"ASAN_OPTIONS": "detect_leaks=0"}
    command, environment = [sys.executable, "-c", CHECKED], {**os.environ, **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "clean", result.stderr[-3000:]
