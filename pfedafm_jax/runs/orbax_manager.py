"""Orbax's CheckpointManager, with our files of arrays as the content of a checkpoint.

Orbax makes a checkpoint appear whole or not at all and removes those that are no longer wanted. What
stands in it is ours: one file for each item, with a digest, which Orbax's own arrays do not have,
and which `predict` reads without Orbax. A module of its own, since the import takes time that only
training needs.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from pfedafm_jax.base.array_files import SUFFIX, About, Arrays, read_arrays, write_arrays

ITEM_FILE = f"arrays{SUFFIX}"

# Orbax logs every folder; its errors are raised as well.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class ArraysHandler(ocp.CheckpointHandler):
    """Writes an item of a checkpoint as one file of arrays."""

    def save(self, directory: Any, args: "SaveArrays") -> None:
        write_arrays(Path(directory) / ITEM_FILE, args.arrays, args.about)

    def restore(self, directory: Any, args: Any = None) -> tuple[Arrays, About]:
        return read_arrays(Path(directory) / ITEM_FILE)


@ocp.args.register_with_handler(ArraysHandler, for_save=True, for_restore=True)
@dataclass
class SaveArrays(ocp.args.CheckpointArgs):
    """An item of a checkpoint; see `write_arrays`."""

    arrays: Mapping[str, Any] = field(default_factory=dict)
    about: About = field(default_factory=dict)


class Wanted:
    """Asks somebody else which checkpoints to keep."""

    def __init__(self, wanted: Callable[[list[int]], set[int]]):
        self._wanted = wanted

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        rounds = [checkpoint.step for checkpoint in checkpoints]
        kept = self._wanted(rounds)
        return [t in kept for t in rounds]


class RoundsManager:
    """The checkpoints of a run in one folder, `000035/` for round 35, written by one process.

    Args:
        folder: `rounds` of a run's weights; whatever in it has such a name is taken for ours.
        wanted: from the rounds that there are checkpoints of, oldest first, to those to keep.
    """

    def __init__(self, folder: Path, wanted: Callable[[list[int]], set[int]]):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([Wanted(wanted)]),
            step_format_fixed_length=6,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            create=False,  # Orbax does not where only one process writes
            # The caller has a thread of its own, which also writes the clients.
            enable_async_checkpointing=False,
            # Other processes have their clients' files to write, and nothing here to wait for.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=0, active_processes={0}, barrier_sync_key_prefix="checkpoints"
            ),
        )
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, t: int, items: Mapping[str, tuple[Arrays, About]]) -> set[int]:
        """Writes a checkpoint, then removes those that are no longer wanted.

        Args:
            t: its round.
            items: arrays and what is said of them, by name.

        Returns:
            The rounds that are left.
        """
        arguments = {name: SaveArrays(arrays, about) for name, (arrays, about) in items.items()}
        try:
            saved = self._manager.save(t, args=ocp.args.Composite(**arguments))
        except BaseException:
            # Room is made at once, since the disk may be full.
            for unfinished in self.folder.glob(f"{t:06d}.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if not saved:  # Orbax says nothing where it has this round, or a later one
            raise FileExistsError(f"{self.folder} has a checkpoint of round {t} or later already")
        return set(self._manager.all_steps())

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()
