"""One row of the server's state for each client: messages arrive unsummed."""

from __future__ import annotations

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange, RowsOf, client_count, indices, map_messages
from fedtorch.federation.exchanges.messages import in_order


def private_rows() -> Exchange:
    """Exchange with an outbox row per client: client k receives only row k, and its message becomes row k of `RowsOf`.

    Example:
        >>> import torch, fedtorch as ft
        >>> exchange = ft.private_rows()
        >>> exchange.scatter(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2]))  # client 2 hears row 2
        tensor([[3.]])
        >>> blocks = [exchange.gather(ft.Sum(torch.tensor([k + 1.0])), torch.tensor([k])) for k in (2, 0)]
        >>> heard: RowsOf = exchange.finish(exchange.merge(blocks))
        >>> heard
        RowsOf(ids=tensor([0, 2]), message=Sum(value=tensor([1., 3.])))
    """
    return Exchange(
        scatter=tree.take,
        gather=lambda messages, ids: RowsOf(indices(ids), map_messages(lambda node: node, messages)),
        merge=tree.concatenate,  # a copy even of one block, so that the server may keep rows
        finish=in_order,
        traffic=lambda outbox, messages, ids: (
            client_count(ids) * wire.size_of(tree.row_layout(messages)),
            client_count(ids) * wire.size_of(tree.row_layout(outbox)),
        ),
        additive=False,
    )
