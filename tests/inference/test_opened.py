"""Runs that are opened elsewhere, or while they go on."""

import json
import shutil

import numpy as np
import pytest
from small import small_config, small_data

from pfedafm_jax import PfedafmError, export_client, load_client, load_run, run
from pfedafm_jax.models import kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("standalone") / "run"
    config = small_config("standalone", rounds=1, architectures=("dense_b",))
    run(config, *small_data(), run_dir=made, progress=False)
    return made


def test_numbers_of_numpy_are_numbers_and_others_are_refused(folder, tmp_path):
    opened, dataset = load_run(folder), small_data()[0]
    export_client(opened.client(np.int64(1)), tmp_path / "one")
    own = dataset.images[:25], dataset.labels[:25]
    newcomer = opened.join(*own, visits=np.int64(0), seed=np.int32(1))
    export_client(newcomer, tmp_path / "new")
    assert load_client(tmp_path / "new").card["newcomer"]["seed"] == 1
    for number in (True, 1.0, -1, 4, "1"):
        with pytest.raises(PfedafmError, match=r"client = .* cannot be used; accepted: 0 to 3"):
            opened.client(number)
    for wrong in ({"visits": 1.5}, {"seed": True}):
        with pytest.raises(PfedafmError, match=r"(visits|seed) = .* cannot be used"):
            opened.join(*own, **wrong)


def test_a_client_without_test_images_has_a_card_that_is_json(folder):
    opened = load_run(folder)
    opened.run.clients["all_clients/accuracy"][-1, 2] = np.nan
    card = opened.client(2).card
    assert card["accuracy"] == {"private": None}
    json.dumps(card, allow_nan=False)


def test_weights_that_the_run_removed_meanwhile_are_no_initial_weights(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    opened = load_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(PfedafmError, match=r"is gone: the run went on .* call load_run again"):
        opened.client(0)


def test_a_run_with_native_kernels_is_used_where_there_is_no_compiler(tmp_path, monkeypatch):
    if kernels.choose("auto").name != "native":
        pytest.skip("there is no compiler")
    config = small_config("standalone", rounds=1, architectures=("dense_b",), kernels="native")
    run(config, *small_data(), run_dir=tmp_path / "run", progress=False)
    expected = load_run(tmp_path / "run").client(0).predict(small_data()[0].images[:5])
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_found", {})
    found = load_run(tmp_path / "run").client(0).predict(small_data()[0].images[:5])
    np.testing.assert_allclose(found["private"], expected["private"], rtol=1e-5)
