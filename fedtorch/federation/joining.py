"""The server's state when clients join a run that was started without them.

The state equals that of a run which has had these clients from its start and has never asked them. Joining clients are
numbered after the others and are in the initial state. Totals grow by their contributions, and parts that
`Algorithm.init` derives from the number of clients are derived from the new number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import sum_over
from fedtorch.tree import Tree

_TOTAL = "total"  # the state's field with the total of contributions
_PREFIX = f"server.{_TOTAL}"

Begin = Callable[[int], tuple[Tree, Tree]]  # clients -> (the server's state, one client's state) before the first round


def joined(algorithm: Algorithm, begin: Begin, flat: Mapping[str, Tensor], before: int, now: int) -> Tree:
    """Convert the server's state of a checkpoint with `before` clients to `now` clients; see `adds` for totals.

    Raises:
        ValueError: the state depends on the clients in another way, or a privacy budget does.
    """
    if algorithm.budget is not None and not algorithm.budget.lasting:
        raise ValueError(
            "Expected an algorithm without a budget, or with a ledger in a file, which records the number of clients "
            "in each round, but clients join one whose ledger is in memory; pass ledger=path"
        )
    server, state = begin(now)
    server = tree.to(server, "cpu")
    earlier, made = dict[str, Tensor](), dict[str, Tensor]()
    for name, new in tree.flatten(server, "server").items():
        if name == _PREFIX or name.startswith(f"{_PREFIX}."):
            made[name] = new
        elif flat[name].shape != new.shape:
            made[name] = _with_rows(name, flat[name], new, before)
        else:
            earlier = earlier or _earlier(begin, before)
            made[name] = _moved(name, flat[name], new, earlier[name])
    made_server = tree.unflatten(made, server, "server")
    if algorithm.told is None or not adds(server, flat):
        return made_server
    joining = algorithm.told.of(tree.expand(state, 1))
    others = tree.map(lambda leaf: leaf.expand(now - before, *leaf.shape[1:]), joining)
    change = tree.to(sum_over(algorithm.exchange, others, slice(before, now)), "cpu")
    return made_server._replace(total=tree.add(tree.unflatten(flat, server.total, _PREFIX), change))


def adds(server: Tree, flat: Mapping[str, Tensor]) -> bool:
    """Return whether a server's total is a sum over all clients, or absent; a total per client is recomputed."""
    total = tree.flatten(getattr(server, _TOTAL, None), _PREFIX)
    return all(flat[name].shape == leaf.shape for name, leaf in total.items())


def _earlier(begin: Begin, clients: int) -> dict[str, Tensor]:
    """Return the server's initial state with fewer clients, flat."""
    try:
        return tree.flatten(tree.to(begin(clients)[0], "cpu"), "server")
    except ValueError as error:
        raise ValueError(
            f"Expected an algorithm that clients can join, but it refuses fewer of them: {error}"
        ) from error


def _moved(name: str, loaded: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """Return a tensor of the server: unchanged, or recomputed if it depends on the number of clients."""
    if torch.equal(before, new):
        return loaded
    if torch.equal(loaded, before):
        return new
    raise ValueError(
        f"Expected a server whose state does not depend on the number of clients at the start, but {name!r} does, and "
        "has changed since; start a run of all clients from this run's parameters"
    )


def _with_rows(name: str, loaded: Tensor, new: Tensor, before: int) -> Tensor:
    """Extend a tensor that has a row for each client by the rows of joining clients."""
    if loaded.ndim == 0 or len(loaded) != before or loaded.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"Expected a server whose state has a row for each client, or no rows of clients, but {name!r} is "
            f"{tuple(loaded.shape)} with {before} clients and {tuple(new.shape)} with all; start a run of all clients"
        )
    return torch.cat([loaded, new[before:]])
