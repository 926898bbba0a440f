"""Exchanges: the same aggregate in any blocks and order, traffic as on the wire, wrong messages refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, copy_of, distance, same_bits
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange, Mean, RowsOf, Sum, client_count, indices, is_finite
from fedtorch.federation.exchanges.robust.exchange import star as robust_star
from fedtorch.federation.exchanges.rows import private_rows
from fedtorch.federation.exchanges.star import _without_power, star
from fedtorch.tree import Tree
from fedtorch.trust import robust

K = 13
EXCHANGES: dict[str, Callable[[], Exchange]] = {"star": star, "private_rows": private_rows}


class Told(NamedTuple):
    change: Any
    sums: Any
    nothing: Any


def messages(dtype: torch.dtype = torch.float64) -> Told:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(K, *shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = torch.randint(1, 50, (K,), generator=generator)
    return Told(
        Mean({"w": draw(2, 3), "scalar": draw(), "empty": draw(0)}, weight),
        {"one": Sum({"v": draw(4)}), "two": Mean((draw(1),), draw().exp())},
        None,
    )


def aggregate(exchange: Exchange, message: Tree, blocks: Sequence[Any], merge: str = "once") -> Tree:
    partials = [exchange.gather(tree.take(message, ids), ids) for ids in blocks]
    if merge == "pairwise":
        while len(partials) > 1:
            partials = [exchange.merge(partials[:2]), *partials[2:]]
    elif merge == "from the right":
        while len(partials) > 1:
            partials = [*partials[:-2], exchange.merge(partials[-2:])]
    return exchange.finish(exchange.merge(partials))


@pytest.mark.parametrize("merge", ["once", "pairwise", "from the right"])
@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_any_blocks_in_any_order_aggregate_alike(make: Callable[[], Exchange], merge: str) -> None:
    exchange, message = make(), messages()
    before = copy_of(message)
    whole = aggregate(exchange, message, [slice(0, K)])
    generator = torch.Generator().manual_seed(0)
    shuffled = [torch.randperm(K, generator=generator) for _ in range(3)]
    ways = [
        [torch.arange(K)],
        [slice(0, 4), slice(4, 5), slice(5, K)],
        [torch.tensor([k]) for k in range(K)],
        [torch.tensor([k]) for k in reversed(range(K))],
        [slice(0, 0), slice(0, K), torch.zeros(0, dtype=torch.int64)],
        *[list(order.split([1, 5, 0, 7])) for order in shuffled],
    ]
    for blocks in ways:
        assert distance(aggregate(exchange, message, blocks, merge), whole) < ROUNDING
    assert same_bits(message, before)


def test_star_gives_weighted_means_and_sums() -> None:
    message = messages()
    result = aggregate(star(), message, [slice(0, K)])
    mean = result.change
    share = message.change.weight.double() / message.change.weight.sum()
    for name, value in message.change.value.items():
        expected = sum(share[k] * value[k] for k in range(K))
        torch.testing.assert_close(mean.value[name], expected, rtol=0, atol=1e-14)  # rounding of 13 terms
    assert float(mean.weight) == int(message.change.weight.sum())
    torch.testing.assert_close(result.sums["one"].value["v"], message.sums["one"].value["v"].sum(0), rtol=0, atol=1e-14)
    assert isinstance(result.sums["one"], Sum)
    assert result.nothing is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_star_sums_in_float64(dtype: torch.dtype) -> None:
    value = (torch.arange(K) % 3).to(dtype)
    message = (Mean(value, torch.ones(K, dtype=torch.int32)), Sum(value))
    mean, total = aggregate(star(), message, [slice(0, 5), slice(5, K)])
    assert mean.value.dtype == mean.weight.dtype == total.value.dtype == torch.float64
    assert float(total.value) == float(value.double().sum())
    assert float(mean.value) == pytest.approx(float(value.double().mean()), rel=1e-15)


def test_increments_do_not_drift_in_float32() -> None:
    """A large value beside many small ones: a float32 sum over blocks would lose them all."""
    value = torch.tensor([2.0**25, *[1.0] * 64], dtype=torch.float32)
    blocks = [torch.tensor([k]) for k in range(65)]
    assert float(aggregate(star(), Sum(value), blocks).value) == 2.0**25 + 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [3e38, 1e300, 1e-44, 1e-300, 1.0])
def test_weights_of_any_size_weigh_alike(size: float, dtype: torch.dtype) -> None:
    """Their sums are float64's, also where products with float32 values would be Inf or zero."""
    value = torch.arange(1.0, 3 * K + 1).reshape(K, 3).to(dtype)
    share = torch.arange(1, K + 1, dtype=torch.float64) / K
    expected = share @ value.double() / share.sum()
    kinds = [torch.float64] if not 1e-45 < size < 3.4e38 else [torch.float32, torch.float64]
    for kind in kinds:
        given = (size * share).to(kind)
        exact = given.double() @ value.double() / given.double().sum() if size > 1e-300 else expected
        for blocks in ([slice(0, K)], [torch.tensor([k]) for k in range(K)], [slice(0, 5), slice(5, K), slice(0, 0)]):
            for exchange in (star(), robust_star(robust.trimmed_mean(0.0), spread=math.inf)):
                found = aggregate(exchange, Mean(value, given), blocks)
                assert distance(found.value.double(), exact) < (1e-5 if dtype is torch.float32 else 1e-12)
                assert float(found.weight) == pytest.approx(float(given.double().sum()), rel=1e-12)


def test_values_near_the_end_of_float32_have_a_mean() -> None:
    value = torch.full((K, 2), 3e38)
    found = aggregate(star(), Mean(value, torch.full((K,), 100)), [slice(0, K)])
    assert distance(found.value / 3e38, torch.ones(2).double()) < 1e-6


def test_powers_of_two_in_weights_change_no_bit() -> None:
    message = messages(torch.float32).change
    plain = aggregate(star(), message, [slice(0, K)]).value
    for exponent in (-1000, -3, 5, 900):
        weight = message.weight.double() * 2.0**exponent
        assert same_bits(aggregate(star(), Mean(message.value, weight), [slice(0, K)]).value, plain)


@pytest.mark.parametrize(
    "weight", [torch.zeros(3), torch.tensor([1.0, -2.0, 1.0]), torch.tensor([1.0, torch.nan, 1.0])]
)
def test_no_total_weight_is_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="Expected a positive total weight of the clients that answered, but got"):
        aggregate(star(), Mean(torch.ones(3, 2), weight), [slice(0, 3)])


@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_bare_tensors_are_refused(make: Callable[[], Exchange]) -> None:
    for message in (torch.ones(3), {"good": Sum(torch.ones(3)), "bad": torch.ones(3)}):
        with pytest.raises(TypeError, match="Expected the message's nodes to be Mean or Sum"):
            make().gather(message, slice(0, 3))


@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_no_clients(make: Callable[[], Exchange]) -> None:
    exchange, nobody = make(), tree.take(messages(), slice(0, 0))
    for ids in (slice(4, 4), torch.zeros(0, dtype=torch.int64)):
        partial = exchange.gather(nobody, ids)
        both = exchange.merge([partial, exchange.gather(messages(), slice(0, K))])
        whole = aggregate(exchange, messages(), [slice(0, K)])
        assert distance(exchange.finish(both), whole) < ROUNDING
        inbox = exchange.scatter({"w": torch.ones(K, 2)}, ids)
        assert len(inbox["w"]) == 0


@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_traffic_is_what_goes_over_the_wire(make: Callable[[], Exchange]) -> None:
    exchange, message = make(), messages(torch.float32)
    outbox = {"w": torch.zeros(K, 5), "b": (torch.zeros(K, dtype=torch.int64),)}
    for ids in (slice(2, 6), torch.tensor([0, 3, 7]), slice(5, 5)):
        count = client_count(ids)
        inboxes = exchange.scatter(outbox, ids)
        up = down = 0
        for k in range(count):
            up += wire.size(tree.map(lambda leaf, k=k: leaf[k], tree.take(message, ids)))
            down += len(wire.encode(tree.map(lambda leaf, k=k: leaf[k], inboxes)))
        assert exchange.traffic(outbox, tree.take(message, ids), ids) == (up, down)


@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_nothing_costs_nothing(make: Callable[[], Exchange]) -> None:
    exchange = make()
    assert exchange.traffic({}, {}, slice(0, 4)) == (0, 0)
    assert exchange.finish(exchange.merge([exchange.gather({}, slice(0, 4))] * 2)) is not None


def test_star_sends_all_clients_the_same_without_copies() -> None:
    outbox = {"w": torch.ones(2, 3)}
    inbox = star().scatter(outbox, torch.tensor([4, 9]))
    assert inbox["w"].shape == (2, 2, 3)
    assert inbox["w"].data_ptr() == outbox["w"].data_ptr()


def test_private_rows_send_each_client_its_row() -> None:
    outbox = {"w": torch.arange(2.0 * K).reshape(K, 2)}
    exchange = private_rows()
    assert torch.equal(exchange.scatter(outbox, torch.tensor([5, 2]))["w"], outbox["w"][[5, 2]])
    view = exchange.scatter(outbox, slice(3, 6))["w"]
    assert view.untyped_storage().data_ptr() == outbox["w"].untyped_storage().data_ptr()


def test_private_rows_arrive_in_ascending_order() -> None:
    message = messages()
    result = aggregate(private_rows(), message, [torch.tensor([7, 1]), slice(3, 5), torch.tensor([0])])
    assert isinstance(result, RowsOf)
    assert result.ids.tolist() == [0, 1, 3, 4, 7]
    assert same_bits(result.message, tree.take(message, result.ids))


def test_ids_are_indices_or_slices() -> None:
    assert client_count(slice(3, 7)) == client_count(torch.arange(4)) == 4
    assert indices(slice(3, 6)).tolist() == [3, 4, 5]
    assert star().additive
    assert not private_rows().additive


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-300, 0.75, 1.0, 3.0, 1e308, 2.0**1023, math.inf, -math.inf, math.nan])
def test_the_power_of_two_above_weights_is_that_of_operations_on_a_device(size: float) -> None:
    """Without reading a number, as a device has it done."""
    weight = torch.tensor([size, 0.0], dtype=torch.float64)
    total = weight.sum()
    power = (total / torch.frexp(total).mantissa).clamp(max=2.0**1023)
    power = torch.where(power > 0, power, 1.0)
    share, found, summed = _without_power(weight)
    assert found == float(power)
    torch.testing.assert_close((share, summed), (weight / power, total), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("place", ["value", "weight", "sum"])
def test_non_finite_and_negative_weights_are_detected(wrong: float | None, place: str) -> None:
    made = messages()
    if wrong is not None:
        leaf = {"value": made.change.value["w"], "weight": made.change.weight, "sum": tree.leaves(made.sums)[0]}[place]
        leaf = leaf.double() if place == "weight" else leaf
        leaf.view(-1)[3] = wrong
        if place == "weight":
            made = made._replace(change=made.change._replace(weight=leaf))
    partial = star().gather(made, torch.arange(K))
    assert is_finite(partial, made) == (wrong is None)
    negative = made._replace(change=made.change._replace(weight=torch.tensor([-1, *[5] * (K - 1)])))
    assert not is_finite(star().gather(negative, torch.arange(K)), negative)
    nobody = tree.map(lambda leaf: leaf[:0], messages())
    assert is_finite(star().gather(nobody, torch.arange(0)), nobody)
