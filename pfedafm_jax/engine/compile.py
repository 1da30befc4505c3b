"""From what a run depends on to its compiled programs.

What is compiled depends on `Form` alone and is kept for the process, so that runs of other seeds
share it. There are two layouts. In a *loop* a device goes through its clients one after another,
one program an architecture: a core does one product best. In *lockstep* it trains all its clients
at once, architectures of one family padded to one program, and no loop waits for the host: a GPU is
filled by many clients and slowed down by every launch.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.engine.devices import Devices, matmul_precision, sum_over_devices
from pfedafm_jax.engine.rows import place, take
from pfedafm_jax.engine.schedule import slots_per_device
from pfedafm_jax.engine.visit import (
    Common,
    Slots,
    Stage,
    Totals,
    evaluate,
    over_slots,
    work,
    zero_totals,
)
from pfedafm_jax.families import Kind, kinds_of, widen
from pfedafm_jax.methods.base import Method, Server, average
from pfedafm_jax.models import Architecture

Tree = Any
TRACED: Counter[str] = Counter()
"""How often programs were traced, by kind: a second round, or a second seed, must not add to it."""
MEMORY_USED = 0.8  # of what a device has, for clients that train at once
KEPT = 8  # forms of a run whose programs are kept


class Form(NamedTuple):
    """All that the compiled programs of a run depend on."""

    method: Any  # the tree structure of the method but for its numbers
    architectures: tuple[Architecture, ...]
    num_images: int
    train_width: int  # longest row of the tables of clients' data
    test_width: int
    devices: Devices
    num_participants: int
    lockstep: bool
    clients_per_step: int  # 0: one in a loop; all that fall to a device, and fit, in lockstep
    precision: str  # of products, see `matmul_precision`
    kernels: str  # which form of the kernels is traced
    runs: int = 1  # that go through the programs together, in lockstep
    stages: tuple[str, ...] = ()  # the programs that are needed; empty: all

    def step(self, share: float = 1.0) -> int:
        """Clients that a device trains at once, where this share of participants comes together."""
        if self.clients_per_step or not self.lockstep:
            return self.clients_per_step or 1
        # Twice the mean share of an architecture of its own, since it is drawn more or less often.
        even = self.num_participants * min(1.0, 2 * share if share < 1 else 1.0)
        most = -(-int(np.ceil(even)) // len(self.devices))
        if self.devices.memory:
            images = self.num_images * int(np.prod(self.architectures[0].image_shape))
            room = self.devices.memory * MEMORY_USED - images
            most = min(most, int(room / (self.runs * client_bytes(self))))
        return max(1, most)

    def slots(self, share: float = 1.0) -> int:
        """Slots of a program on one device."""
        size = self.step(share)
        if self.lockstep:
            return size
        return slots_per_device(self.num_participants, round(1 / share), len(self.devices), size)

    def share(self, kind: Kind) -> float:
        """Which part of the clients is of this kind."""
        return len(kind.members) / len(self.architectures)


class Shapes(NamedTuple):
    """Shapes of what programs work on."""

    common: Common
    slot: Slots
    starts: tuple[Tree, ...]  # a client's state, by architecture
    kinds: tuple[Kind, ...]
    states: tuple[Tree, ...]  # a client's state as the programs of its kind have it
    parts: Tree  # of a client's state, for the stage that all share
    totals: tuple[Totals, ...]  # of training and, if there is one, of the shared stage


class Compiled(NamedTuple):
    """Programs of all stages; `train` and `evaluate` have one for each kind of client.

    A stage is `(common, totals, states, slots, trips) -> Worked`, all of it `[devices, …]`.
    """

    train: tuple[Callable, ...]
    evaluate: tuple[Callable, ...]  # its totals are empty
    shared: Callable | None  # for clients of all architectures together, if there is such a stage
    update: Callable | None  # (method, server, [Totals]) -> the next server; None: no uploads
    sum: Callable | None  # [Totals] of the stages, over the devices
    place: tuple[Callable, ...]  # in lockstep, by architecture, see `rows.py`
    take: tuple[Callable, ...]
    zeros: tuple[Totals, ...]  # empty totals of `train` and, if there is one, `shared`
    numbers: tuple[str, ...]  # names of what is reported for each participant
    shapes: Shapes


@partial(jax.jit, static_argnums=2)
def init_client(method: Method, key: jax.Array, architecture: Architecture) -> Tree:
    """A client's start as one program: op by op it takes many seconds."""
    return method.init_client(key, architecture)


@jax.jit
def init_server(method: Method, key: jax.Array) -> Server:
    """The first broadcast as one program."""
    return method.init_server(key)


@lru_cache(maxsize=KEPT)
def compiled(form: Form) -> Compiled:
    """All programs for runs of this form, several compiled at a time."""
    shapes, found, numbers = shapes_of(form), {}, {}
    # One program is traced while others are compiled.
    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, program in traced(form, shapes):
            found.setdefault(name, []).append(pool.submit(program.compile))
            if name in ("train", "evaluate", "shared"):
                numbers |= dict.fromkeys(program.out_info.info)
        done = {name: tuple(job.result() for job in jobs) for name, jobs in found.items()}
    empty = [_zeros(_spread(form.devices, _runs(form, totals))) for totals in shapes.totals]
    return Compiled(
        **{name: done.get(name, ()) for name in ("train", "evaluate", "place", "take")},
        **{name: done.get(name, (None,))[0] for name in ("shared", "update", "sum")},
        zeros=tuple(map(form.devices.split, empty)),
        numbers=tuple(numbers),
        shapes=shapes,
    )


@lru_cache(maxsize=KEPT)
def shapes_of(form: Form) -> Shapes:
    """The shapes of a run's arrays."""
    # Numbers of a method are float32 but for the seed, its last.
    leaves = [_shape(dtype=np.float32)] * (form.method.num_leaves - 1) + [_shape(dtype=np.uint32)]
    method: Method = jax.tree.unflatten(form.method, leaves)
    key = jax.random.key(0)
    server = jax.eval_shape(init_server, method, key)
    images = _shape(form.num_images, *form.architectures[0].image_shape, dtype=np.uint8)
    key_data = jax.eval_shape(jax.random.key_data, key)
    common = Common(method, images, _shape(form.num_images), server, key_data, _shape())
    train, test = _shape(form.train_width), _shape(form.test_width)
    slot = Slots(_shape(), train, _shape(), test, _shape(), _shape(dtype=np.float32))
    starts = tuple(
        jax.eval_shape(partial(init_client, architecture=architecture), method, key)
        for architecture in form.architectures
    )
    kinds = tuple(Kind(one, (number,)) for number, one in enumerate(form.architectures))
    if form.lockstep:
        kinds = kinds_of(form.architectures, starts)
    states = tuple(
        jax.eval_shape(partial(widen, kind, form.architectures[first]), starts[first])
        for kind in kinds
        for first in kind.members[:1]
    )
    parts = {name: starts[0][name] for name in method.shared_parts}
    totals = [zero_totals(form.architectures[0], common, starts[0], slot)]
    totals += [zero_totals(None, common, parts, slot)] if parts else []
    return Shapes(common, slot, starts, kinds, states, parts, tuple(totals))


@lru_cache(maxsize=KEPT)
def client_bytes(form: Form) -> int:
    """Memory that a client in training takes on a device, at most: a model of it.

    Weights, gradients, momenta and a copy of everything that it may train, and what goes into and
    out of the products of a batch in its own and in the shared network.
    `benchmarks/gpu_programs.py` has the compiler's figures beside it.
    """
    shapes = shapes_of(form)
    method = shapes.common.method
    state = max(_bytes((state, shapes.common.server)) for state in shapes.states)
    networks = *(kind.architecture for kind in shapes.kinds), method.shared
    pass_ = max(one.activations for one in networks[:-1]) + networks[-1].activations
    rows = form.train_width + method.training.batch_size  # features of a frozen network are kept
    kept = rows * method.shared.feature_size
    return 4 * state + 4 * (pass_ * method.training.batch_size + kept)


def _bytes(tree: Tree) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def traced(form: Form, shapes: Shapes) -> Iterator[tuple[str, Any]]:
    """The programs of a run by their names in `Compiled`, traced and ready to be compiled."""
    for name, trace in _programs(form, shapes):
        if not form.stages or name in form.stages:
            yield name, trace()


def _programs(form: Form, shapes: Shapes) -> Iterator[tuple[str, Callable[[], Any]]]:
    devices, none = form.devices, Totals({}, {})

    def stage(name: str, work: Stage, architecture, state: Tree, totals: Totals, share: float):
        def trace() -> Any:
            TRACED[name] += 1
            program = over_slots(work, architecture, form.step(share), form.lockstep, form.runs)
            donate = () if work is evaluate else (2,)  # trained states take the old ones' place
            rows = form.runs * form.slots(share)
            states, slots = (_spread(devices, one, rows) for one in (state, shapes.slot))
            sums, trips = _spread(devices, _runs(form, totals)), _spread(devices, _shape())
            arguments = common, sums, states, slots, trips
            with matmul_precision(form.precision):
                return devices.lowered(program, arguments, (None, 0, 0, 0, 0), donate=donate)

        return name, trace

    common = shapes.common
    if form.runs > 1:
        common = _runs(form, common)._replace(images=common.images, labels=common.labels)
    for kind, state in zip(shapes.kinds, shapes.states, strict=True):
        about = kind.architecture, state
        yield stage("train", work, *about, shapes.totals[0], form.share(kind))
        yield stage("evaluate", evaluate, *about, none, form.share(kind))
    if shapes.parts:
        yield stage("shared", work, None, shapes.parts, shapes.totals[1], 1.0)
    for number, architecture in enumerate(form.architectures) if form.lockstep else ():
        index = next(i for i, kind in enumerate(shapes.kinds) if number in kind.members)
        kind, wide = shapes.kinds[index], shapes.states[index]
        buffer = _spread(devices, wide, form.runs * form.slots(form.share(kind)))
        state, row = _spread(devices, shapes.starts[number]), _spread(devices, _shape())
        into = partial(place, kind, architecture), (buffer, state, row), (0, 0, 0)
        yield "place", partial(devices.lowered, *into, donate=(0,))
        out = partial(take, kind, architecture), (buffer, row), (0, 0)
        yield "take", partial(devices.lowered, *out)
    if not jax.tree.leaves(shapes.totals):
        return

    def update(method: Method, server: Server, totals: list[Totals]) -> Server:
        TRACED["update"] += 1
        numerator = {name: part for stage in totals for name, part in stage.numerator.items()}
        weight = {name: part for stage in totals for name, part in stage.weight.items()}
        return method.server_update(server, average(server, numerator, weight))

    def trace_update() -> Any:
        every = jax.vmap(update) if form.runs > 1 else update
        with matmul_precision(form.precision):
            return jax.jit(every).lower(*devices.everywhere((common.method, common.server, totals)))

    totals = _runs(form, list(shapes.totals))
    yield "update", trace_update
    yield "sum", partial(devices.lowered, sum_over_devices, (_spread(devices, totals),), (0,), None)


def _runs(form: Form, tree: Tree) -> Tree:
    """Shapes with the runs in front, where there are several."""
    front = (form.runs,) if form.runs > 1 else ()
    return jax.tree.map(lambda leaf: _shape(*front, *leaf.shape, dtype=leaf.dtype), tree)


def _shape(*shape: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _spread(devices: Devices, tree: Tree, *rows: int) -> Tree:
    """Shapes with the devices, and so many rows on each, in front."""
    front = (len(devices), *rows)
    return jax.tree.map(lambda leaf: _shape(*front, *leaf.shape, dtype=leaf.dtype), tree)


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
