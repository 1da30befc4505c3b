"""A trained run, opened: `load_run(folder)` is the run at its last checkpoint, without its dataset.

`run.client(k)` is one of its clients and `run.join(images, labels)` trains a new one; `export.py`
writes both, and `load_client` there reads them back.
"""

import sys
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import PfedafmError, whole
from pfedafm_jax.base.trees import fitted
from pfedafm_jax.engine.programs import init_server
from pfedafm_jax.engine.state import client_start, start_number
from pfedafm_jax.engine.visit import SERVER_KEY
from pfedafm_jax.inference.client import TrainedClient, about_data, config_of, make_card, network_of
from pfedafm_jax.methods import Method, make_method
from pfedafm_jax.methods.base import Client, Server
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of
from pfedafm_jax.models import kernels
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.results.records import mean
from pfedafm_jax.results.run import Run, read_run
from pfedafm_jax.runs.checkpoint_files import kept, name_of, read_clients, read_tree
from pfedafm_jax.runs.checkpoints import Checkpoints
from pfedafm_jax.runs.existing import checkpoint_folder, differences, other_digest


class TrainedRun:
    """A run as its last usable checkpoint left it; made by `load_run`.

    Attributes:
        run: what the folder says: settings, records, summary.
        config: the settings.
        round: the round after which the weights were saved.
    """

    def __init__(self, run: Run, log: Callable[[str], Any]):
        self.run, self.folder = run, run.folder or Path()
        self.config, self._data = config_of(run.config), run.about["data"]
        if "image_shape" not in self._data:
            words = "does not say the shape of its images, as early versions did not"
            raise PfedafmError(f"{str(self.folder)!r} {words}; run its command again")
        self.num_clients = self.config.num_clients
        # Not `native` where a run had it: this may be another machine.
        kernels.choose("xla" if self.config.kernels == "xla" else "auto", log)
        self._checkpoints = Checkpoints(checkpoint_folder(self.folder), log=log)
        manifest = self._checkpoints.newest()
        if manifest is None:
            raise PfedafmError(
                f"{str(self.folder)!r} has no weights to use: it has no checkpoint in "
                f"{self._checkpoints.folder} (--drop-checkpoints of sweep and reproduce removes "
                "them, --checkpoint-every 0 makes none); its command makes them with --fresh"
            )
        others = differences(manifest["config"], self.config)
        others += other_digest("data", manifest["data"], self._data["digest"])
        if others:
            words = "\n  ".join(
                [f"{self._checkpoints.folder} has weights of another run:", *others]
            )
            raise PfedafmError(f"{words}\nput the checkpoints of {self.folder} there")
        self._manifest, self.round = manifest, int(manifest["round"])
        self.method = self.method_for()
        if not self.finished:
            log(f"{self.folder} stands after round {self.round} of {self.config.rounds}")

    @property
    def finished(self) -> bool:
        """Whether these are the weights after the last round."""
        return self.run.finished and self.round == self.config.rounds

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self._data["classes"]

    @property
    def server(self) -> Server:
        """The next broadcast."""
        return broadcast_of(self._server)

    @property
    def judged(self) -> Server:
        """What clients predict with: the next broadcast, or the running mean of broadcasts."""
        return judged_of(self._server)

    @cached_property
    def _server(self) -> Server:
        """The server's whole state."""
        key = jax.random.fold_in(jax.random.key(self.config.seed), SERVER_KEY)
        start = jax.device_get(init_server(self.method, key))
        with kept(self._part(self.round)) as folder:
            saved = read_tree(folder / "run").get("server", {})
        # `relay` is what one client leaves to the next in rounds of the released code.
        return fitted(start, {n: leaf for n, leaf in saved.items() if not n.startswith("relay.")})

    def client(self, number: int) -> TrainedClient:
        """One of the clients, 0 to N - 1."""
        accepted = f"0 to {self.num_clients - 1}, the clients of this run"
        number = whole("client", number, self.num_clients, accepted)
        group = number % len(self.method.architectures)
        architecture = self.method.architectures[group]
        state = self._start(number, group)
        if self.run.about.get("nodes") and jax.tree.leaves(state):
            raise PfedafmError(
                f"what client {number} keeps for itself is with its node (its --state), which predict "
                "and export take as RUN; this run has what clients share"
            )
        for part in reversed(self._manifest["parts"]):
            with kept(self._part(part)) as folder:
                saved = (
                    {name: leaf[row] for name, leaf in states.items()}
                    for _, clients, states in read_clients(folder, group)
                    for row in np.flatnonzero(clients == number)
                )
                last = next(saved, None)
            if last is not None:
                state = fitted(state, last)
                break  # otherwise it has its initial weights
        card = self.card(architecture, number)
        return TrainedClient(self.method, architecture, state, self.judged, card)

    def join(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        architecture: str | None = None,
        visits: int = 5,
        **options: Any,
    ) -> TrainedClient:
        """Trains a new client without changing the run. See `newcomer.join`."""
        from pfedafm_jax.inference.newcomer import join  # here, since it imports this module

        return join(self, images, labels, architecture, visits, **options)

    # ---------------------------------------------------------------------------- parts

    def _part(self, number: int) -> Path:
        return self._checkpoints.folder / name_of(number)

    def architecture(self, name: str) -> Architecture:
        """The network of this name, for the run's images and classes."""
        return network_of(name, self.config, self._data)

    def method_for(self, sizes: list[int] | None = None) -> Method:
        """The method; `sizes` are numbers of training images, if clients are to train."""
        return make_method(self.config, num_train=sizes or [1], **about_data(self._data))

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of training images of the run's clients."""
        parts = self.run.partition
        if parts is None:  # of a run over a network, where nodes have the samples
            return self.run.about.get("num_train", [1])
        return [len(rows) for rows in parts.train]

    def _start(self, number: int, group: int) -> Client:
        own = start_number(self.config, self.method, number, group)
        key = jax.random.key(self.config.seed)
        return client_start(self.method, key, own, self.method.architectures[group])

    def card(self, architecture: Architecture, number: int | None) -> dict[str, Any]:
        """A client's origin as JSON values; `number` None: a newcomer."""
        about, summary = self.run.about, self.run.summary
        accuracy = {}
        if self.finished and number is not None:
            for name in self.run.predictions:
                own = name == self.run.predictions[0]
                rows = self.run.clients[f"all_clients/accuracy{'' if own else '/' + name}"]
                accuracy[name] = mean(rows[-1:, number])
        of_run = ("best_mean_accuracy", "last_ten_mean_accuracy", "final_all_clients_accuracy")
        return make_card(
            self.method,
            architecture,
            number,
            round=self.round,
            finished=self.finished,
            accuracy=accuracy,
            run={name: getattr(summary, name) for name in of_run} if self.finished else {},
            predictions=about["predictions"],
            data=about["data"],
            config=self.run.config,
            versions=about["versions"],
        )


def load_run(folder: str | Path, log: Callable[[str], Any] | None = None) -> TrainedRun:
    """Opens a run, finished or not, to use what it trained; its dataset is not needed.

    Args:
        folder: that of the run (`runs/NAME`); your own methods and networks must be registered.
        log: called about skipped, damaged checkpoints and an unfinished run; prints to standard
            error by default.
    """
    return TrainedRun(read_run(folder), log or partial(print, file=sys.stderr))
