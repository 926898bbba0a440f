"""Federated data: views, blocks, splits, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData, from_tensors


class Rows(NamedTuple):
    x: Tensor
    extra: dict[str, Tensor]


def make(counts: list[int], allow_empty: bool = False) -> FederatedData:
    """Rows (x, y) that all differ from each other and from zero."""
    total = sum(counts)
    x = torch.arange(1.0, 3 * total + 1, dtype=torch.float64).reshape(total, 3)
    return FederatedData((x, torch.arange(1, total + 1)), torch.tensor(counts), allow_empty=allow_empty)


def test_clients_are_views_of_the_rows() -> None:
    data = make([2, 1, 4])
    assert len(data) == data.clients == 3
    assert data.names == ("0", "1", "2")
    x, y = data[1]
    assert y.tolist() == [3]
    assert x.data_ptr() == data.rows[0][2:].data_ptr()
    assert data[-1][1].tolist() == data[2][1].tolist() == [4, 5, 6, 7]
    assert [rows[1].tolist() for rows in data] == [data[k][1].tolist() for k in range(3)]
    with pytest.raises(IndexError, match=r"client in 0…2, but got 3"):
        data[3]


def test_it_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make([1]).counts = torch.tensor([2])  # type: ignore[misc]


def test_repr_is_one_line() -> None:
    assert repr(make([2, 1, 4])) == (
        "FederatedData(3 clients, 7 rows, 1–4 per client, fields 0: float64 (3,), 1: int64 ())"
    )
    assert repr(FederatedData(torch.zeros(2, 1), torch.tensor([2]))) == (
        "FederatedData(1 client, 2 rows, 2–2 per client, fields float32 (1,))"
    )


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [3, 0], [2], [1, 1], []])
def test_stack_pads_with_zeros_as_a_loop_would(ids: list[int]) -> None:
    data = make([2, 0, 4, 1], allow_empty=True)
    block = data.stack(ids)
    size = max((int(data.counts[k]) for k in ids), default=0)
    assert block.batch[0].shape == (len(ids), size, 3)
    assert block.count.tolist() == data.counts[ids].tolist()
    for row, k in enumerate(ids):
        for stacked, own in zip(block.batch, data[k]):
            expected = torch.zeros(size, *own.shape[1:], dtype=own.dtype)
            expected[: len(own)] = own
            assert torch.equal(stacked[row], expected)
        assert block.mask[row].tolist() == [i < int(data.counts[k]) for i in range(size)]


def test_stack_keeps_any_tree() -> None:
    rows = Rows(torch.ones(3, 2, 2), {"flag": torch.tensor([True, True, True]), "byte": torch.ones(3).byte()})
    block = FederatedData(rows, torch.tensor([1, 2])).stack(torch.tensor([0, 1]))
    assert isinstance(block.batch, Rows)
    assert block.batch.x.shape == (2, 2, 2, 2)
    assert block.batch.extra["flag"].tolist() == [[True, False], [True, True]]
    assert block.batch.extra["byte"].dtype == torch.uint8


@pytest.mark.parametrize("ids", [[0, 4], [-1]])
def test_stack_refuses_unknown_clients(ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"client ids in 0…3"):
        make([1, 1, 1, 1]).stack(ids)
    with pytest.raises(TypeError, match="client ids as integers"):
        make([1, 1, 1, 1]).stack([True])


@pytest.mark.parametrize("max_ratio", [1.0, 1.5, 3.0, float("inf")])
def test_buckets_cover_every_client_once(max_ratio: float) -> None:
    counts = [1, 10_000, 7, 7, 10, 1, 300, 301, 2, 9, 4000, 6, 7]
    data = make(counts)
    buckets = data.buckets(max_ratio)
    assert sorted(k for ids, _ in buckets for k in ids.tolist()) == list(range(len(counts)))
    size_of_bucket = {}
    for number, (ids, block) in enumerate(buckets):
        assert ids.tolist() == sorted(ids.tolist())
        assert isinstance(block, ClientData)
        sizes = [counts[k] for k in ids.tolist()]
        assert block.count.tolist() == sizes
        assert block.batch[0].shape[1] == max(sizes) <= max_ratio * min(sizes)
        for size in sizes:
            assert size_of_bucket.setdefault(size, number) == number
        for row, k in enumerate(ids.tolist()):
            assert torch.equal(block.batch[1][row, : counts[k]], data[k][1])
        assert not block.batch[0][~block.mask].any()
        assert bool((block.batch[1][block.mask] > 0).all())
    if max_ratio == 1:
        assert len(buckets) == len(set(counts))
    if max_ratio == float("inf"):
        assert len(buckets) == 1


def test_buckets_of_empty_clients() -> None:
    buckets = make([0, 3, 0], allow_empty=True).buckets()
    assert [ids.tolist() for ids, _ in buckets] == [[0, 2], [1]]
    assert buckets[0][1].batch[0].shape == (2, 0, 3)
    assert buckets[0][1].mask.shape == (2, 0)


def test_buckets_refuse_a_ratio_below_one() -> None:
    with pytest.raises(ValueError, match=r"Expected max_ratio >= 1, but got 0\.5"):
        make([1]).buckets(0.5)


def test_buckets_of_ten_thousand_clients() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 80, (10_000,), generator=generator)
    data = FederatedData(torch.ones(int(counts.sum()), 2), counts)
    buckets = data.buckets()
    assert len(buckets) <= 11  # log(80) / log(1.5)
    assert sum(float(block.batch.sum()) for _, block in buckets) == 2 * int(counts.sum())


def test_select_keeps_names_and_order() -> None:
    data = from_tensors([torch.full((n, 1), float(n)) for n in (3, 1, 2)], names=["a", "b", "c"])
    chosen = data.select([2, 0])
    assert chosen.names == ("c", "a")
    assert chosen.counts.tolist() == [2, 3]
    assert chosen.rows[:, 0].tolist() == [2, 2, 3, 3, 3]
    with pytest.raises(ValueError, match="at least one client"):
        data.select([])


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8])
def test_split_is_within_every_client(fraction: float) -> None:
    data = make([1, 2, 5, 40, 1000])
    training, validation = data.split(fraction, seed=3)
    assert training.counts.tolist() == [max(1, round(fraction * n)) for n in data.counts.tolist()]
    assert bool((training.counts + validation.counts == data.counts).all())
    for rows, kept, held in zip(data, training, validation):
        assert sorted(kept[1].tolist() + held[1].tolist()) == rows[1].tolist()
        assert kept[1].tolist() == sorted(kept[1].tolist())
        assert torch.equal(kept[0][:, 2], 3.0 * kept[1])


def test_split_is_random_and_reproducible() -> None:
    data = make([1000, 1000])
    first, again, other = (data.split(0.5, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first.rows[1], again.rows[1])
    assert not torch.equal(first.rows[1], other.rows[1])
    # the mean of a random half of 1…1000 has a standard error of 9.1
    assert abs(float(first[0][1].double().mean()) - 500.5) < 5 * 9.1
    assert not torch.equal(first[0][1], first[1][1] - 1000)


@pytest.mark.parametrize("fraction", [0.0, 1.0, float("nan")])
def test_split_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction between 0 and 1"):
        make([2]).split(fraction, seed=0)


def test_pool_map_and_to() -> None:
    data = make([2, 3])
    assert data.pool().counts.tolist() == [5]
    assert data.pool().names == ("pool",)
    doubled = data.map(lambda rows: {"x": 2 * rows[0]})
    assert torch.equal(doubled[1]["x"], 2 * data[1][0])
    single = data.to(dtype=torch.float32, device="cpu")
    assert [leaf.dtype for leaf in tree.leaves(single.rows)] == [torch.float32, torch.int64]
    with pytest.raises(ValueError, match="Expected 5 rows in field '0'"):
        data.map(lambda rows: (rows[0][1:], rows[1]))


def test_an_empty_client_is_named() -> None:
    x, counts = torch.zeros(2, 1), torch.tensor([1, 0, 1])
    with pytest.raises(ValueError, match=r"at least one row per client, but got none for client 'b'"):
        FederatedData(x, counts, names=("a", "b", "c"))
    assert FederatedData(x, counts, allow_empty=True)[1].shape == (0, 1)
    clients = [(torch.ones(n, 2), torch.ones(n)) for n in (2, 0)]
    with pytest.raises(ValueError, match=r"none for client '1'; leave the client out, or pass allow_empty=True"):
        from_tensors(clients)
    data = from_tensors(clients, allow_empty=True)
    assert data.counts.tolist() == [2, 0]
    assert data[1][0].shape == (0, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named(bad: float) -> None:
    x = torch.zeros(6, 2, 2)
    x[4, 1, 0] = bad
    with pytest.raises(ValueError, match=r"field 'x' of client 'b', row 3; remove or impute"):
        FederatedData({"x": x}, torch.tensor([1, 0, 5]), names=("a", "empty", "b"), allow_empty=True)


@pytest.mark.parametrize(
    ("rows", "counts", "names", "error", "message"),
    [
        (torch.zeros(2), [2], (), TypeError, "Expected counts as a tensor"),
        (torch.zeros(2), torch.tensor([2.0]), (), TypeError, r"Expected counts \(K,\) int64"),
        (torch.zeros(2), torch.tensor(2), (), TypeError, r"Expected counts \(K,\) int64"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64), (), ValueError, "at least one client"),
        (torch.zeros(2), torch.tensor([3, -1]), (), ValueError, "counts >= 0, but got -1"),
        ([torch.zeros(2)], torch.tensor([2]), (), TypeError, "but got list"),
        ((), torch.tensor([2]), (), ValueError, "at least one field"),
        (torch.tensor(1.0), torch.tensor([1]), (), ValueError, "Expected 1 rows in the tensor of rows"),
        ((torch.zeros(2), torch.zeros(3)), torch.tensor([2]), (), ValueError, "Expected 2 rows in field '1'"),
        (torch.zeros(2), torch.tensor([1, 1]), ("a",), ValueError, "Expected 2 client names, but got 1"),
        (torch.zeros(2), torch.tensor([1, 1]), ("a", "a"), ValueError, "distinct client names, but got 'a'"),
        (torch.zeros(2), torch.tensor([1, 1]), (0, 1), TypeError, "client names as strings, but got 0"),
        (
            (torch.zeros(2), torch.zeros(2, device="meta")),
            torch.tensor([2]),
            (),
            ValueError,
            "Expected all fields on cpu, but got meta",
        ),
    ],
)
def test_bad_arguments_are_refused(
    rows: object, counts: Tensor, names: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FederatedData(rows, counts, names)


def test_names_of_features_stay_with_the_columns() -> None:
    data = FederatedData((torch.ones(4, 2), torch.zeros(4)), torch.tensor([1, 3]), features=("age", "dose"))
    parts = (*data.split(0.5, seed=0), data.select([1]), data.pool(), data.to(dtype=torch.float64))
    assert {part.features for part in parts} == {("age", "dose")}
    assert data.map(lambda rows: (rows[0][:, :1], rows[1])).features == ()
    with pytest.raises(ValueError, match=r"column of field '0', which is \(4, 2\), but got 1 names"):
        FederatedData(data.rows, data.counts, features=("age",))
