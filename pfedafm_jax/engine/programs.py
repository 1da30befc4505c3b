"""Compiles the programs of a run.

They depend only on its `ProgramKey` and are kept in memory, so that runs with other seeds share them.
There are two layouts. In the *loop* layout a device trains its clients one after another, with one
program per architecture: a CPU core is fastest at a single matrix product. In *lockstep* a device
trains all its clients at once, architectures of a family padded into one program, and no loop waits
for the host: a GPU needs many clients to be busy, and every kernel launch costs time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.base.trees import num_bytes
from pfedafm_jax.engine.devices import Devices, matmul_precision, sum_over_devices
from pfedafm_jax.engine.schedule import slots_per_device
from pfedafm_jax.engine.transfers import place, take
from pfedafm_jax.engine.visit import (
    SERVER_KEY,
    RoundInputs,
    Slots,
    Stage,
    Totals,
    client_key,
    evaluate,
    over_slots,
    own_statistics,
    shared_parts_of,
    work,
    zero_totals,
)
from pfedafm_jax.methods.aggregation import average
from pfedafm_jax.methods.base import Method, Server, after_average, next_broadcast, start_server
from pfedafm_jax.methods.server_optimizer import broadcast_of
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.padding import ArchitectureGroup, architecture_groups, widen

Tree = Any
TRACED: Counter[str] = Counter()
"""How often each program was traced: a second round, or a second seed, must not add to it."""
MEMORY_USED = 0.8  # fraction of a device's memory for clients that train at once
KEPT = 8  # number of keys whose programs are kept


class ProgramKey(NamedTuple):
    """Everything that the compiled programs of a run depend on."""

    method: Any  # the tree structure of the method, without its numbers
    architectures: tuple[Architecture, ...]
    num_images: int
    train_width: int  # width of the table of clients' training rows
    test_width: int  # and of their test rows
    devices: Devices
    num_participants: int
    lockstep: bool
    clients_per_step: int  # 0: one in a loop; in lockstep, as many of a device's as fit its memory
    precision: str  # of matrix products, see `matmul_precision`
    kernels: str  # which implementation of the kernels is traced
    only: tuple[str, ...] = ()  # the programs that are needed; empty: all

    @property
    def images(self) -> Any:
        """The shape of all images."""
        return self.architectures[0].stored(self.num_images)

    def share(self, group: ArchitectureGroup | None) -> float:
        """The share of the clients that are of this group; None: of all."""
        return len(group.members) / len(self.architectures) if group else 1.0

    def step(self, group: ArchitectureGroup | None = None) -> int:
        """Clients of this group, or of all, that a device trains at once."""
        share = self.share(group)
        if self.clients_per_step or not self.lockstep:
            return self.clients_per_step or 1
        # Twice the mean share of one group of several, since the number drawn varies.
        even = self.num_participants * min(1.0, 2 * share if share < 1 else 1.0)
        most = -(-int(np.ceil(even)) // len(self.devices))
        if self.devices.memory:
            room = self.devices.memory * MEMORY_USED - num_bytes(self.images)
            if shapes_of(self).inputs.method.sees_uploads:  # those before a call and after it
                room -= 2 * num_bytes(shapes_of(self).totals)
            most = min(most, int(room / client_bytes(self)))
        return max(1, most)

    def slots(self, group: ArchitectureGroup | None = None) -> int:
        """Slots of a program on one device, for clients of this group or of all."""
        size, groups = self.step(group), round(1 / self.share(group))
        if self.lockstep:
            return size
        return slots_per_device(self.num_participants, groups, len(self.devices), size)


class Shapes(NamedTuple):
    """Shapes of the programs' arguments."""

    inputs: RoundInputs
    server: Server  # its whole state: the broadcast, and what its optimizer keeps
    slot: Slots
    starts: tuple[Tree, ...]  # one client's state, for each architecture
    groups: tuple[ArchitectureGroup, ...]
    states: tuple[Tree, ...]  # one client's state, padded, for each group
    parts: Tree  # the parts of a client's state that the shared stage reads
    totals: tuple[Totals, ...]  # of training and, if any, of the shared stage


class CompiledPrograms(NamedTuple):
    """The compiled programs of a run; `train` and `evaluate` have one for each group of client.

    A stage is `(inputs, totals, states, slots, num_steps) -> DeviceResult`, with arrays `[devices, …]`.
    """

    train: tuple[Callable, ...]
    evaluate: tuple[Callable, ...]  # its totals are empty
    shared: Callable | None  # the stage that all architectures share; None: there is none
    # (method, server, [Totals], participants, key, round) -> the next server; None: no uploads
    update: Callable | None
    sum: Callable | None  # sums the stages' [Totals] over the devices
    place: tuple[Callable, ...]  # in lockstep, for each architecture, see `transfers.py`
    take: tuple[Callable, ...]
    zeros: tuple[Totals, ...]  # zero totals for `train` and, if any, `shared`
    reported: tuple[str, ...]  # names of the numbers reported for each participant
    shapes: Shapes


@partial(jax.jit, static_argnums=2)
def init_client(method: Method, key: jax.Array, architecture: Architecture) -> Tree:
    """A client's initial state; jitted, since op by op it takes many seconds."""
    return {**method.init_client(key, architecture), **own_statistics(method, key)}


@jax.jit
def init_server(method: Method, key: jax.Array) -> Server:
    """The server's first state; jitted for the same reason."""
    return start_server(method, key)


@lru_cache(maxsize=KEPT)
def compiled(program_key: ProgramKey) -> CompiledPrograms:
    """The programs for runs with this key; several are compiled at a time."""
    shapes, found, reported = shapes_of(program_key), {}, {}
    # Tracing holds the GIL, compiling does not: trace one program while others compile.
    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, program in traced(program_key, shapes):
            found.setdefault(name, []).append(pool.submit(program.compile))
            if name in ("train", "evaluate", "shared"):
                reported |= dict.fromkeys(program.out_info.info)
        done = {name: tuple(job.result() for job in jobs) for name, jobs in found.items()}
    return CompiledPrograms(
        **{name: done.get(name, ()) for name in ("train", "evaluate", "place", "take")},
        **{name: done.get(name, (None,))[0] for name in ("shared", "update", "sum")},
        zeros=tuple(
            program_key.devices.zeros(program_key.devices.shapes(totals))
            for totals in shapes.totals
        ),
        reported=tuple(reported),
        shapes=shapes,
    )


@lru_cache(maxsize=KEPT)
def shapes_of(program_key: ProgramKey) -> Shapes:
    """The shapes of the programs' arguments, for runs with this key."""
    # A method's leaves are float32, except the last, its seed.
    leaves = [_shape(dtype=np.float32)] * (program_key.method.num_leaves - 1) + [
        _shape(dtype=np.uint32)
    ]
    method: Method = jax.tree.unflatten(program_key.method, leaves)
    key = jax.random.key(0)
    server = jax.eval_shape(init_server, method, key)
    key_data = jax.eval_shape(jax.random.key_data, key)
    broadcast = broadcast_of(server)
    inputs = RoundInputs(
        method, program_key.images, _shape(program_key.num_images), broadcast, key_data, _shape()
    )
    train, test = _shape(program_key.train_width), _shape(program_key.test_width)
    slot = Slots(_shape(), train, _shape(), test, _shape(), _shape(dtype=np.float32), _shape())
    starts = tuple(
        jax.eval_shape(partial(init_client, architecture=architecture), method, key)
        for architecture in program_key.architectures
    )
    groups = tuple(
        ArchitectureGroup(one, (number,)) for number, one in enumerate(program_key.architectures)
    )
    if program_key.lockstep:
        groups = architecture_groups(program_key.architectures, starts)
    states = tuple(
        jax.eval_shape(partial(widen, group, program_key.architectures[first]), starts[first])
        for group in groups
        for first in group.members[:1]
    )
    parts, count = shared_parts_of(method, starts[0]), program_key.num_participants
    totals = [zero_totals(program_key.architectures[0], inputs, starts[0], slot, count)]
    totals += [zero_totals(None, inputs, parts, slot, count)] if parts else []
    return Shapes(inputs, server, slot, starts, groups, states, parts, tuple(totals))


@lru_cache(maxsize=KEPT)
def client_bytes(program_key: ProgramKey) -> int:
    """An upper estimate of the bytes that a client in training takes on a device.

    It counts weights, gradients, momenta and a copy of everything that may be trained, and for one
    batch the inputs and outputs of the products in the client's own and in the shared network.
    `benchmarks/gpu_programs.py` compares it with the compiler's figures.
    """
    shapes = shapes_of(program_key)
    method = shapes.inputs.method
    state = max(num_bytes((state, shapes.inputs.server)) for state in shapes.states)
    networks = *(group.architecture for group in shapes.groups), method.shared
    pass_ = max(one.activations for one in networks[:-1]) + networks[-1].activations
    rows = (
        program_key.train_width + method.training.batch_size
    )  # of the frozen extractor's features
    kept = rows * method.shared.feature_size
    return 4 * state + 4 * (pass_ * method.training.batch_size + kept)


def traced(program_key: ProgramKey, shapes: Shapes) -> Iterator[tuple[str, Any]]:
    """Yields the lowered programs of a run with their names in `CompiledPrograms`."""
    for name, trace in _programs(program_key, shapes):
        if not program_key.only or name in program_key.only:
            yield name, trace()


def _programs(program_key: ProgramKey, shapes: Shapes) -> Iterator[tuple[str, Callable[[], Any]]]:
    devices, none = program_key.devices, Totals({}, {})

    def program(
        name: str, stage: Stage, group: ArchitectureGroup | None, state: Tree, totals: Totals
    ):
        def trace() -> Any:
            TRACED[name] += 1
            architecture = group.architecture if group else None
            function = over_slots(
                stage, architecture, program_key.step(group), program_key.lockstep
            )
            donate = () if stage is evaluate else (2,)  # trained states overwrite the old ones
            num_slots = program_key.slots(group)
            arguments = (
                inputs,
                devices.shapes(totals),
                devices.shapes(state, num_slots),
                devices.shapes(shapes.slot, num_slots),
                devices.shapes(_shape()),
            )
            with matmul_precision(program_key.precision):
                return devices.lowered(function, arguments, (None, 0, 0, 0, 0), donate=donate)

        return name, trace

    inputs = shapes.inputs
    for group, state in zip(shapes.groups, shapes.states, strict=True):
        yield program("train", work, group, state, shapes.totals[0])
        yield program("evaluate", evaluate, group, state, none)
    if shapes.parts:
        yield program("shared", work, None, shapes.parts, shapes.totals[1])
    for number, architecture in (
        enumerate(program_key.architectures) if program_key.lockstep else ()
    ):
        index = next(i for i, group in enumerate(shapes.groups) if number in group.members)
        group, wide = shapes.groups[index], shapes.states[index]
        buffer = devices.shapes(wide, program_key.slots(group))
        state, row = devices.shapes(shapes.starts[number]), devices.shapes(_shape())
        into = partial(place, group, architecture), (buffer, state, row), (0, 0, 0)
        yield "place", partial(devices.lowered, *into, donate=(0,))
        out = partial(take, group, architecture), (buffer, row), (0, 0)
        yield "take", partial(devices.lowered, *out)
    if not jax.tree.leaves(shapes.totals):
        return

    def update(
        method: Method,
        server: Server,
        totals: list[Totals],
        participants: jax.Array,
        key: jax.Array,
        number: jax.Array,
    ) -> Server:
        TRACED["update"] += 1
        numerator = {name: part for one in totals for name, part in one.numerator.items()}
        weight = {name: part for one in totals for name, part in one.weight.items()}
        if not method.sees_uploads:
            return after_average(method, server, average(server, numerator, weight), weight)
        own = client_key(jax.random.wrap_key_data(key), number, SERVER_KEY)
        return next_broadcast(method, server, participants, numerator, weight, own)

    def trace_update() -> Any:
        with matmul_precision(program_key.precision):
            return jax.jit(update).lower(*devices.everywhere(arguments))

    totals = list(shapes.totals)
    drawn = _shape(program_key.num_participants)
    arguments = inputs.method, shapes.server, totals, drawn, inputs.key, inputs.round
    yield "update", trace_update
    yield "sum", partial(devices.lowered, sum_over_devices, (devices.shapes(totals),), (0,), None)


def _shape(*shape: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
