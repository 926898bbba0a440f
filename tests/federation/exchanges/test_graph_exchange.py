"""The exchange over a graph: weighted sums of neighbours, in any blocks, pushed or multiplied, traffic by edges."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, copy_of, distance, same_bits
from support.oracles.gtv_problems import weighted_network
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange, Mean, Sum
from fedtorch.federation.exchanges.graph import graph
from fedtorch.networks.network import Network
from fedtorch.tree import Tree

N = 40
NETWORK = weighted_network(N, p=0.1)
DENSE = NETWORK.adjacency().to_dense()


class Told(NamedTuple):
    mean: Any
    sums: Any


def messages(dtype: torch.dtype = torch.float64) -> Told:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(N, *shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = torch.randint(1, 9, (N,), generator=generator)
    return Told(Mean({"v": draw(2)}, weight), Sum({"w": draw(2, 3), "scalar": draw(), "empty": draw(0)}))


def aggregate(exchange: Exchange, blocks: list[Any], message: Tree) -> Tree:
    partials = [exchange.gather(tree.take(message, ids), ids) for ids in blocks]
    return exchange.finish(exchange.merge(partials))


def test_nodes_receive_the_weighted_sum_of_neighbours() -> None:
    message = messages()
    result = aggregate(graph(NETWORK), [slice(0, N)], message)
    for name, value in message.sums.value.items():
        assert distance(result.sums.value[name], torch.einsum("ij,j...->i...", DENSE, value)) < ROUNDING
    weight = message.mean.weight.double()
    assert distance(result.mean.weight, DENSE @ weight) < ROUNDING
    expected = DENSE @ (weight[:, None] * message.mean.value["v"]) / (DENSE @ weight)[:, None]
    assert distance(result.mean.value["v"], expected) < ROUNDING


@pytest.mark.parametrize("active", [1, 3, 20, 39])
def test_a_few_active_nodes_push_and_many_multiply(active: int) -> None:
    """Both ways give the sum over those that answered; a mean is that of those that were heard."""
    ids = torch.randperm(N, generator=torch.Generator().manual_seed(active))[:active].sort().values
    message = messages()
    result = aggregate(graph(NETWORK), [ids], message)
    columns = DENSE[:, ids]
    for name, value in message.sums.value.items():
        expected = torch.einsum("ij,j...->i...", columns, value[ids])
        assert distance(result.sums.value[name], expected) < ROUNDING
    assert bool((result.mean.weight[(columns > 0).sum(1) == 0] == 0).all())
    assert bool((result.mean.value["v"][(columns > 0).sum(1) == 0] == 0).all())


def test_blocks_in_any_order_give_the_same_bits() -> None:
    exchange, message = graph(NETWORK), messages()
    before = copy_of(message)
    whole = aggregate(exchange, [slice(0, N)], message)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    for blocks in (
        [torch.arange(N)],
        [slice(0, 13), slice(13, 14), slice(14, N)],
        [slice(0, 0), slice(0, N)],
        list(order.split([7, 0, 20, 13])),
        [torch.tensor([k]) for k in reversed(range(N))],
    ):
        assert same_bits(aggregate(exchange, blocks, message), whole)
    assert same_bits(message, before)


def test_inboxes_are_views_of_rows_and_degrees() -> None:
    outbox = {"w": torch.arange(2.0 * N).reshape(N, 2)}
    exchange = graph(NETWORK)
    inbox = exchange.scatter(outbox, slice(3, 9))
    assert inbox.heard["w"].untyped_storage().data_ptr() == outbox["w"].untyped_storage().data_ptr()
    assert distance(inbox.degree, DENSE.sum(1)[3:9]) < ROUNDING
    assert torch.equal(exchange.scatter(outbox, torch.tensor([5, 2])).heard["w"], outbox["w"][[5, 2]])
    assert len(exchange.scatter(outbox, torch.zeros(0, dtype=torch.int64)).degree) == 0


def test_full_participation_is_one_sparse_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """No indexing: the messages' own memory goes into the product."""
    exchange, value = graph(NETWORK), torch.randn(N, 3, generator=torch.Generator().manual_seed(1)).double()
    products: list[Tensor] = []
    plain = torch.Tensor.__matmul__

    def watched(self: Tensor, other: Tensor) -> Tensor:
        products.append(other)
        return plain(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    aggregate(exchange, [slice(0, N)], Sum(value))
    assert [product.data_ptr() for product in products] == [value.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_in_float64(dtype: torch.dtype) -> None:
    value = (torch.arange(N) % 3).to(dtype)
    result = aggregate(graph(NETWORK), [slice(0, N)], Sum(value))
    assert result.value.dtype == torch.float64
    assert distance(result.value, DENSE @ value.double()) < ROUNDING


def test_traffic_is_every_message_over_every_edge_of_its_sender() -> None:
    exchange, message = graph(NETWORK), messages(torch.float32)
    for ids in (slice(2, 6), torch.tensor([0, 3, 7]), slice(5, 5)):
        rows = torch.arange(N)[ids]
        own = [wire.size(tree.map(lambda leaf, k=k: leaf[k], message)) for k in rows.tolist()]
        up = sum(int((DENSE[k] > 0).sum()) * size for k, size in zip(rows.tolist(), own))
        assert exchange.traffic({}, tree.take(message, ids), ids) == (up, 0)


def test_a_star_is_a_network_too() -> None:
    """The middle hears everybody, the others the middle."""
    result = aggregate(graph(Network.star(N)), [slice(0, N)], Sum(torch.arange(N)))
    assert result.value.tolist() == [N * (N - 1) / 2] + [0.0] * (N - 1)


def test_isolated_nodes_receive_nothing() -> None:
    nobody = graph(Network(torch.zeros(0, 2, dtype=torch.int64), nodes=3))
    result = aggregate(nobody, [slice(0, 3)], Mean(torch.ones(3, 2), torch.ones(3)))
    assert result.value.tolist() == [[0.0, 0.0]] * 3
    assert result.weight.tolist() == [0.0] * 3


def test_bare_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="Expected the message's nodes to be Mean or Sum"):
        graph(NETWORK).gather(torch.ones(N), slice(0, N))
