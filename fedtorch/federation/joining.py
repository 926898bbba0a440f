"""Clients join a run that was begun without them: what the server's state is then.

It is that of a run which has had them from the beginning and has never asked them. Clients that join are numbered after
those that were there and are in the initial state. Totals grow by what they tell, and what `Algorithm.init` makes of
the number of clients becomes what it makes of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import sum_over
from fedtorch.tree import Tree

_TOTAL = "total"  # the field of a server's state of what clients tell for good
_PREFIX = f"server.{_TOTAL}"

Begin = Callable[[int], tuple[Tree, Tree]]  # clients -> (the server's state, one client's state) before the first round


def joined(algorithm: Algorithm, begin: Begin, flat: Mapping[str, Tensor], before: int, now: int) -> Tree:
    """Return the server's state of a checkpoint of `before` clients, as it is with `now`; see `adds` for totals.

    Raises:
        ValueError: it depends on who the clients are in another way, or a privacy budget does.
    """
    if algorithm.budget is not None and not algorithm.budget.lasting:
        raise ValueError(
            "Expected an algorithm without a budget, or with a ledger in a file, which says how many clients there "
            "were in each round, but clients join one whose ledger is in memory; pass ledger=path"
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
    """Return whether a server's total is a sum over all clients, or nothing; one for each of them is made anew."""
    total = tree.flatten(getattr(server, _TOTAL, None), _PREFIX)
    return all(flat[name].shape == leaf.shape for name, leaf in total.items())


def _earlier(begin: Begin, clients: int) -> dict[str, Tensor]:
    """Return what the server's state began with of fewer clients, flat."""
    try:
        return tree.flatten(tree.to(begin(clients)[0], "cpu"), "server")
    except ValueError as error:
        raise ValueError(
            f"Expected an algorithm that clients can join, but it refuses fewer of them: {error}"
        ) from error


def _moved(name: str, loaded: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """Return a tensor of the server: as it is, or anew where it says how many clients there are."""
    if torch.equal(before, new):
        return loaded
    if torch.equal(loaded, before):
        return new
    raise ValueError(
        f"Expected a server whose state does not depend on how many clients there were at first, but {name!r} does, "
        "and has changed since; begin a run of all clients at this one's parameters"
    )


def _with_rows(name: str, loaded: Tensor, new: Tensor, before: int) -> Tensor:
    """Return a tensor that has a row for each client, with those of clients that join."""
    if loaded.ndim == 0 or len(loaded) != before or loaded.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"Expected a server whose state has a row for each client, or nothing of any, but {name!r} is "
            f"{tuple(loaded.shape)} with {before} clients and {tuple(new.shape)} with all; begin a run of all clients"
        )
    return torch.cat([loaded, new[before:]])
