"""Splitting one data set over clients.

A *partitioner* is a function `(rows, clients, key) -> assignment`, the `(total,)` index of the client that
gets each row. The functions here build the usual ones; any function of that form will do.

References:
    McMahan, Moore, Ramage, Hampson, Agüera y Arcas (2017), "Communication-efficient learning of deep networks
    from decentralized data", section 3 (shards of labels). Yurochkin et al. (2019), "Bayesian nonparametric
    federated learning of neural networks", section 4 (Dirichlet proportions per class). Hsu, Qi, Brown
    (2019), "Measuring the effects of non-identical data distribution for federated visual classification"
    (the role of α). Li, Diao, Chen, He (2022), "Federated learning on non-IID data silos: an experimental
    study" (quantity skew).

>>> import torch
>>> from fedtorch.data import iid, partition
>>> partition((torch.randn(7, 2), torch.arange(7)), iid(), clients=3, seed=0).counts
tensor([3, 2, 2])
"""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Protocol

import numpy
import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import _shares
from fedtorch.data._rows import gather_rows
from fedtorch.data.federated import FederatedData
from fedtorch.data.sources import as_rows
from fedtorch.tree import Tree


class Partitioner(Protocol):
    """The signature of a partitioner; it returns the client of each row, `(total,)` int64 on the CPU.

    >>> alternate: Partitioner = lambda rows, clients, key: torch.arange(len(rows)) % clients
    >>> partition(torch.tensor([10, 11, 12, 13, 14]), alternate, clients=2)[1]
    tensor([11, 13])
    """

    def __call__(self, rows: Tree, clients: int | None, key: Tensor, /) -> Tensor: ...


def partition(rows: Any, partitioner: Partitioner, *, clients: int | None = None, seed: int = 0) -> FederatedData:
    """Give every row to one client; a client's rows stay in their order.

    Args:
        rows: a tree of tensors or arrays with leaves `(total, ...)`, such as (x, y); or a map-style `Dataset`. Of a
            `Dataset` clients get item numbers, which `ft.lazy_loading` and `ft.data.read` turn into rows. (A
            `TensorDataset` is treated as its tensors.)
        partitioner: assigns rows to clients, for example `dirichlet(0.3)`.
        clients: their number; not needed by `by_column`.
        seed: seed of the random assignment.

    Raises:
        ValueError: fields with different numbers of rows, fewer rows than clients, or a client without rows.
    """
    rows = as_rows(rows)
    total = _count_rows(rows)
    assignment = partitioner(rows, clients, random.key(seed))
    if not isinstance(assignment, Tensor) or assignment.dtype != torch.int64 or assignment.shape != (total,):
        got = getattr(assignment, "dtype", type(assignment).__name__), getattr(assignment, "shape", None)
        raise TypeError(f"Expected a client per row, ({total},) int64, but the partitioner returned {got}")
    count = int(assignment.max()) + 1 if clients is None else clients
    if bool(((assignment < 0) | (assignment >= count)).any()):
        raise ValueError(
            f"Expected clients in 0…{count - 1}, but the partitioner returned {int(assignment.min())}…"
            f"{int(assignment.max())}"
        )
    order = _shares.grouped(assignment, count)
    taken = tree.map(lambda leaf: gather_rows(leaf, order), rows)
    return FederatedData(taken, assignment.bincount(minlength=count))


def iid() -> Partitioner:
    """Assign rows at random, in parts of equal size (up to one row)."""

    def assign(rows: Tree, clients: int | None, key: Tensor, /) -> Tensor:
        total = _count_rows(rows)
        count = _check_clients(clients, total)
        assignment = torch.empty(total, dtype=torch.int32)  # int32 halves the bytes of random writes
        dealt = torch.arange(total, dtype=torch.int32).remainder_(count)
        return assignment.scatter_(0, random.permutation(key, total), dealt).to(torch.int64)

    return assign


Sizes = Literal["equal"] | Sequence[int]


def dirichlet(
    alpha: float | Sequence[float],
    label: Hashable | Sequence[int] | Tensor = 1,
    minimum: int = 1,
    sizes: Sizes | None = None,
) -> Partitioner:
    r"""Label skew by Dirichlet proportions.

    Without `sizes` the rows of class c are split by :math:`p_c \sim \mathrm{Dirichlet}(\alpha 1_K)` over the clients
    (Yurochkin et al.), so clients' sizes differ too. Clients with fewer than `minimum` rows receive random rows of the
    largest clients.

    With `sizes` client k draws its rows by proportions :math:`q_k \sim \mathrm{Dirichlet}(\alpha_k\, p)` over the
    classes, where p are the classes' shares of all rows (Hsu et al.). A class without rows left is not drawn again, so
    the last clients may deviate from their proportions.

    Args:
        alpha: the concentration, above 0. Near 0 each class goes to one client or each client has one class; large
            values are nearly iid. With `sizes` also one value per client.
        label: the index, key or name of the field of classes, integers or booleans `(total,)`; or the classes
            themselves, as a tensor, array or list of integers, booleans or strings. Multi-label rows have booleans
            `(total, C)`; each counts as one of its labels, drawn at random.
        minimum: the least number of rows of a client, at least 1.
        sizes: "equal" (up to one row), or the rows of each client, which add up to all rows.

    Raises:
        TypeError: alpha is not a number, or a sequence without `sizes`.
        ValueError: alpha is not positive and finite; or, in use, the field is missing, has not one class per row, or
            the sizes do not add up.

    >>> data = partition((torch.zeros(9, 1), torch.arange(9) % 3), dirichlet(0.1, sizes="equal"), clients=3, seed=0)
    >>> data.counts
    tensor([3, 3, 3])
    """
    several = alpha if isinstance(alpha, Sequence) and sizes is not None else [alpha]
    alphas = [_check_alpha(each) for each in several]

    def assign(rows: Tree, clients: int | None, key: Tensor, /) -> Tensor:
        codes = _labels(rows, label, random.fold_in(key, 3))
        count = _check_clients(clients, len(codes), minimum)
        if sizes is None:
            return _shares.cut(codes, alphas[0], count, minimum, key)
        if len(alphas) not in (1, count):
            raise ValueError(f"Expected one alpha, or one per client, but got {len(alphas)} for {count} clients")
        wanted = _check_sizes(sizes, len(codes), count, minimum)
        return _shares.take(codes, torch.tensor(alphas).expand(count), wanted, key)

    return assign


def quantity_skew(alpha: float, minimum: int = 1) -> Partitioner:
    r"""Assign random rows in parts of relative size :math:`p \sim \mathrm{Dirichlet}(\alpha 1_K)` (size skew).

    Args:
        alpha: the concentration, above 0: a small one gives few clients most of the rows.
        minimum: the least number of rows of a client, at least 1; smaller clients receive rows of the largest.

    >>> data = partition(torch.zeros(1000, 2), quantity_skew(0.3, minimum=10), clients=5, seed=0)
    >>> int(data.counts.sum()), int(data.counts.min()) >= 10
    (1000, True)
    """
    _check_alpha(alpha)

    def assign(rows: Tree, clients: int | None, key: Tensor, /) -> Tensor:
        total = _count_rows(rows)
        count = _check_clients(clients, total, minimum)
        return _shares.cut(torch.zeros(total, dtype=torch.int64), alpha, count, minimum, key)

    return assign


def labels_per_client(
    count: int, label: Hashable | Sequence[int] | Tensor = 1, sizes: Literal["equal"] | None = None
) -> Partitioner:
    """Label skew: each client gets `count` shards of rows that were sorted by label.

    Without `sizes` each client has exactly `count` labels: the rows of each label are cut at random into shards of
    equal size, `clients · count` of them in all and in proportion to the labels' frequencies, and each client is dealt
    shards of different labels. With `sizes="equal"` shards and clients have equal sizes (up to one row), as in McMahan
    et al. (2017): a shard may end in another label than it began with, and a client may get two shards of one label.

    Args:
        count: labels, or shards, per client.
        label: the classes, as in `dirichlet`, one per row.
        sizes: "equal" for clients of equal size.

    >>> rows = torch.zeros(60, 1), torch.arange(60) % 3
    >>> [len(y.unique()) for _, y in partition(rows, labels_per_client(2), clients=6, seed=0)]
    [2, 2, 2, 2, 2, 2]
    """
    if sizes not in (None, "equal"):
        raise ValueError(f'Expected sizes None or "equal", but got {sizes!r}; given sizes are those of dirichlet')

    def assign(rows: Tree, clients: int | None, key: Tensor, /) -> Tensor:
        codes = _labels(rows, label)
        k = _check_clients(clients, len(codes), count if sizes == "equal" else 1)
        if sizes == "equal":
            return _shares.equal_shards(codes, k, count, key)
        label_sizes = codes.bincount()
        shards = _shares.apportion(label_sizes, k, count)
        owner = _shares.deal(shards, k, count, random.fold_in(key, 0))  # (shards,) clients, ordered by label
        first = (shards.cumsum(0) - shards)[codes]
        rank = _shares.ranks(codes, random.fold_in(key, 1))
        return owner[first + rank * shards[codes] // label_sizes[codes]]

    return assign


def by_column(values: Any) -> Partitioner:
    """Make a client of each distinct value, in sorted order: a hospital, a site, a writer.

    Args:
        values: one per row, as a tensor, array or list of integers, booleans or strings `(total,)`, or a
            function of the rows that returns them.

    >>> data = partition(torch.tensor([7, 5, 9]), by_column(["Oulu", "Turku", "Oulu"]))
    >>> data[0], data[1]
    (tensor([7, 9]), tensor([5]))
    """

    def assign(rows: Tree, clients: int | None, key: Tensor, /) -> Tensor:
        codes = _codes(values(rows) if callable(values) else values, _count_rows(rows))
        distinct = int(codes.max()) + 1
        if clients is not None and clients != distinct:
            raise ValueError(
                f"Expected {clients} distinct values, one per client, but got {distinct}; leave clients out"
            )
        return codes

    return assign


def split_features(x: Tensor, parties: int | Sequence[Sequence[int]]) -> list[Tensor]:
    """Split the columns of `x` `(..., d)` over parties that hold different features of the same rows.

    Args:
        x: the features.
        parties: a number of parties, for consecutive columns in parts of equal size (up to one), or the columns of each
            party; unlisted columns are left out.

    Returns:
        One tensor `(..., d_p)` per party.

    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> split_features(x, 2), split_features(x, [[2], [0, 1]])
    ([tensor([[1., 2.]]), tensor([[3.]])], [tensor([[3.]]), tensor([[1., 2.]])])
    """
    columns = x.shape[-1]
    if isinstance(parties, int):
        if not 1 <= parties <= columns:
            raise ValueError(f"Expected between 1 and {columns} parties, one column each at least, but got {parties}")
        return list(x.tensor_split(parties, dim=-1))
    given = [c for party in parties for c in party]
    if any(len(party) == 0 for party in parties) or not all(0 <= c < columns for c in given):
        raise ValueError(f"Expected columns in 0…{columns - 1} for every party, but got {parties}")
    if len(set(given)) < len(given):
        raise ValueError(f"Expected every column at one party at most, but got {parties}; remove the repetition")
    return [x[..., list(party)] for party in parties]


def _count_rows(rows: Tree) -> int:
    leaves = list(tree.items(rows))
    sizes = {path: len(leaf) if leaf.ndim else None for path, leaf in leaves}
    if len(set(sizes.values())) != 1 or None in sizes.values() or 0 in sizes.values():
        raise ValueError(f"Expected fields with one number of rows > 0, but got {sizes}; pass for example (x, y)")
    return len(leaves[0][1])


def _check_clients(clients: int | None, total: int, minimum: int = 1) -> int:
    if clients is None or clients < 1:
        raise ValueError(f"Expected at least one client, but got {clients}; pass clients=…")
    if minimum < 1:
        raise ValueError(f"Expected a minimum of at least 1 row per client, but got {minimum}")
    if clients * minimum > total:
        raise ValueError(
            f"Expected at least {clients} × {minimum} rows for {clients} clients, but got {total}; take fewer clients"
        )
    return clients


def _check_alpha(alpha: Any) -> float:
    scalar = isinstance(alpha, Tensor) and alpha.ndim == 0
    if isinstance(alpha, bool) or not (scalar or isinstance(alpha, numbers.Real)):
        raise TypeError(
            f"Expected alpha as one positive number, but got {alpha!r}; one per client needs sizes= (dirichlet)"
        )
    if not 0 < alpha < float("inf"):
        raise ValueError(f"Expected a finite alpha > 0, but got {alpha}; use iid() for equal shares")
    return float(alpha)


def _check_sizes(sizes: Sizes, total: int, clients: int, minimum: int) -> Tensor:
    """Return the rows of each client, `(K,)`."""
    if isinstance(sizes, str):
        if sizes != "equal":
            raise ValueError(f'Expected sizes "equal" or the rows of each client, but got {sizes!r}')
        return torch.full((clients,), total // clients) + (torch.arange(clients) < total % clients)
    wanted = torch.as_tensor(sizes)
    if wanted.is_floating_point() or wanted.shape != (clients,) or int(wanted.sum()) != total:
        raise ValueError(
            f"Expected {clients} whole numbers of rows that add up to {total}, but got {list(sizes)}; leave other rows "
            "out of the data first"
        )
    if int(wanted.min()) < minimum:
        raise ValueError(f"Expected at least {minimum} rows per client, but got {int(wanted.min())} in sizes")
    return wanted.to(torch.int64)


def _labels(rows: Tree, label: Hashable | Sequence[int] | Tensor, key: Tensor | None = None) -> Tensor:
    """Return classes as codes 0…C−1, each present; with a key, draw one label for each multi-label row."""
    if isinstance(label, list) or getattr(label, "shape", ()) != ():  # NumPy scalars have shape ()
        return _codes(_one_label(label, key), _count_rows(rows))
    try:
        values = getattr(rows, label) if isinstance(label, str) and hasattr(rows, "_fields") else rows[label]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise ValueError(
            f"Expected a field {label!r} of labels, but got fields {list(tree.flatten(rows))}; pass label=…"
        ) from error
    if not isinstance(values, Tensor):
        raise ValueError(f"Expected labels as a single tensor in field {label!r}, but got a {type(values).__name__}")
    values = _one_label(values, key)
    if isinstance(rows, Tensor) or values.ndim != 1 or values.is_floating_point() or values.is_complex():
        raise ValueError(
            f"Expected labels (total,) of integers or booleans in field {label!r}, but got {values.dtype} of "
            f"shape {tuple(values.shape)}; pass label=… (of a Dataset its classes), or put real targets into bins first"
        )
    return _codes(values, len(values))


def _one_label(values: Any, key: Tensor | None) -> Any:
    """Draw one label of each multi-label row, booleans `(total, C)`; −1 for rows without a label."""
    several = torch.as_tensor(values) if getattr(values, "ndim", 1) == 2 else None
    if key is None or several is None or several.dtype != torch.bool:
        return values
    race = random.uniform(key, several.shape, torch.float64).where(several, torch.tensor(2.0).double())
    return race.argmin(1).where(several.any(1), torch.tensor(-1))


def _codes(values: Any, total: int) -> Tensor:
    """Return the rank of every value among the distinct sorted values, `(total,)` int64."""
    column = values.detach().cpu().numpy() if isinstance(values, Tensor) else numpy.asarray(values)
    if column.shape != (total,):
        raise ValueError(f"Expected one value per row, shape ({total},), but got shape {column.shape}")
    if column.dtype.kind in "fc" and numpy.isnan(column).any():
        raise ValueError("Expected a value for every row, but got NaN; leave such rows out")
    try:
        codes = numpy.unique(column, return_inverse=True)[1]
    except TypeError as error:  # None and strings have no common order
        raise ValueError(
            f"Expected values of one kind, integers, booleans or strings, but got others ({error}); leave rows "
            "without a value out"
        ) from None
    return torch.from_numpy(codes.astype(numpy.int64))
