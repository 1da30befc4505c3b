"""Participants that drop out: who, what becomes of them and of the rest, what is recorded."""

import numpy as np
import pytest
from small import plain_loop, play, same, small_config, small_data, small_programs, with_config

from pfedafm_jax import Experiment
from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.engine.round import draw_participants, participants_of
from pfedafm_jax.results import plots
from pfedafm_jax.results.records import Record
from pfedafm_jax.runs.observers import observed
from pfedafm_jax.runs.progress import Progress

HALF = Config(num_clients=40, participation=0.5, dropout=0.3, seed=2)


def test_who_drops_out_depends_on_seed_and_round_alone():
    rounds = [participants_of(HALF, t) for t in range(200)]
    for t, (stayed, dropped) in enumerate(rounds):
        drawn = draw_participants(2, t, 40, 20).tolist()
        assert [client for client in drawn if client not in dropped] == stayed
        assert set(stayed) | set(dropped) == set(drawn) and len(drawn) == 20
    share = np.mean([len(dropped) / 20 for _, dropped in rounds])
    assert abs(share - 0.3) < 0.03  # of 4,000: three deviations are 0.022
    assert rounds == [participants_of(HALF, t) for t in range(200)]
    assert rounds != [participants_of(updated(HALF, seed=3), t) for t in range(200)]
    assert participants_of(updated(HALF, dropout=0.0), 5)[1] == []
    assert participants_of(HALF, 5, given=[7, 3]) == ([7, 3], [])
    with pytest.raises(PfedafmError, match=r"dropout = 1\.0 cannot be used"):
        updated(HALF, dropout=1.0)


def test_rounds_are_recorded_shown_and_drawn_whoever_is_left():
    config = small_config("pfedafm", dropout=0.7, seed=1, rounds=6, architectures=("dense_b",))
    experiment = Experiment(config, *small_data())
    bar, shown = Progress(6), []
    for record in experiment.rounds():
        bar.show(record)
        shown.append(bar.bar.tasks[0].fields["numbers"])
        stayed, dropped = participants_of(config, record.round)
        assert (record.participants, record.dropped) == (stayed, dropped)
        assert record.drawn == 3
        assert (record.mean_accuracy is None) == (not stayed) == (record.loss is None)
        floats = 3 * experiment.federation.cost_of_visit(0).floats_down
        assert record.floats_down == floats  # all three received
        assert record.floats_up * 3 == floats * len(stayed)
        assert len(
            observed(experiment.history, experiment.state, record).clients["participants/loss"]
        ) == len(stayed)
        assert Record.from_dict(record.as_dict()) == record
    numbers = {len(record.dropped) for record in experiment.records}
    assert numbers == {2, 3}
    assert any("all dropped out" in words for words in shown)
    assert any("2 dropped out" in words for words in shown)
    summary = experiment.summary()
    assert summary.floats_down_per_client == experiment.federation.cost_of_visit(0).floats_down
    plots.accuracy_by_round(experiment.per_round(), experiment.predictions)
    taken = Experiment(config, *small_data())
    taken.history.restore(*experiment.history.to_checkpoint())
    assert taken.records == experiment.records
    np.testing.assert_equal(taken.result().clients, experiment.result().clients)


def test_fedkd_counts_what_a_client_missed_once():
    config = small_config("fedkd", dropout=0.6, rounds=12, architectures=("dense_b",))
    experiment = Experiment(config, *small_data())
    for record in experiment.rounds():
        reported = experiment.history.visits.loc[record.round] if record.participants else None
        expected = 0 if reported is None else reported["floats_down"].astype(float).sum()
        assert record.floats_down == expected
    assert any(record.dropped and record.participants for record in experiment.records)
    assert not all(record.participants for record in experiment.records)


def test_fedkd_counts_what_a_discarded_client_received_once():
    config = small_config("fedkd", rounds=2, architectures=("dense_b",))
    experiment = Experiment(updated(config, {"fedkd.learning_rate": 1e6}), *small_data())
    for record in experiment.rounds():
        reported = experiment.history.visits.loc[record.round]
        kept = reported[reported["finite"].astype(bool)]
        assert record.floats_down == kept["floats_down"].astype(float).sum()
    assert all(record.not_finite for record in experiment.records)


def test_a_record_without_anyone_dropped_is_as_it_always_was():
    record = Record(1, 0.5, None, 1.25, 2.0, [3], 0, 10, 10, 99)
    assert "dropped" not in record.as_dict()
    assert Record.from_dict(record.as_dict()) == record
    with pytest.raises(PfedafmError, match=r"^dropped = 2 cannot be used; accepted: a list"):
        Record.from_dict({**record.as_dict(), "dropped": 2})


def test_all_given_take_part_whatever_the_chance():
    programs = small_programs("standalone")
    losing = with_config(programs, dropout=0.9)
    assert same(play(losing, [0, 1]), play(programs, [0, 1]))


def test_the_plain_loop_loses_the_same():
    programs = small_programs("standalone")
    losing = with_config(programs, dropout=0.6)
    for number in range(1, 5):
        stayed, dropped = participants_of(losing.federation.config, number)
        _, result = plain_loop(losing).run_round(losing.start(), number)
        assert (result.participants.tolist(), result.dropped) == (stayed, dropped)
