"""Every test runs on four fake devices, with silent broadcasting, mixed dtypes and warnings as
errors; `-m gpu` runs on what is there."""

import gc
import os

import flax.linen as nn
import jax
import numpy as np
import pytest

from pfedafm_jax import methods
from pfedafm_jax.base.files import default_cache_dir
from pfedafm_jax.config import method_settings
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import Dataset, Partition, dataset_from_arrays
from pfedafm_jax.data.sources.synthetic import make_synthetic
from pfedafm_jax.engine.programs import compiled
from pfedafm_jax.models import architecture
from pfedafm_jax.models.architecture import register_extractor
from pfedafm_jax.models.cnn import Convolution, linear
from pfedafm_jax.models.kernels import conv_pool

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Compiled programs outlive the run, so that a second one takes a fraction of the time.
jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
# XLA's older code generator, which compiles in half the time. Commands that tests start have the
# usual one.
QUICKLY_COMPILED = "--xla_cpu_use_fusion_emitters=false"

FEATURES = 12


def pytest_configure(config):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share a GPU
    if config.getoption("markexpr") != "gpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {QUICKLY_COMPILED}"
    jax.local_devices()  # JAX starts here, before a command that a test calls asks for fewer
    os.environ["XLA_FLAGS"] = flags


class Small(nn.Module):
    """A network of the paper's kind in miniature, for 8x8 images: it compiles in a fraction of a
    second."""

    conv: int
    hidden: int
    features: int = FEATURES

    @nn.compact
    def __call__(self, images):
        conv1 = Convolution(self.conv, "torch", name="conv1")(images.shape[-1])
        hidden = conv_pool(images, *conv1)
        hidden = hidden.reshape(hidden.shape[0], -1)
        hidden = nn.relu(linear(self.hidden, hidden, "torch", "fc1"))
        return nn.relu(linear(self.features, hidden, "torch", "fc2"))


register_extractor("small_a", Small(conv=4, hidden=16))
register_extractor("small_b", Small(conv=3, hidden=10))


# The files that take longest, so that the two workers that share all files end at the same time.
LONGEST = ["test_all_methods", "test_lockstep", "test_resume", "test_quality", "test_trained",
           "test_reproduce", "test_extending", "test_kernels", "test_reference", "test_engine", "test_command"]  # fmt: skip


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True, scope="module")
def compiled_programs(request):
    """Compiling is most of the time of most tests, so it is done in full only in files and tests
    marked `optimised`, and by all commands that tests start. What was compiled is forgotten after
    each file: every program holds memory maps, and thousands of them in one process end in a crash
    inside XLA."""
    jax.config.update(
        "jax_disable_most_optimizations", request.node.get_closest_marker("optimised") is None
    )
    yield
    compiled.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def compiled_in_full(request):
    """A single test of a file, marked `optimised`."""
    before = jax.config.read("jax_disable_most_optimizations")
    if request.node.get_closest_marker("optimised"):
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def registered(monkeypatch):
    """Methods and extractors that a test registers are unknown again after it."""
    monkeypatch.setattr(architecture, "_EXTRACTORS", dict(architecture._EXTRACTORS))
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    monkeypatch.setattr(method_settings, "_registered", dict(method_settings._registered))
    yield
    architecture.describe.cache_clear()


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """240 images of 8x8 pixels in 4 classes."""
    arrays = make_synthetic(4, 240, seed=3, image_size=8)
    return dataset_from_arrays("small", *arrays, num_classes=4)


@pytest.fixture(scope="session")
def partition(dataset) -> Partition:
    """Six clients of different sizes: with batches of 8, some have a partial last batch and one has
    no full one."""
    sizes = [(21, 5), (16, 5), (29, 5), (5, 5), (19, 70), (24, 5)]
    order = np.random.default_rng(0).permutation(len(dataset.images)).astype(np.int32)
    train, test = [], []
    for num_train, num_test in sizes:
        train.append(np.sort(order[:num_train]))
        test.append(np.sort(order[num_train : num_train + num_test]))
        order = order[num_train + num_test :]
    return Partition(tuple(train), tuple(test), (order[:0],) * len(sizes))


@pytest.fixture(scope="session")
def config() -> Config:
    """Six clients with two architectures, three a round, two epochs in batches of 8."""
    return Config(
        dataset="synthetic",
        synthetic_classes=4,
        num_clients=6,
        participation=0.5,
        architectures=("small_a", "small_b"),
        shared_extractor="small_b",
        feature_size=FEATURES,
        local_epochs=2,
        batch_size=8,
        learning_rate=0.05,
        rounds=3,
        seed=5,
        devices=1,
    )
