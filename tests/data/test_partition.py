"""Partitioners: every row used once, the skew that was asked for, and the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pandas
import pytest
import torch
from torch import Tensor

from fedtorch import random
from fedtorch.data import (
    FederatedData,
    _shares,
    by_column,
    dirichlet,
    iid,
    labels_per_client,
    partition,
    quantity_skew,
    split_features,
)
from fedtorch.data.partition import Partitioner

TOTAL, CLASSES = 600, 5


def rows(total: int = TOTAL, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Row numbers and labels of unequal frequency."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1.0, classes + 1)
    return torch.arange(total), torch.multinomial(weights, total, replacement=True, generator=generator)


def label_counts(data: FederatedData, classes: int = CLASSES) -> Tensor:
    return torch.stack([y.bincount(minlength=classes) for _, y in data])


RANDOM = {
    "iid": iid(),
    "dirichlet": dirichlet(0.3),
    "nearly one class": dirichlet(0.01),
    "quantity": quantity_skew(0.5),
    "labels": labels_per_client(2),
    "column": by_column(lambda r: r[1]),
    "equal sizes": dirichlet(0.3, sizes="equal"),
    "shards": labels_per_client(2, sizes="equal"),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("clients", [5, 40])
def test_every_row_is_used_once_with_its_label(name: str, clients: int) -> None:
    x, y = rows()
    data = partition((x, y), RANDOM[name], clients=None if name == "column" else clients, seed=1)
    assert data.clients == (CLASSES if name == "column" else clients)
    assert data.rows[0].sort().values.tolist() == x.tolist()
    assert torch.equal(data.rows[1], y[data.rows[0]])
    assert int(data.counts.min()) >= 1
    for own, _ in data:
        assert own.tolist() == sorted(own.tolist())


@pytest.mark.parametrize("name", [name for name in RANDOM if name != "column"])
def test_the_seed_decides(name: str) -> None:
    first, again, other = (partition(rows(), RANDOM[name], clients=10, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.rows[0], again.rows[0])
    assert torch.equal(first.counts, again.counts)
    assert not torch.equal(first.rows[0], other.rows[0])


def test_iid_parts_are_equal_and_mixed() -> None:
    data = partition(rows(6000), iid(), clients=7, seed=0)
    assert int(data.counts.max() - data.counts.min()) <= 1
    y = data.rows[1]
    share = y.bincount() / len(y)
    for counts, own in zip(label_counts(data), data.counts):
        error = (share * (1 - share) / own).sqrt()
        assert bool(((counts / own - share).abs() < 5 * error).all())


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_proportions_have_their_moments(alpha: float) -> None:
    clients, classes, per_class = 20, 50, 400
    y = torch.arange(classes).repeat_interleave(per_class)
    data = partition((torch.arange(len(y)), y), dirichlet(alpha), clients=clients, seed=0)
    share = label_counts(data, classes).double().T / per_class  # (C, K), each row ~ Dirichlet(α)
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert torch.allclose(share.sum(1), torch.ones(classes, dtype=torch.float64))
    # squared distances from the expectation; their spread over classes gives the standard error of the mean
    squares = ((share - mean) ** 2).mean(1)
    error = squares.std() / classes**0.5
    assert abs(float(squares.mean() - variance)) < 4 * float(error) + mean / per_class


def test_a_large_alpha_is_balanced_and_a_small_one_is_not() -> None:
    def largest_share(alpha: float) -> float:
        counts = label_counts(partition(rows(5000), dirichlet(alpha), clients=10, seed=0))
        return float((counts.max(0).values / counts.sum(0)).mean())

    assert largest_share(1e4) < 0.12
    assert largest_share(0.01) > 0.8


@pytest.mark.parametrize("make", [dirichlet, quantity_skew])
@pytest.mark.parametrize(("clients", "minimum"), [(10, 1), (10, 25), (60, 10), (600, 1), (599, 1)])
def test_small_clients_are_filled_up(make: Any, clients: int, minimum: int) -> None:
    data = partition(rows(), make(0.05, minimum=minimum), clients=clients, seed=0)
    assert int(data.counts.min()) >= minimum
    assert data.rows[0].sort().values.tolist() == list(range(TOTAL))


def test_filling_up_takes_from_the_largest_only() -> None:
    plain = partition(rows(), quantity_skew(0.5), clients=20, seed=0).counts
    filled = partition(rows(), quantity_skew(0.5, minimum=10), clients=20, seed=0).counts
    lowered = filled < plain
    assert int(plain[plain < 10].numel()) > 0
    assert bool((filled[plain < 10] == 10).all())
    assert int(filled[lowered].max() - filled[lowered].min()) <= 1
    assert int(plain[~lowered].max()) <= int(filled[lowered].max())


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_proportions_at_given_sizes_have_their_moments(alpha: float) -> None:
    clients, classes, size = 400, 5, 200  # with far more rows than clients take, no class runs out
    y = torch.arange(classes).repeat_interleave(40_000)
    sizes = [size] * clients + [len(y) - size * clients]
    data = partition((y, y), dirichlet([alpha] * clients + [1e6], sizes=sizes), clients=clients + 1, seed=0)
    share = label_counts(data, classes)[:clients].double() / size
    mean = 1 / classes
    dirichlets = mean * (1 - mean) / (alpha + 1)
    expected = dirichlets + (mean * (1 - mean) - dirichlets) / size  # of a multinomial of Dirichlet probabilities
    squares = ((share - mean) ** 2).mean(1)
    assert abs(float(squares.mean()) - expected) < 4 * float(squares.std()) / clients**0.5
    assert bool(((share.mean(0) - mean).abs() < 4 * (expected / clients) ** 0.5).all())


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1e4])
def test_sizes_are_those_asked_for(alpha: float) -> None:
    equal = partition(rows(), dirichlet(alpha, sizes="equal"), clients=7, seed=0).counts
    assert int(equal.max() - equal.min()) <= 1
    sizes = [1, 99, 200, 300]
    assert partition(rows(), dirichlet(alpha, sizes=sizes), clients=4).counts.tolist() == sizes


def test_each_client_has_its_alpha() -> None:
    y = torch.arange(10).repeat_interleave(200)
    data = partition((y, y), dirichlet([1e-3, 1e-3, 1e4, 1e4], sizes=[100, 100, 900, 900]), clients=4, seed=1)
    largest = label_counts(data, 10).max(1).values / data.counts
    assert bool((largest[:2] > 0.9).all())
    assert bool((largest[2:] < 0.2).all())


def test_rows_may_have_several_labels() -> None:
    y = torch.zeros(3000, 3, dtype=torch.bool)
    y[:, 0] = True  # all rows have the first label, a half the second too, none the third
    y[:1500, 1] = True
    data = partition({"x": torch.arange(3000), "y": y}, dirichlet(0.01, label="y"), clients=30, seed=0)
    assert data.rows["x"].sort().values.tolist() == list(range(3000))
    both = torch.stack([client["y"].sum(0) for client in data])
    assert bool((both[:, 2] == 0).all())
    assert int(both.max(0).values[0]) > 1000  # nearly all of a class go to one client
    with pytest.raises(ValueError, match=r"Expected labels \(total,\)"):
        partition({"x": torch.arange(3000), "y": y}, labels_per_client(2, label="y"), clients=3)


def test_equal_shards_hold_few_labels() -> None:
    data = partition(rows(), labels_per_client(2, sizes="equal"), clients=20, seed=0)
    assert set(data.counts.tolist()) == {TOTAL // 20}
    held = (label_counts(data) > 0).sum(1)
    assert int(held.max()) <= 4
    assert float(held.double().mean()) < 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dirichlet([0.1, 0.2]), TypeError, "one per client needs sizes="),
        (lambda: dirichlet([0.1, 0.0], sizes="equal"), ValueError, "finite alpha > 0, but got 0.0"),
        (lambda: dirichlet([0.1, 0.2], sizes="equal"), ValueError, "one per client, but got 2 for 4 clients"),
        (lambda: dirichlet(0.1, sizes="same"), ValueError, "but got 'same'"),
        (lambda: dirichlet(0.1, sizes=[100, 100]), ValueError, "Expected 4 whole numbers of rows that add up to 600"),
        (lambda: dirichlet(0.1, sizes=[1, 1, 1, 597], minimum=2), ValueError, "at least 2 rows per client, but got 1"),
        (lambda: labels_per_client(2, sizes="same"), ValueError, "but got 'same'"),
    ],
)
def test_sizes_and_alphas_are_checked(make: Callable[[], Partitioner], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        partition(rows(), make(), clients=4)


def test_quantity_skew_has_the_variance_of_a_dirichlet() -> None:
    clients, alpha, total = 400, 2.0, 200_000
    counts = partition(torch.arange(total), quantity_skew(alpha), clients=clients, seed=0).counts
    share = counts.double() / total * clients  # nearly Gamma(α) / α: variance 1/α, kurtosis 3 + 6/α
    error = ((2 + 6 / alpha) / clients) ** 0.5 / alpha  # of the sample variance
    assert abs(float(share.var()) - 1 / alpha) < 4 * error


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("clients", [5, 12, 30])
def test_each_client_gets_its_number_of_labels(count: int, clients: int) -> None:
    data = partition(rows(), labels_per_client(count), clients=clients, seed=2)
    held = label_counts(data)
    assert bool(((held > 0).sum(1) == count).all())
    for c in range(CLASSES):  # the shards of a label are of equal size
        shards = held[:, c][held[:, c] > 0]
        assert int(shards.max() - shards.min()) <= 1


def test_all_pairs_of_labels_occur() -> None:
    y = torch.arange(5).repeat_interleave(400)
    held = label_counts(partition((torch.arange(2000), y), labels_per_client(2), clients=200, seed=0)) > 0
    assert len({tuple(row) for row in held.tolist()}) == 10


def test_by_column_takes_tensors_arrays_lists_and_functions() -> None:
    x = torch.tensor([10, 20, 30, 40])
    site = ["b", "a", "b", "c"]
    for values in (site, numpy.array(site), torch.tensor([5, -1, 5, 7]), lambda r: [1, 0, 1, 2]):
        data = partition(x, by_column(values))
        assert [own.tolist() for own in data] == [[20], [10, 30], [40]]
    assert partition(x, by_column(site), clients=3).clients == 3
    with pytest.raises(ValueError, match="Expected 2 distinct values, one per client, but got 3"):
        partition(x, by_column(site), clients=2)
    with pytest.raises(ValueError, match=r"one value per row, shape \(4,\), but got shape \(3,\)"):
        partition(x, by_column([1, 2, 3]))
    with pytest.raises(ValueError, match="but got NaN"):
        partition(x, by_column([1.0, 2.0, float("nan"), 3.0]))


def test_labels_are_found_by_index_key_or_name() -> None:
    class Named(NamedTuple):
        x: Tensor
        label: Tensor

    x, y = rows()
    expected = partition((x, y), dirichlet(0.5), clients=4).counts
    for tree, label in (
        (Named(x, y), "label"),
        (Named(x, y), 1),
        ({"x": x, "y": y > -1}, "y"),
        ((y + 7, x), 0),
    ):
        data = partition(tree, dirichlet(0.5, label=label), clients=4)
        assert label == "y" or torch.equal(data.counts, expected)
    assert partition((x.numpy(), y.numpy()), dirichlet(0.5), clients=4).counts.equal(expected)


@pytest.mark.parametrize(
    "labels",
    [
        lambda y: ["abcde"[i] for i in y.tolist()],
        lambda y: numpy.array(["abcde"[i] for i in y.tolist()]),
        lambda y: numpy.array(["abcde"[i] for i in y.tolist()], dtype=object),
        lambda y: pandas.Series(["abcde"[i] for i in y.tolist()]).astype("category"),
        lambda y: y.tolist(),
        lambda y: y.numpy().astype("uint64"),
        *(lambda y, dtype=dtype: y.to(dtype) for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int32)),
    ],
)
def test_labels_are_strings_or_integers_of_any_dtype(labels: Callable[[Tensor], Any]) -> None:
    x, y = rows()
    for made in (dirichlet, labels_per_client):
        plain = partition((x, y), made(2), clients=6).counts
        assert partition((x, y), made(2, label=labels(y)), clients=6).counts.equal(plain)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_a_field_of_labels_has_any_integer_dtype(dtype: torch.dtype) -> None:
    x, y = rows()
    plain = partition((x, y), dirichlet(0.5), clients=4).counts
    assert partition((x, y.to(dtype)), dirichlet(0.5), clients=4).counts.equal(plain)


@pytest.mark.parametrize("alpha", [[0.1, 1.0], (0.5,), "0.1", None, True, torch.ones(2), 1j])
def test_alpha_is_one_number(alpha: Any) -> None:
    for made in (dirichlet, quantity_skew):
        with pytest.raises(TypeError, match="Expected alpha as one positive number, but got"):
            made(alpha)


@pytest.mark.parametrize(
    ("data", "partitioner", "clients", "message"),
    [
        (
            rows(3),
            dirichlet(1.0, label=["a", "b"]),
            2,
            r"Expected one value per row, .* but got shape \(2,\)",
        ),
        (rows(3), dirichlet(1.0, label=["a", None, "b"]), 2, "Expected values of one kind, .* leave rows without"),
        (rows(3), dirichlet(1.0, label=[1.0, math.nan, 2.0]), 2, "but got NaN; leave such rows out"),
        (rows(3), iid(), 4, "at least 4 × 1 rows for 4 clients, but got 3; take fewer clients"),
        (rows(3), iid(), 0, "at least one client, but got 0"),
        (rows(3), iid(), None, "pass clients="),
        (rows(30), dirichlet(1.0, minimum=4), 8, "at least 8 × 4 rows"),
        (rows(30), quantity_skew(1.0, minimum=0), 8, "minimum of at least 1"),
        (rows(30), dirichlet(1.0, label="y"), 2, r"field 'y' of labels, but got fields \['0', '1'\]"),
        (rows(30), dirichlet(1.0, label=2), 2, "field 2 of labels"),
        (
            (torch.arange(3), {"y": torch.arange(3)}),
            dirichlet(1.0),
            2,
            "single tensor in field 1, but got a dict",
        ),
        ((torch.zeros(3), torch.zeros(3)), dirichlet(1.0), 2, "but got torch.float32 .* bins first"),
        ((torch.zeros(3), torch.zeros(3, 1).long()), dirichlet(1.0), 2, r"of shape \(3, 1\)"),
        (torch.zeros(3, 2), dirichlet(1.0), 2, "Expected labels|Expected a field"),
        (rows(30), labels_per_client(6), 10, "between 1 and 4 labels per client"),
        (rows(30), labels_per_client(0), 10, "between 1 and 4 labels per client"),
        (rows(30), labels_per_client(1), 3, "at least 4 shards"),
        (rows(30), labels_per_client(4), 20, "rows for 20 clients × 4 labels"),
        ((torch.zeros(3), torch.zeros(4)), iid(), 2, "one number of rows > 0, but got {'0': 3, '1': 4}"),
        (torch.zeros(0), iid(), 2, "one number of rows > 0"),
        ((), iid(), 2, "one number of rows > 0"),
    ],
)
def test_what_cannot_be_is_refused(data: Any, partitioner: Partitioner, clients: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(data, partitioner, clients=clients)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_alpha_is_checked_at_construction(alpha: float) -> None:
    with pytest.raises(ValueError, match="finite alpha > 0"):
        dirichlet(alpha)
    with pytest.raises(ValueError, match="finite alpha > 0"):
        quantity_skew(alpha)


def test_a_partitioner_of_ones_own() -> None:
    def halves(rows: Any, clients: int | None, key: Tensor, /) -> Tensor:
        return (rows >= 2).long()

    data = partition(torch.arange(4), halves)
    assert [own.tolist() for own in data] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="none for client '2'"):
        partition(torch.arange(4), halves, clients=3)
    with pytest.raises(ValueError, match=r"Expected clients in 0…0, but the partitioner returned 0…1"):
        partition(torch.arange(4), halves, clients=1)
    with pytest.raises(TypeError, match=r"Expected a client per row, \(4,\) int64"):
        partition(torch.arange(4), lambda rows, clients, key: rows.float())
    with pytest.raises(TypeError, match=r"the partitioner returned .*list"):
        partition(torch.arange(4), lambda rows, clients, key: [0, 0, 0, 0])  # type: ignore[arg-type, return-value]


def test_split_features() -> None:
    x = torch.arange(10.0).reshape(2, 5)
    assert [part.shape[1] for part in split_features(x, 2)] == [3, 2]
    assert torch.equal(torch.cat(split_features(x, 3), dim=1), x)
    first, second = split_features(x, [[4, 0], [2]])
    assert first.tolist() == [[4, 0], [9, 5]]
    assert second.tolist() == [[2], [7]]


@pytest.mark.parametrize(
    ("parties", "message"),
    [
        (0, "between 1 and 5 parties"),
        (6, "between 1 and 5 parties"),
        ([[0], [5]], r"columns in 0…4"),
        ([[0], []], r"columns in 0…4 for every party"),
        ([[0, 1], [1]], "every column at one party at most"),
    ],
)
def test_split_features_refuses(parties: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_features(torch.zeros(2, 5), parties)


@pytest.mark.parametrize(
    ("total", "classes", "clients", "minimum"), [(500, 3, 7, 1), (900, 300, 20, 30), (40, 1, 40, 1)]
)
def test_rows_of_a_class_are_cut_by_their_ranks(total: int, classes: int, clients: int, minimum: int) -> None:
    """Row by row: where its rank among its class lies between the bounds of clients; then small clients are filled."""
    key, generator = random.key(3), torch.Generator().manual_seed(0)
    codes = torch.randint(classes, (total,), generator=generator).unique(return_inverse=True)[1]
    sizes, rank = codes.bincount(), _shares.ranks(codes, random.fold_in(key, 1))
    for c, size in enumerate(sizes.tolist()):
        assert rank[codes == c].sort().values.tolist() == list(range(size))
    bounds = _shares._dirichlet(0.5, (len(sizes), clients), random.fold_in(key, 0)).cumsum(1)
    place = (rank.double() + 0.5) / sizes[codes]
    wanted = (place[:, None] >= bounds[codes]).sum(1).clamp(max=clients - 1)
    counts = wanted.bincount(minlength=clients)
    target = _shares._level(counts, minimum)
    moved = _shares.ranks(wanted, random.fold_in(key, 2)) >= target[wanted]
    wanted[moved] = torch.arange(clients).repeat_interleave((target - counts).clamp(min=0))
    assert torch.equal(_shares.cut(codes, 0.5, clients, minimum, key), wanted)
