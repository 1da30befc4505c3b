"""Running statistics of networks (BatchNorm's means and variances) within trees of parameters.

They are the entry `batch_stats` of an extractor's parameters; no optimizer changes them. Those of
shared networks are private to each client by default, as in SiloBN: the entry `statistics` of a
client's state replaces those in the broadcast before the client uses it, and its upload has
none. With `statistics = averaged` they are sent and averaged like weights.
"""

from typing import TYPE_CHECKING, Any

import jax

from pfedafm_jax.base.trees import by_path, path_of

if TYPE_CHECKING:
    from pfedafm_jax.methods.base import Method, Server, Update
    from pfedafm_jax.models.architecture import Architecture

Tree = Any
STATISTICS = "batch_stats"  # their entry in a network's parameters
# The entry in a client's state: its statistics, by their path in the broadcast.
PRIVATE_STATISTICS = "statistics"


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


# ----------------------------------------------------------------------------- private to each client


def own_statistics(method: "Method", key: jax.Array) -> dict[str, Tree]:
    """What a client's state has in addition to its method's: its statistics of the broadcast."""
    networks = method.shared, *method.architectures
    if method.statistics == "averaged" or not any(one.statistics for one in networks):
        return {}
    own = statistics_of(method.init_server(key))
    return {PRIVATE_STATISTICS: own} if own else {}


def shared_parts_of(method: "Method", state: Tree) -> Tree:
    """The parts of a client's state that the shared stage reads, its statistics included."""
    names = (*method.shared_parts, PRIVATE_STATISTICS) if method.shared_parts else ()
    return {name: state[name] for name in names if name in state}


def received(state: Tree, server: "Server") -> tuple[Tree, "Server"]:
    """A client's state without its statistics, and the broadcast with them."""
    if PRIVATE_STATISTICS not in state:
        return state, server
    client = {name: part for name, part in state.items() if name != PRIVATE_STATISTICS}
    return client, with_statistics(server, state[PRIVATE_STATISTICS])


def kept(state: Tree, update: "Update") -> "Update":
    """The update with its statistics moved from the upload to the client's state."""
    if PRIVATE_STATISTICS not in state:
        return update
    sent = statistics_of(update.upload)
    own = {path: sent.get(path, old) for path, old in state[PRIVATE_STATISTICS].items()}
    client, upload = {**update.client, PRIVATE_STATISTICS: own}, without_statistics(update.upload)
    return update._replace(client=client, upload=upload)


def predict(
    method: "Method", architecture: "Architecture", state: Tree, server: "Server", images: jax.Array
) -> dict[str, jax.Array]:
    """`Method.predict` for a client in this state, with its own statistics."""
    return method.predict(architecture, *received(state, server), images)
