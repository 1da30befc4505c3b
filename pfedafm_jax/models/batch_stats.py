"""Running statistics of networks (BatchNorm's means and variances) within trees of parameters.

They are the entry `batch_stats` of an extractor's parameters; no optimizer changes them. Those of
shared networks are private to each client by default, as in SiloBN (`engine/visit.py`); with
`statistics = averaged` they are sent and averaged like weights.
"""

from typing import Any

import jax

from pfedafm_jax.base.trees import by_path, path_of

Tree = Any
STATISTICS = "batch_stats"  # their entry in a network's parameters


def statistics_of(tree: Tree) -> dict[str, Any]:
    """The statistics in a tree, by their paths."""
    return {path: leaf for path, leaf in by_path(tree).items() if STATISTICS in path.split(".")}


def with_statistics(tree: Tree, statistics: dict[str, Any]) -> Tree:
    """The tree with these statistics at their paths; None removes them."""
    if not statistics:
        return tree

    def put(path: tuple, leaf: Any) -> Any:
        return statistics.get(path_of(path), leaf)

    return jax.tree_util.tree_map_with_path(put, tree, is_leaf=lambda leaf: leaf is None)


def without_statistics(tree: Tree) -> Tree:
    """The tree with None for its statistics: only weights."""
    return with_statistics(tree, dict.fromkeys(statistics_of(tree)))
