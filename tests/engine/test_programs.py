"""What is compiled: once for all numbers, seeds and commands of one form."""

import chex
import jax
import pytest
from small import METHODS, algorithm_1, command_words, engine_of, small_config, small_data

from pfedafm_jax.cli.commands import sweep
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.config.method_settings import float_fields
from pfedafm_jax.data.load import load_data, split
from pfedafm_jax.engine.programs import TRACED, compiled
from pfedafm_jax.methods import find_method
from pfedafm_jax.results import plots
from pfedafm_jax.training.batches import LocalTraining, table_width

SWEPT = {"synthetic_samples": 240, "num_clients": 6, "participation": 0.5, "local_epochs": 1}
SWEPT |= {"shared_extractor": "small_a", "feature_size": 12, "batch_size": 16, "rounds": 2}
SWEPT |= {"devices": 1}


@pytest.mark.parametrize("method", METHODS)
def test_numbers_are_no_part_of_what_is_compiled(method):
    config = small_config(method)
    form = engine_of(config, *small_data()).program_key
    own = find_method(method).Settings
    defaults = {name: own.model_fields[name].default for name in float_fields(own)}
    numbers = {name: 0.375 for name, default in defaults.items() if default is not None}
    run = dict.fromkeys(("learning_rate", "momentum", "weight_decay", "clip_norm"), 0.3)
    other = engine_of(
        updated(config, {**run, "seed": 9, "rounds": 7, method: numbers}), *small_data()
    )
    assert other.program_key == form and hash(other.program_key) == hash(form)
    given = {"learning_rate": 0.2}  # in the method's own name: another number, not another program
    assert engine_of(updated(config, {method: given}), *small_data()).program_key == form
    assert engine_of(updated(config, {"local_epochs": 3}), *small_data()).program_key != form


def test_programs_of_another_run_compute_with_its_numbers(config, dataset, partition):
    """Compiled for one run, then used by others: each equals Algorithm 1 with its own numbers."""
    config = updated(config, {"architectures": ("small_b",)})
    engine_of(config, dataset, partition).prepare()
    traced = dict(TRACED)
    other = {"learning_rate": 0.2, "momentum": 0.5, "weight_decay": 0.1, "clip_norm": 0.5}
    for numbers in ({**other, "seed": 8}, {"pfedafm": {"mix_learning_rate": 0.1}}):
        programs = engine_of(updated(config, numbers), dataset, partition)
        ours, result = programs.run_round(programs.start(), 1)
        plain, expected = algorithm_1(programs).run_round(programs.start(), 1)
        chex.assert_trees_all_close(result.reports, expected.reports, rtol=2e-4, atol=2e-5)
        servers = jax.device_get((ours.server, plain.server))
        chex.assert_trees_all_close(*servers, rtol=2e-3, atol=2e-5)
    assert traced == TRACED


def test_splits_of_other_seeds_share_the_programs():
    """At sizes where clients fill several batches, one, or less than one."""
    base = Config(dataset="synthetic", participation=0.5, architectures=("cnn5",))
    for clients, batch_size in ((10, 64), (10, 512), (20, 32)):
        found = set()
        for seed in range(4):
            numbers = {"seed": seed, "num_clients": clients, "batch_size": batch_size}
            config = updated(base, numbers)
            dataset = load_data(config)
            sizes = [len(rows) for rows in split(config, dataset).train]
            training = LocalTraining.of(config, dataset.mean, dataset.std, sizes)
            found.add((training.batch_size, training.rest_size, table_width(sizes)))
            assert training.batch_size >= min(config.batch_size, max(sizes))
            assert table_width(sizes) >= max(sizes)
        assert len(found) == 1, found


def traces(action) -> dict[str, int]:
    """How often programs are traced by this, from an empty memory."""
    compiled.cache_clear()
    TRACED.clear()
    action()
    return dict(TRACED)


def test_the_command_traces_rates_and_seeds_as_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *arguments: None)  # each run's own, seconds each

    def run(grid: str, seeds: str) -> None:
        words = command_words(**SWEPT, grid=grid, seeds=seeds, run_dir=tmp_path / f"{grid}-{seeds}")
        assert sweep.main(words) == 0

    once = traces(lambda: run("learning_rate=0.1", "0"))
    assert once == {"train": 1, "evaluate": 1, "shared": 1, "update": 1}
    assert traces(lambda: run("learning_rate=0.1,0.05", "0,1")) == once
