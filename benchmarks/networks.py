"""A training step of networks with `nn.Conv`: ours in a compiled loop beside PyTorch's, in turns.

Forward, backward and SGD with momentum, a batch of 64 images of 32x32 pixels, on one core with one
thread. The clock is the process's own CPU time, the least of some repeats, so that other load on
the machine matters little. PyTorch runs in both memory layouts. `--xla` adds XLA's convolutions.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.base.errors import bad
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.models import kernels
from pfedafm_jax.models.architecture import Architecture, describe
from pfedafm_jax.models.resnet import GROUP

NETWORKS = {"mobilenet_small": 6, "resnet_small": 3, "resnet18": 1}  # and steps in a loop
RATES = {"learning_rate": 0.01, "momentum": 0.9}
Steps = Callable[[], float]  # some steps; returns the last loss


def ours(network: Architecture, images: np.ndarray, labels: np.ndarray, steps: int) -> Steps:
    """Compiled steps of a network as it is trained here."""

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        scores = network.classify(params[1], network.extract(params[0], images))
        chosen = jnp.take_along_axis(scores, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=1) - chosen)

    def run(params: Any, images: jax.Array, labels: jax.Array):
        def step(_: int, carry: tuple) -> tuple:
            params, momenta, _ = carry
            value, slopes = jax.value_and_grad(loss)(params, images, labels)
            return *kernels.sgd(params, momenta, slopes, **RATES), value

        start = params, jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
        return lax.fori_loop(0, steps, step, start)  # all of it, or one step would end at the loss

    params = jax.jit(lambda key: (network.init_extractor(key), network.init_header(key)))
    arrays = params(jax.random.key(0)), images, labels
    program = jax.jit(run).lower(*arrays).compile()
    return lambda: float(program(*arrays)[2])


def torch_network(name: str, network: Architecture) -> Any:
    """The same layers in PyTorch; pads of strided layers are on both sides, ours on one."""
    from torch import nn

    def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> Any:
        options = {"padding": size // 2, "groups": groups, "bias": False}
        layer = nn.Conv2d(inputs, outputs, size, stride, **options)
        return nn.Sequential(layer, nn.GroupNorm(outputs // GROUP, outputs, eps=1e-6))

    class Residual(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int):
            super().__init__()
            first = conv(inputs, outputs, stride=stride), nn.ReLU(), conv(outputs, outputs)
            same = inputs == outputs and stride == 1
            beside = nn.Identity() if same else conv(inputs, outputs, 1, stride)
            self.first, self.beside = nn.Sequential(*first), beside

        def forward(self, images: Any) -> Any:
            return nn.functional.relu(self.first(images) + self.beside(images))

    def separable(inputs: int, outputs: int, stride: int) -> Any:
        alone = conv(inputs, inputs, stride=stride, groups=inputs)
        return nn.Sequential(alone, nn.ReLU(), conv(inputs, outputs, 1), nn.ReLU())

    module: Any = network.extractor.extractor  # pyright: ignore
    layers, last = [conv(3, module.widths[0]), nn.ReLU()], module.widths[0]
    for index, width in enumerate(module.widths):
        for block in range(getattr(module, "blocks", 1)):
            stride = 2 if index and not block else 1
            layers.append((separable if "mobile" in name else Residual)(last, width, stride))
            last = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, network.feature_size)]
    return nn.Sequential(*layers, nn.Linear(network.feature_size, network.num_classes))


def torch_steps(model: Any, images: np.ndarray, labels: np.ndarray, steps: int, last: bool):
    """Steps in PyTorch, with channels first or last in memory."""
    import torch

    torch.set_num_threads(1)
    form = torch.channels_last if last else torch.contiguous_format
    model = model.to(memory_format=form)
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2)).contiguous(memory_format=form)
    goals = torch.from_numpy(labels).long()
    sgd = torch.optim.SGD(model.parameters(), lr=RATES["learning_rate"], momentum=RATES["momentum"])

    def run() -> float:
        for _ in range(steps):
            sgd.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(pixels), goals)
            loss.backward()
            sgd.step()
        return float(loss.detach())

    return run


def measure(name: str, repeats: int, xla: bool = False, batch: int = 64, side: int = 32):
    """Milliseconds of a step of each contender, and that of PyTorch's better layout over ours."""
    rng, steps = np.random.default_rng(0), NETWORKS[name]
    images = rng.normal(size=(batch, side, side, 3)).astype(np.float32)
    labels = rng.integers(0, 10, batch).astype(np.int32)
    network = describe(name, num_classes=10, image_shape=(side, side, 3))
    found: dict[str, float] = {}
    runs: dict[str, Steps] = {}
    for kind in ("native", "xla") if xla else ("native",):
        with kernels.using(kind):
            runs[kind] = ours(network, images, labels, steps)
    for kind in ("torch_first", "torch_last"):
        model = torch_network(name, network)
        assert sum(one.numel() for one in model.parameters()) == network.params
        runs[kind] = torch_steps(model, images, labels, steps, kind == "torch_last")
    for run in runs.values():
        assert np.isfinite(run())
    for _ in range(repeats):
        for kind, run in runs.items():
            begin = time.process_time()
            run()
            seconds = (time.process_time() - begin) / steps
            found[kind] = min(found.get(kind, np.inf), 1e3 * seconds)
    best = min(found["torch_first"], found["torch_last"])
    return {**found, "ratio": round(found["native"] / best, 3)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser("benchmarks/networks.py", description=__doc__)
    made.add_argument("--networks", default=",".join(NETWORKS), help="which (%(default)s)")
    made.add_argument("--xla", action="store_true", help="XLA's own convolutions too: minutes")
    made.add_argument("--repeats", type=int, default=5, metavar="R", help="of each (%(default)s)")
    made.add_argument("--json", metavar="FILE", help="write the numbers")
    return made.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """The command."""
    options = parse(argv)
    names = options.networks.split(",")
    if unknown := set(names) - set(NETWORKS):
        raise bad("networks", min(unknown), ", ".join(NETWORKS))
    path = common.writable(options.json, "json")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, so one thread of XLA's
    results: dict[str, Any] = {"machine": common.machine()}
    for name in names:
        results[name] = measure(name, options.repeats, options.xla)
        print(name, *(f"{kind} {value:.4g}" for kind, value in results[name].items()), flush=True)
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    guarded(main)
