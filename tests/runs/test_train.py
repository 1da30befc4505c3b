"""The loop over rounds by any executor, when it evaluates and saves, and what a round costs."""

import numpy as np
import pytest
from small import engine_of, plain_loop, small_config, small_data

from pfedafm_jax.config.config import updated
from pfedafm_jax.engine import RoundResult
from pfedafm_jax.runs.observers import Observer
from pfedafm_jax.runs.traffic import traffic_of, with_statistics
from pfedafm_jax.runs.train import checkpoint_is_due, evaluation_is_due, train


class Rounds(Observer):
    """Notes which rounds it is told of, and where the run's folder is."""

    def __init__(self):
        self.seen, self.folder = [], "not started"

    def start(self, run_dir, config, past):
        self.folder = run_dir

    def round(self, observation):
        self.seen.append(observation.record.round)


def test_a_run_by_the_plain_loop_has_the_records_of_the_engine():
    config = small_config("standalone", rounds=3, eval_every=2, architectures=("dense_b",))
    engine = engine_of(config, *small_data())
    watching = Rounds()
    ours, _ = train(engine.federation, engine, observers=[watching])
    theirs, _ = train(engine.federation, plain_loop(engine))
    assert watching.seen == [1, 2, 3] and watching.folder is None
    assert list(ours.evaluations) == list(theirs.evaluations) == [2, 3]
    for one, other in zip(ours.records, theirs.records, strict=True):
        assert one.participants == other.participants and one.round == other.round
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert (one.floats_up, one.floats_down, one.flops) == (0, 0, other.flops)
    assert ours.visits.index.equals(theirs.visits.index)


def test_evaluations_and_checkpoints_are_due_every_so_often_and_after_the_last_round():
    config = small_config("standalone", rounds=5, eval_every=3, checkpoint_every=2)
    rounds = range(1, 6)
    assert [t for t in rounds if evaluation_is_due(config, t)] == [3, 5]
    assert [t for t in rounds if checkpoint_is_due(config, t, stopped=False)] == [2, 4, 5]
    assert checkpoint_is_due(config, 1, stopped=True)
    never = updated(config, checkpoint_every=0)
    assert not any(checkpoint_is_due(never, t, stopped=True) for t in rounds)


def test_who_was_discarded_has_sent_and_who_dropped_out_has_only_received():
    federation = engine_of(small_config("fedproto"), *small_data()).federation
    reports = {"finite": np.array([True, False]), "loss": np.array([1.0, np.nan])}
    result = RoundResult(np.array([3, 0]), reports, dropped=[2])
    costs = {client: federation.cost_of_visit(client) for client in (0, 2, 3)}
    traffic = traffic_of(federation, with_statistics(federation, result))
    assert traffic.floats_up == costs[3].floats_up + costs[0].floats_up
    assert traffic.floats_down == sum(cost.floats_down for cost in costs.values())
    assert traffic.flops == int(costs[3].flops + costs[0].flops)


def test_what_clients_count_themselves_is_the_traffic_of_a_round():
    """Two floats up for one, five for the other; not what `Method.cost` says."""
    federation = engine_of(small_config("fedproto"), *small_data()).federation
    reports = {"finite": np.array([True, True]), "floats_up": np.float32([2, 5])}
    result = RoundResult(np.array([3, 0]), reports)
    assert traffic_of(federation, result).floats_up == 7
