"""One client away from the others: a newcomer of a finished run, a node of a federation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.base.trees import as_numbers
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.visit import Common, Slots, StageResult, evaluate, work
from pfedafm_jax.methods import Method
from pfedafm_jax.methods.base import Client, Server
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.batch_stats import PRIVATE_STATISTICS, shared_parts_of

_work, _evaluate = (jax.jit(stage, static_argnums=0) for stage in (work, evaluate))


class SingleClient(NamedTuple):
    """What a client's visits need, whatever the round; made by `SingleClient.of`."""

    network: Architecture
    precision: str
    common: Common  # of no round, and without broadcast
    slot: Slots

    @classmethod
    def of(
        cls,
        method: Method,
        network: Architecture,
        *,
        seed: int,
        precision: str,
        client: int,
        images: np.ndarray,
        labels: np.ndarray,
        rows: Sequence[np.ndarray],
        widths: Sequence[int],
        weight: float,
    ) -> "SingleClient":
        """A client of a run.

        Args:
            seed, precision: the run's.
            client: its number.
            images, labels: `[num, …]` and `[num]`.
            rows: those of its training and of its test images.
            widths: lengths to which tables of these rows are padded, so that clients of similar
                size share programs.
            weight: in the average.
        """
        train, test = (
            jnp.asarray(np.pad(own, (0, width - len(own))), jnp.int32)
            for own, width in zip(rows, widths, strict=True)
        )
        common = Common(
            jax.device_put(as_numbers(method)),
            jnp.asarray(images),
            jnp.asarray(labels, jnp.int32),
            server={},
            key=jax.random.key_data(jax.random.key(seed)),
            round=jnp.int32(0),
        )
        sizes = [jnp.int32(len(own)) for own in rows]
        own = jnp.int32(client), train, sizes[0], test, sizes[1], jnp.float32(weight), jnp.int32(0)
        return cls(network, precision, common, Slots(*own))

    def visit(
        self, state: Client, server: Server, number: int, *, upload: bool = True
    ) -> tuple[Client, list[StageResult]]:
        """The client's work in round `number`.

        Args:
            state, server: what the client kept, and the broadcast.
            upload: otherwise a stage that only makes an upload is left out, unless there are
                statistics of the shared network to be had from it.

        Returns:
            Its new state, and the results of the stages; a stage that is not finite is the last.
        """
        common = self.common._replace(server=jax.device_put(server), round=jnp.int32(number))
        with matmul_precision(self.precision):
            stages = [_work(self.network, common, state, self.slot)]
            state = stages[0].state
            parts = shared_parts_of(common.method, state)
            if parts and stages[0].info["finite"] and (upload or PRIVATE_STATISTICS in state):
                stages.append(_work(None, common, parts, self.slot))
                if PRIVATE_STATISTICS in parts:
                    state = {**state, PRIVATE_STATISTICS: stages[1].state[PRIVATE_STATISTICS]}
        return state, stages

    def evaluate(self, state: Client, server: Server) -> dict[str, Any]:
        """Its accuracies on its test images, `accuracy/NAME`."""
        common = self.common._replace(server=jax.device_put(server))
        with matmul_precision(self.precision):
            return _evaluate(self.network, common, state, self.slot).info
