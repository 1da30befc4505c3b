"""pFedAFM as a PyTorch loop over clients: as a careful user would write it, and as released.

Both have the layers, batches, losses and optimizer of this project; their data is one float tensor,
normalised before the clock starts. They differ in what is in the graph:

careful   phase 1: the shared extractor under `no_grad`; phase 2: it and the frozen header alone
cached    the same, the frozen features computed once per visit; `torch_processes.py` runs it
released  phase 1: the shared extractor's forward and backward pass too, its gradients never used;
          phase 2: the local model's forward and backward pass too, its features multiplied by zero

Other causes of slowness in the released scripts (anomaly detection, a data loader that prepares
images one by one, three evaluations) are left out. The careful one tries both memory layouts and
both kinds of SGD, and takes the fastest.
"""

import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from common import Work
from torch import Tensor, nn

from pfedafm_jax.models.architecture import describe
from pfedafm_jax.training.accuracy import EVALUATION_BATCH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a GPU if there is one, as ours
# (round, client, phase, epoch) → positions of a client's samples
Order = Callable[[int, int, int, int], np.ndarray]


class Extractor(nn.Module):
    """A network of the paper's Table 1 without its header."""

    def __init__(self, image_shape: tuple[int, int, int], conv2: int, fc1: int, features: int):
        super().__init__()
        height, width, channels = image_shape
        self.conv1, self.conv2 = nn.Conv2d(channels, 16, 5), nn.Conv2d(16, conv2, 5)
        for _ in range(2):
            height, width = (height - 4) // 2, (width - 4) // 2
        self.fc1, self.fc2 = nn.Linear(conv2 * height * width, fc1), nn.Linear(fc1, features)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        hidden = functional.max_pool2d(functional.relu(self.conv2(hidden)), 2)
        hidden = functional.relu(self.fc1(hidden.flatten(1)))
        return functional.relu(self.fc2(hidden))


class Client(nn.Module):
    """What a client keeps: local extractor, header, mix vector."""

    def __init__(self, extractor: Extractor, features: int, classes: int):
        super().__init__()
        self.extractor, self.header = extractor, nn.Linear(features, classes)
        self.mix = nn.Parameter(torch.ones(features))

    @property
    def model(self) -> list[nn.Parameter]:
        """Extractor and header, whose gradients are clipped together."""
        return [*self.extractor.parameters(), *self.header.parameters()]


class TorchLoop:
    """All clients in a dictionary, one after the other on all cores."""

    def __init__(
        self,
        work: Work,
        released: bool = False,
        cached: bool = False,
        order: Order | None = None,
        threads: int = 0,
    ):
        self.config, self.partition = work.config, work.partition
        self.released, self.cached = released, cached
        torch.set_default_device(DEVICE)
        rough = self.config.precision != "highest"
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = rough
        torch.set_num_threads(threads or os.cpu_count() or 1)
        torch.manual_seed(self.config.seed)
        self.order = order or self._random_order
        dataset, features = work.dataset, self.config.feature_size
        classes, shape = dataset.num_classes, dataset.image_shape
        pixels = as_tensor(dataset.images).float() / 255  # [all, height, width, channels]
        self.pixels = (pixels - torch.tensor(dataset.mean)) / torch.tensor(dataset.std)
        self.labels = as_tensor(dataset.labels).long()
        self.batch_size, self.fused, self.channels_last = self.config.batch_size, False, True

        def extractor(name: str) -> Extractor:
            found: Any = describe(name, classes, shape, features).extractor
            return Extractor(shape, found.conv2, found.fc1, features)

        names = self.config.architectures
        self.starts = [Client(extractor(name), features, classes) for name in names]
        self.shared = extractor(self.config.shared_extractor)
        self.clients: dict[int, Client] = {}

    def _random_order(self, number: int, client: int, phase: int, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self.config.seed, number, client, phase, epoch])
        return generator.permutation(len(self.partition.train[client]))

    # ----------------------------------------------------------------------------- before the clock

    def prepare(self, batch_size: int) -> dict[str, Any]:
        """Sets the batch size and, unless as released, the fastest layout and optimizer."""
        self.batch_size = batch_size
        if self.released:
            self.set_layout(channels_last=False)
        else:
            torch.set_flush_denormal(True)
            seconds: dict[tuple[bool, bool], float] = {}
            for channels_last, fused in itertools.product((False, True), (False, True)):
                self.set_layout(channels_last)
                self.fused = fused
                seconds[channels_last, fused] = self._try()
            channels_last, self.fused = min(seconds, key=lambda choice: seconds[choice])
            self.set_layout(channels_last)
        self.round(0, range(min(len(self.starts), self.config.num_clients)))
        chosen = {"channels_last": self.channels_last, "fused": self.fused}
        return {**chosen, "threads": torch.get_num_threads()}

    def set_layout(self, channels_last: bool) -> None:
        """Puts images and networks into this memory layout."""
        if channels_last != self.channels_last:
            axes = (0, 2, 3, 1) if channels_last else (0, 3, 1, 2)
            self.pixels = self.pixels.permute(axes).contiguous()
        self.channels_last = channels_last
        layout = torch.channels_last if channels_last else torch.contiguous_format
        for module in (*self.starts, self.shared, *self.clients.values()):
            module.to(memory_format=layout)  # pyright: ignore[reportCallIssue]

    def _try(self) -> float:
        """Seconds of a few steps of the first architecture: the fastest of several."""
        client, seconds = copy.deepcopy(self.starts[0]), []
        rows = np.resize(self.partition.train[0], self.batch_size)
        for _ in range(4):
            start = time.perf_counter()
            self._train_local_model(client, iter([(*self.images_of(rows), torch.arange(0))]))
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    # -------------------------------------------------------------------------------------- a round

    def round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """One round of these clients: seconds, mean loss, mean accuracy."""
        start = time.perf_counter()
        samples = sum(len(self.partition.train[client]) for client in participants)
        total = {name: torch.zeros_like(value) for name, value in self.shared.state_dict().items()}
        visits = self.visits(number, participants, total, samples)
        self.shared.load_state_dict(total)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        loss, accuracy = np.mean(visits, axis=0).tolist()
        return {"seconds": time.perf_counter() - start, "loss": loss, "accuracy": accuracy}

    def visits(
        self, number: int, participants: Sequence[int], total: dict[str, Tensor], samples: int
    ) -> list[tuple[float, float]]:
        """Loss and accuracy of these clients; adds their uploads, weighted, to `total`."""
        found = []
        for client in participants:
            loss, accuracy, trained = self.visit(number, client)
            found.append((loss, accuracy["mixed"]))
            with torch.no_grad():
                for name, value in trained.state_dict().items():
                    share = len(self.partition.train[client]) / samples
                    total[name].add_(value.to(total[name].device), alpha=share)
        return found

    def visit(self, number: int, client: int) -> tuple[float, dict[str, float], Extractor]:
        """A participant's two phases: its loss, its accuracies after phase 1, what it uploads."""
        if client not in self.clients:
            self.clients[client] = copy.deepcopy(self.starts[client % len(self.starts)])
        own = self.clients[client]
        features = self._shared_features(client) if self.cached else None
        loss = self._train_local_model(own, self.batches(number, client, 1), features)
        accuracy = self.accuracy(client)
        trained = copy.deepcopy(self.shared)
        self._train_shared_extractor(own, trained, self.batches(number, client, 2))
        return loss, accuracy, trained

    def images_of(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        index = as_tensor(rows.astype(np.int64))
        images = self.pixels[index]
        return images.permute(0, 3, 1, 2) if self.channels_last else images, self.labels[index]

    @torch.no_grad()
    def _shared_features(self, client: int) -> Tensor:
        """Features of all training images of a client by the frozen extractor, by position."""
        rows, size = self.partition.train[client], self.batch_size
        blocks = [rows[first : first + size] for first in range(0, len(rows), size)]
        return torch.cat([self.shared(self.images_of(block)[0]) for block in blocks])

    def batches(
        self, number: int, client: int, phase: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images, labels, positions of all local epochs; the last batch of each may be short."""
        rows = self.partition.train[client]
        for epoch in range(self.config.local_epochs):
            order = self.order(number, client, phase, epoch)
            for start in range(0, len(rows), self.batch_size):
                chosen = order[start : start + self.batch_size]
                yield *self.images_of(rows[chosen]), as_tensor(chosen)

    def _sgd(self, groups: list[dict[str, Any]]) -> torch.optim.SGD:
        kind: Any = {} if self.released else {"fused" if self.fused else "foreach": True}
        kind |= {"momentum": self.config.momentum, "weight_decay": self.config.weight_decay}
        return torch.optim.SGD(groups, lr=self.config.rate, **kind)

    def _step(self, optimizer: torch.optim.SGD, loss: Tensor, params: list[nn.Parameter]) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        foreach = None if self.released else True
        nn.utils.clip_grad_norm_(params, self.config.clip_norm, foreach=foreach)
        optimizer.step()

    def _train_local_model(
        self,
        client: Client,
        batches: Iterator[tuple[Tensor, Tensor, Tensor]],
        features: Tensor | None = None,
    ) -> float:
        """Phase 1: local extractor, header and mix vector learn from the mixed features."""
        own, model = self.config.pfedafm, client.model
        client.requires_grad_(True)
        self.shared.requires_grad_(self.released)
        rates = {"lr": own.mix_learning_rate, "weight_decay": 0.0}
        optimizer = self._sgd([{"params": model}, {"params": [client.mix], **rates}])
        total, seen = torch.zeros(()), 0
        for images, labels, positions in batches:
            with torch.set_grad_enabled(self.released):
                shared = self.shared(images) if features is None else features[positions]
            mixed = torch.lerp(shared, client.extractor(images), client.mix)
            loss = functional.cross_entropy(client.header(mixed), labels)
            self._step(optimizer, loss, model)
            with torch.no_grad():
                client.mix.clamp_(0, 1)
            total, seen = total + loss.detach() * len(labels), seen + len(labels)
        self.shared.zero_grad(set_to_none=True)
        return float(total) / seen

    def _train_shared_extractor(
        self, client: Client, shared: Extractor, batches: Iterator[tuple[Tensor, Tensor, Tensor]]
    ) -> None:
        """Phase 2: the shared extractor learns under the client's frozen header."""
        client.requires_grad_(self.released)
        shared.requires_grad_(True)
        params = list(shared.parameters())
        optimizer = self._sgd([{"params": params}])
        nothing = torch.zeros_like(client.mix)
        for images, labels, _ in batches:
            features = shared(images)
            if self.released:
                features = torch.lerp(features, client.extractor(images), nothing)
            loss = functional.cross_entropy(client.header(features), labels)
            self._step(optimizer, loss, params)
        client.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def accuracy(self, client: int) -> dict[str, float]:
        """A client's test accuracies with mixed, shared and local features."""
        own, rows = self.clients[client], self.partition.test[client]
        right: dict[str, int] = {"mixed": 0, "small": 0, "large": 0}
        for start in range(0, len(rows), EVALUATION_BATCH):
            images, labels = self.images_of(rows[start : start + EVALUATION_BATCH])
            small, large = self.shared(images), own.extractor(images)
            mixed = torch.lerp(small, large, own.mix)
            for name, features in (("mixed", mixed), ("small", small), ("large", large)):
                right[name] += int((own.header(features).argmax(1) == labels).sum())
        return {name: count / max(len(rows), 1) for name, count in right.items()}


# ------------------------------------------------------------------------------- weights in and out


def as_tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array)).to(DEVICE)


@torch.no_grad()
def load_extractor(extractor: Extractor, params: dict[str, Any]) -> None:
    """Copies weights from this project's tree, whose images and kernels have channels last."""
    for name in ("conv1", "conv2"):
        layer = getattr(extractor, name)
        layer.weight.copy_(as_tensor(params[name]["kernel"]).permute(3, 2, 0, 1))
        layer.bias.copy_(as_tensor(params[name]["bias"]))
    kernel = as_tensor(params["fc1"]["kernel"])  # [rows · columns · channels, outputs]
    kernel = kernel.unflatten(0, (-1, extractor.conv2.out_channels)).transpose(0, 1).flatten(0, 1)
    load_linear(extractor.fc1, {"kernel": kernel.cpu().numpy(), "bias": params["fc1"]["bias"]})
    load_linear(extractor.fc2, params["fc2"])


@torch.no_grad()
def load_linear(layer: nn.Linear, params: dict[str, Any]) -> None:
    """Copies a dense layer's weights from this project's tree."""
    layer.weight.copy_(as_tensor(params["kernel"]).T)
    layer.bias.copy_(as_tensor(params["bias"]))


@torch.no_grad()
def load_client(client: Client, state: dict[str, Any]) -> None:
    """Copies a client's state from this project's tree."""
    load_extractor(client.extractor, state["local_extractor"])
    load_linear(client.header, state["header"])
    client.mix.copy_(as_tensor(state["mix"]))
