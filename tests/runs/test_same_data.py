"""Runs that stand beside one another, and weights that belong to a run, are of the same data."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from small import small_config, small_data

from pfedafm_jax import Partition, PfedafmError, compare, load_run
from pfedafm_jax.data import dataset_from_arrays


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with runs of Standalone, of two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    config = small_config("standalone", rounds=1, architectures=("dense_b",))
    dataset, partition = small_data()
    compare(config, "standalone", [0, 1], **given(dataset, partition), run_dir=folder)
    return folder, config


def given(dataset, partition):
    return {"dataset": dataset, "partition": partition, "progress": False}


def test_finished_runs_of_other_data_are_not_compared(finished):
    folder, config = finished
    dataset, partition = small_data()
    images, labels, cut = dataset.images.copy(), dataset.labels, dataset.num_train
    images[0] ^= 1
    arrays = (images[:cut], labels[:cut], images[cut:], labels[cut:])
    other = dataset_from_arrays(dataset.name, *arrays, num_classes=dataset.num_classes)
    for methods in ("standalone", "standalone,fedper"):  # nothing is left to train, and something
        with pytest.raises(PfedafmError, match=r"standalone-seed0 holds .*\n  data: sha256 .* →"):
            compare(config, methods, **given(other, partition), run_dir=folder)
    swapped = replace(partition, train=partition.train[::-1], test=partition.test[::-1])
    with pytest.raises(PfedafmError, match=r"\n  split: .* → another one of the same data"):
        compare(config, "standalone", **given(dataset, swapped), run_dir=folder)
    assert not (folder / "fedper-seed0").exists()
    assert len(compare(config, "standalone", [0, 1], **given(*small_data()), run_dir=folder)) == 2


def test_weights_of_another_run_are_not_taken_for_a_runs_own(finished, tmp_path):
    folder, _ = finished
    mixed = tmp_path / "mixed"
    shutil.copytree(folder / "standalone-seed0", mixed)
    shutil.rmtree(mixed / "checkpoints")
    shutil.copytree(folder / "standalone-seed1" / "checkpoints", mixed / "checkpoints")
    with pytest.raises(PfedafmError, match=r"no weights to use.* has those of run"):
        load_run(mixed)


def test_rows_of_a_partition_may_be_lists():
    made = Partition(([0, 1, 2], [3, 4]), ([5], [6]), ([], [])).check(7, 2)  # type: ignore[arg-type]
    assert all(rows.dtype.kind == "i" for rows in (*made.train, *made.test, *made.validation))
    with pytest.raises(
        PfedafmError, match=r"client 0 rows are int64 .*accepted: integers \[images"
    ):
        Partition((np.zeros((2, 2), int),), ([5],), ([],)).check(9, 1)  # type: ignore[arg-type]
