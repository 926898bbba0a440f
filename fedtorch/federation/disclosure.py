"""Disclosed fields of a client or a site in a run, derived from the messages themselves.

A message is a tree of `Mean`, `Sum` and rows. Whether a field is a client's, a site's or a sum over sites under masks
follows from the exchange and the carry; whether it is exact, rounded or noised from the carry and the budget. Only the
worst possible inference is declared, with the type of the message, by `tells` or `Told.learns`. A message without a
declaration is `UNDECLARED`: its readers have the exact values of a client.

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))] * 3)
>>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False))), ft.InProcess(data))
>>> run.disclosure()[["field", "shape", "of", "exactness"]]
                 field   shape        of exactness
0  change.value.weight  (1, 2)  a client     exact
1        change.weight      ()  a client     exact
2            info.loss      ()  a client     exact
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fedtorch.federation.exchanges.exchange import Mean, Sent
from fedtorch.learns import EXACT, NOISED, UNDECLARED, Field, Learns, declared
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.algorithm import Algorithm, Reply
    from fedtorch.federation.exchanges.carry import Carry

CLIENT, SITE = "a client", "a site"
SERVER = "the server"
WEIGHT = Learns("how many rows the client has, or how heavy it is")
INFO = Learns(
    "the losses and what a module logs: how well single rows are predicted", "attacks.membership", "masks, or noise"
)


def of_reply(algorithm: Algorithm, carry: Carry, reply: Reply, at_sites: bool = False) -> list[Field]:
    """Return the fields of an answer to a round.

    Args:
        algorithm: the run's, without changes for the transport.
        carry: transport of its messages.
        reply: an answer of any clients `(K, ...)`, or none; its message is `Sent` for algorithms with persistent
            contributions.
        at_sites: whether sites add up their clients' messages first, where the exchange adds them up.
    """
    exchange, budget = algorithm.exchange, algorithm.budget
    of, reader, rounded = CLIENT, exchange.heard_by, ""
    if carry.masks is not None:
        least = f"{carry.masks.sites} sites" if at_sites else f"{carry.minimum} clients"
        of, rounded = f"a sum of at least {least}", f"rounded to {carry.step:.1g}"
    elif carry.network is not None:
        reader = f"{reader}, sealed"
    elif at_sites and exchange.additive:
        of = f"{SITE}'s sum"
    noisy = budget is not None and budget.quorum is not None
    counts = () if algorithm.told is None else algorithm.told.counts
    told = UNDECLARED if algorithm.told is None else algorithm.told.learns
    fields = []
    for leaf in _leaves(reply.message, told):
        noised = noisy and leaf.is_value and not (leaf.path.startswith("told.") and leaf.path.split(".")[-1] in counts)
        exactness = ", ".join(filter(None, [NOISED if noised else "", rounded])) or EXACT
        fields.append(Field("round", leaf.path, tuple(leaf.tensor.shape[1:]), of, exactness, reader, leaf.learns))
    if carry.masks is None and carry.network is None:
        fields += [Field("round", f"info.{name}", (), CLIENT, EXACT, SERVER, INFO) for name in reply.info]
    return fields


class _Leaf(NamedTuple):
    path: str
    tensor: Tensor
    is_value: bool  # and not the weight of a mean
    learns: Learns


def _leaves(
    node: Tree, told: Learns, path: str = "", learns: Learns = UNDECLARED, value: bool = True
) -> Iterator[_Leaf]:
    """Yield the tensors of a message; the innermost declaration around one holds."""
    learns = declared(type(node), learns)
    if isinstance(node, Tensor):
        yield _Leaf(path, node, value, learns)
        return
    if node is None:
        return
    if isinstance(node, dict):
        children = [(str(name), child) for name, child in node.items()]
    else:
        children = list(zip(getattr(node, "_fields", map(str, range(len(node)))), node))
    for name, child in children:
        inner, is_value = learns, value
        if isinstance(node, Sent) and name == "told":
            inner = told
        if isinstance(node, Mean) and name == "weight":
            inner, is_value = WEIGHT, False
        yield from _leaves(child, told, f"{path}.{name}" if path else name, inner, is_value)
