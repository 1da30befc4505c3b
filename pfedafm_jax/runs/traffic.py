"""What a round costs: floats that travelled, and FLOPs. The rules stand here and nowhere else.

A participant costs what it reports itself or, if its method counts nothing, `Method.cost`. One whose
update was discarded has received, worked and sent all the same. One that dropped out has received,
and done and sent nothing. Methods count weights only; where running statistics are averaged, they
travel too.
"""

from typing import NamedTuple

import numpy as np

from pfedafm_jax.engine import Federation, RoundResult


class Traffic(NamedTuple):
    """Sums over the clients of a round."""

    floats_up: int
    floats_down: int
    flops: int


def with_statistics(federation: Federation, result: RoundResult) -> RoundResult:
    """The result of a round with averaged statistics added to the floats that clients counted."""
    sent = np.float32(federation.statistics_sent)
    counted = result.reports.keys() & {"floats_up", "floats_down"}
    return result._replace(
        reports=result.reports | {name: result.reports[name] + sent for name in counted}
    )


def traffic_of(federation: Federation, result: RoundResult) -> Traffic:
    """The traffic of a round, from its result with statistics (`with_statistics`)."""
    costs = [federation.cost_of_visit(client) for client in result.participants]
    sums = {}
    for name in Traffic._fields:
        values = result.reports.get(name, [getattr(cost, name) for cost in costs])
        # In float32, in which clients report, a sum would lose digits. What a discarded client did
        # not report is NaN.
        sums[name] = int(np.nansum(values, dtype=float))
    if federation.method.counts_missed:
        sums["floats_down"] = _received_and_used(result)
    else:
        missed = [federation.cost_of_visit(client).floats_down for client in result.dropped]
        sums["floats_down"] += int(sum(missed))
    return Traffic(**sums)


def _received_and_used(result: RoundResult) -> int:
    """Floats received where clients count, in their next visit, what they could not use: one that
    was discarded or dropped out reports them then."""
    if not len(result.participants):
        return 0
    finite = result.reports["finite"].astype(bool)
    received = result.reports.get("floats_down", np.zeros(len(finite)))
    return int(np.sum(received[finite], dtype=float))
