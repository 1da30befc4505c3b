"""Runs extractors of all kinds: Flax Linen or NNX, with running statistics and dropout.

Such a network behaves differently in training and in evaluation. Methods do not say which: inside
the loss that `train` differentiates, a network whose arrays are being trained is in training mode;
every other call (of frozen networks, for predictions) is in evaluation mode.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import InvalidRngError, ModifyScopeVariableError

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.models.batch_stats import STATISTICS, statistics_of
from pfedafm_jax.models.kernels.layers import hasten

Tree = Any
DROPOUT_KEY = 2**21  # for the first network in a step; above any index of an image in a batch
# Arguments of modules that select training mode, and their values for it.
SWITCHES = {"train": True, "training": True, "is_training": True, "deterministic": False,
            "use_running_average": False}  # fmt: skip


class Step:
    """A training step while its loss is traced."""

    def __init__(self, params: Tree, key: jax.Array, weights: jax.Array):
        self.params = params  # kept alive, so that no other object gets an id used below
        self.key, self.weights = key, weights
        self._trained = {id(leaf) for leaf in jax.tree.leaves(params)}
        self._moved: dict[int, Any] = {}  # id of old statistics → those after a call
        self._calls = 0

    def trains(self, tree: Tree) -> bool:
        """Whether any of these arrays is being trained."""
        return any(id(leaf) in self._trained for leaf in jax.tree.leaves(tree))

    def next_key(self) -> jax.Array:
        self._calls += 1
        return jax.random.fold_in(self.key, DROPOUT_KEY + self._calls)

    def newest(self, statistics: Tree) -> Tree:
        """Statistics as earlier calls in this step left them."""
        return jax.tree.map(lambda leaf: self._moved.get(id(leaf), leaf), statistics)

    def move(self, old: Tree, new: Tree) -> None:
        jax.tree.map(lambda leaf, other: self._moved.update({id(leaf): other}), old, new)

    def statistics(self) -> dict[str, jax.Array]:
        """The trained networks' statistics after the step, by their paths."""
        found = statistics_of(self.params)
        if found and not self._moved:
            raise PfedafmError(
                "a loss has not called `extract` with the networks that are trained, as they are in "
                "its first argument, so their statistics would never move"
            )
        return {path: self._moved.get(id(leaf), leaf) for path, leaf in found.items()}


_STEP: ContextVar[Step | None] = ContextVar("step", default=None)
# Weights of a batch's rows while a network runs in training; None: in evaluation.
_ROWS: ContextVar[jax.Array | None] = ContextVar("rows", default=None)


@contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def training(params: Tree, key: jax.Array, weights: jax.Array) -> AbstractContextManager[Step]:
    """A context for tracing a loss of `params`, on a batch whose rows have these weights."""
    return _set(_STEP, Step(params, key, weights))


def run(network: nn.Module, tree: Tree, images: jax.Array, random: bool) -> jax.Array:
    """Features of images; `random` says whether the network needs a key in training."""
    step = _STEP.get()
    step = step if step is not None and step.trains(tree) else None
    variables: Any = {"params": {name: tree[name] for name in tree if name != STATISTICS}}
    before = tree.get(STATISTICS)
    if before is not None:
        variables[STATISTICS] = before if step is None else step.newest(before)
    if step is None:
        with _set(_ROWS, None), nn.intercept_methods(_in_mode):
            return network.apply(variables, images)  # pyright: ignore[reportReturnType]
    # In any other batch than the step's own, all rows are real.
    own = len(images) == len(step.weights)
    rows = step.weights if own else jnp.ones(len(images), jnp.float32)
    rngs = {"dropout": step.next_key()} if random else None
    with _set(_ROWS, rows), nn.intercept_methods(_in_mode):
        features, after = network.apply(variables, images, rngs=rngs, mutable=[STATISTICS])
    if before is not None:
        step.move(before, after[STATISTICS])
    return features


def init(network: nn.Module, key: jax.Array, images: jax.Array) -> dict[str, Tree]:
    """A network's initial variables, by collection."""
    with _set(_ROWS, None), nn.intercept_methods(_in_mode):
        return dict(network.init(key, images))


def joined(variables: dict[str, Tree]) -> Tree:
    """Parameters and, if there are any, statistics as one tree."""
    statistics = variables.get(STATISTICS)
    return {**variables.get("params", {}), **({STATISTICS: statistics} if statistics else {})}


def checked_features(output: Any) -> Any:
    """An extractor's output, checked to be floats `[batch, width]`."""
    if not hasattr(output, "dtype"):
        raise PfedafmError(f"gives {type(output).__name__}, expected one array [batch, width]")
    if not jnp.issubdtype(output.dtype, jnp.floating):
        raise PfedafmError(f"gives {output.dtype}, expected floats")
    return output


def check(network: nn.Module, images: Any, width: int) -> None:
    """Raises if the network cannot be an extractor of this width for images of this shape."""
    variables = jax.eval_shape(partial(init, network), jax.random.key(0), images)
    extra = sorted(set(variables) - {"params", STATISTICS})
    if extra:
        kinds = f"parameters and {STATISTICS} ({', '.join(extra)})"
        raise PfedafmError(f"carries state besides {kinds}, which cannot be kept or averaged")
    try:
        output = jax.eval_shape(partial(run, network, random=False), joined(variables), images)
    except ModifyScopeVariableError:
        problem = "changes its statistics in evaluation, too: leave use_running_average out"
        raise PfedafmError(problem) from None
    if checked_features(output).shape != (1, width):
        raise PfedafmError(f"gives {output.shape} for one image, expected (1, {width})")
    if not jax.tree.leaves(variables):
        raise PfedafmError("has no parameters, so there is nothing to train")


def is_random(network: nn.Module, tree: Tree, images: Any) -> bool:
    """Whether the network needs a key in training; raises if it cannot be trained."""
    two = jax.ShapeDtypeStruct((2, *images.shape[1:]), images.dtype)

    def features(random: bool, tree: Tree, images: jax.Array) -> jax.Array:
        with training(tree, jax.random.key(0), jnp.ones(2, jnp.float32)):
            return run(network, tree, images, random)

    try:
        jax.eval_shape(partial(features, False), tree, two)
    except InvalidRngError:
        jax.eval_shape(partial(features, True), tree, two)
        return True
    return False


# --------------------------------------------------------------------------- what layers are told


def real_rows(inputs: jax.Array) -> jax.Array | None:
    """Mask of a layer's real input rows, bool `[batch, 1, …]`; None in evaluation."""
    rows = _ROWS.get()
    if rows is None:
        return None
    if len(inputs) != len(rows):
        raise PfedafmError(
            f"normalises {inputs.shape} over a batch of {len(rows)}: the first axis of what BatchNorm "
            "is given must be the batch"
        )
    # A finished client in lockstep has a batch of padding: dropped, but it must be finite.
    real = jnp.where(jnp.any(rows > 0), rows > 0, True)
    return real.reshape(-1, *(1,) * (inputs.ndim - 1))


def _in_mode(function: Callable, arguments: tuple, options: dict, context: Any) -> Any:
    """Puts Linen modules into training or evaluation mode, unless their owner has done so."""
    if context.method_name == "__call__":
        module, in_training = context.module, _ROWS.get() is not None
        taken = inspect.signature(context.orig_method)
        given = taken.bind_partial(*arguments, **options).arguments
        free = taken.parameters.keys() - given.keys()
        for name, value in SWITCHES.items():
            if name in free and getattr(module, name, None) is None:
                options[name] = value if in_training else not value
        if isinstance(module, nn.BatchNorm) and given.get("mask") is None:
            options["mask"] = real_rows(arguments[0])
    return function(*arguments, **options)


class FromNNX(nn.Module):
    """An NNX module as a Linen one; `make(rngs=…)` builds it."""

    make: Callable[..., nnx.Module]

    @nn.compact
    def __call__(self, images):
        in_training = _ROWS.get() is not None
        if self.is_initializing():
            module = self._made(self.make_rng("params"))
            _, params, statistics, _, other = _parts(module)
            self._put(params=params, batch_stats=statistics, other=other)
        else:
            shape = nnx.eval_shape(lambda: self._made(jax.random.key(0)))
            graph, params, statistics, rngs, other = _parts(shape)
            nnx.replace_by_pure_dict(params, dict(self.variables["params"]))
            if statistics:
                nnx.replace_by_pure_dict(statistics, dict(self.variables[STATISTICS]))
            if rngs:
                key = self.make_rng("dropout") if in_training else jax.random.key(0)
                nnx.replace_by_pure_dict(rngs, _seeded(nnx.to_pure_dict(rngs), key))
            module = nnx.merge(graph, params, statistics, rngs, other)
        module.train() if in_training else module.eval()
        for _, one in list(nnx.iter_modules(module)):
            hasten(one)
            if isinstance(one, nnx.BatchNorm):
                one.__class__ = _masked(type(one))
        features = module(images)  # pyright: ignore[reportCallIssue]
        if in_training:
            self._put(batch_stats=nnx.state(module, nnx.BatchStat))
        return features

    def _made(self, key: jax.Array) -> nnx.Module:
        module = self.make(rngs=nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise PfedafmError(
                f"is made by a function that gives {type(module).__name__}, no module"
            )
        return module

    def _put(self, **states: Any) -> None:
        for collection, state in states.items():
            for name, value in nnx.to_pure_dict(state).items():
                self.put_variable(collection, str(name), value)


def _parts(module: nnx.Module) -> Any:
    return nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)


def _seeded(rngs: Tree, key: jax.Array) -> Tree:
    """New streams of random numbers, each with its own key and a count of zero."""
    leaves, structure = jax.tree.flatten(rngs)
    keys = jax.random.split(key, len(leaves))
    fresh = [
        keys[place]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros((), leaf.dtype)
        for place, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, fresh)


@lru_cache
def _masked(kind: type) -> type:
    """NNX's BatchNorm without padding; a subclass, since NNX has no interceptors."""

    class Masked(kind):
        def __call__(self, x, use_running_average=None, *, mask=None):
            mask = real_rows(x) if mask is None else mask
            return super().__call__(x, use_running_average, mask=mask)

    return Masked
