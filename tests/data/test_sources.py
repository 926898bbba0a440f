"""Federated data from tensors, arrays, data sets and loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from fedtorch.data import from_datasets, from_tensors


class Pair(NamedTuple):
    x: Any
    y: Any


class Squares(Dataset[Any]):
    """Items (number, square) in a form of choice."""

    def __init__(self, size: int, item: Any = lambda i: (torch.tensor([float(i)]), i * i)) -> None:
        self.size, self.item = size, item

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2), 1.5), (torch.zeros(2), 2.5)])


def xy(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n)), torch.arange(n)


# --- tensors and arrays


def test_from_tensors_concatenates() -> None:
    clients = [xy(n) for n in (4, 1, 7)]
    data = from_tensors(clients, names=["a", "b", "c"])
    assert data.names == ("a", "b", "c")
    for got, expected in zip(data, clients):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_from_tensors_takes_any_tree_and_keeps_dtypes() -> None:
    pair = Pair(numpy.ones((2, 3)), {"label": numpy.array([1, 0], dtype=numpy.int32), "w": torch.ones(2).half()})
    data = from_tensors([pair, pair])
    assert isinstance(data.rows, Pair)
    assert data.rows.x.dtype == torch.float64
    assert data.rows.y["label"].dtype == torch.int32
    assert data.rows.y["w"].dtype == torch.float16
    assert data.counts.tolist() == [2, 2]


def test_arrays_may_be_read_only_or_strided() -> None:
    array = numpy.arange(6.0).reshape(3, 2)[::-1]
    array.flags.writeable = False
    assert from_tensors([array]).rows.tolist() == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        ([], ValueError, "at least one client"),
        ([xy(2), (torch.zeros(0, 3), torch.zeros(0).long())], ValueError, "none for client 'second'"),
        ([xy(2), [torch.zeros(2, 3), torch.zeros(2)]], TypeError, "got a list in .* of client 'second'"),
        ([xy(2), (torch.zeros(2, 3), [0, 1])], TypeError, "got a list in field '1' of client 'second'"),
        ([xy(2), {"x": 3.0}], TypeError, "got a float in field 'x' of client 'second'"),
        ([xy(2), (numpy.array(["a"]), 0)], TypeError, "array of <U1; encode it first"),
        (
            [xy(2), (torch.zeros(2, 3), torch.zeros(3))],
            ValueError,
            "all fields of client 'second', but got {'0': 2",
        ),
        (
            [xy(2), (torch.zeros(2, 3), torch.tensor(1))],
            ValueError,
            "field '1' of client 'second', but got a single",
        ),
        ([xy(2), ()], ValueError, "empty tree for client 'second'"),
        ([xy(2), (torch.zeros(2, 3),)], ValueError, r"but got \['0'\] in client 'second'"),
        ([xy(2), {"x": torch.zeros(2)}], ValueError, r"but got \['x'\] in client 'second'"),
        (
            [xy(2), (torch.zeros(2, 4), torch.arange(2))],
            ValueError,
            r"row shape \(3,\) in field '0' as in client 'first'",
        ),
        (
            [xy(2), (torch.zeros(2, 3).double(), torch.arange(2))],
            ValueError,
            "got torch.float64 in client 'second'",
        ),
        (
            [xy(2), (torch.full((2, 3), torch.nan), torch.arange(2))],
            ValueError,
            "field '0' of client 'second', row 0",
        ),
    ],
)
def test_from_tensors_names_the_client(clients: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_tensors(clients, names=["first", "second"][: len(clients)])


def test_names_must_match() -> None:
    with pytest.raises(ValueError, match="Expected 1 client names, but got 2"):
        from_tensors([xy(2)], names=["a", "b"])
    with pytest.raises(ValueError, match="Expected 1 client names, but got 2"):
        from_datasets([Squares(2)], names=["a", "b"])


# --- data sets and loaders


def test_from_datasets_reads_map_style_and_iterable() -> None:
    data = from_datasets([Squares(4), Squares(2)])
    assert data.counts.tolist() == [4, 2]
    assert data[0][0].tolist() == [[0], [1], [2], [3]]
    assert data.rows[1].tolist() == [0, 1, 4, 9, 0, 1]
    stream = from_datasets([Stream()], names=["s"])
    assert stream.rows[0].tolist() == [[1, 1], [0, 0]]
    assert stream.rows[1].dtype == torch.float64  # as in a DataLoader's batches


def test_items_may_be_dicts_named_tuples_or_arrays() -> None:
    as_dict = from_datasets([Squares(3, lambda i: {"x": numpy.full(2, i), "y": (i, i * 0.5)})])
    assert as_dict.rows["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert as_dict.rows["y"][1].tolist() == [0, 0.5, 1]
    as_pair = from_datasets([Squares(3, lambda i: Pair(torch.tensor(i), i))])
    assert isinstance(as_pair.rows, Pair)


def test_tensor_datasets_are_not_read_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = xy(6)
    dataset = TensorDataset(x, y)
    subset = Subset(Subset(dataset, [5, 1, 3]), [2, 0])
    expected = torch.stack([subset[i][0] for i in range(2)])
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, i: pytest.fail("read an item"))
    data = from_datasets([dataset, subset])
    assert torch.equal(data[0][0], x)
    assert torch.equal(data[1][0], expected)
    assert data[1][1].tolist() == [3, 5]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_its_data_set_in_order(shuffle: bool) -> None:
    x, y = xy(5)
    loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=shuffle, drop_last=True)
    data = from_datasets([loader, DataLoader(Squares(1, lambda i: (torch.zeros(3), i)))])
    assert torch.equal(data[0][0], x)
    assert data[0][1].tolist() == [0, 1, 2, 3, 4]
    assert from_datasets([DataLoader(Stream(), batch_size=2)]).counts.tolist() == [2]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(Squares(4), sampler=SubsetRandomSampler([0, 1])),
            "over SubsetRandomSampler for client 'a'",
        ),
        (
            DataLoader(Squares(4), sampler=SequentialSampler(Squares(2))),
            "over SequentialSampler for client 'a'",
        ),
        (DataLoader(Squares(4), batch_sampler=[[0, 1]]), "got one with list"),
        (
            DataLoader(Squares(4), collate_fn=lambda items: items[0]),
            "collate_fn, but got its own for client 'a'",
        ),
        (DataLoader(Squares(4), batch_size=None), "Expected a DataLoader with batches"),
    ],
)
def test_a_loader_that_is_not_its_data_set_is_refused(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_datasets([loader], names=["a"])


def test_a_plain_batch_sampler_is_fine() -> None:
    dataset = Squares(4)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 2, drop_last=False))
    assert from_datasets([loader]).counts.tolist() == [4]


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Squares(0), ValueError, "empty data set for client 'a'"),
        (TensorDataset(torch.zeros(0, 2)), ValueError, "none for client 'a'"),
        (3, TypeError, "but got int for client 'a'"),
        (xy(2)[0].numpy().__iter__(), TypeError, "for client 'a'; for tensors use from_tensors"),
        (Squares(3, lambda i: (torch.zeros(i), i)), ValueError, "items of one shape .* for client 'a'"),
        (Squares(3, lambda i: (torch.zeros(1), str(i))), TypeError, "got a str in field '1.0' of client 'a'"),
        (Squares(3, lambda i: (torch.zeros(1), None)), ValueError, "for client 'a'"),
    ],
)
def test_bad_data_sets_are_named(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_datasets([dataset], names=["a"])
