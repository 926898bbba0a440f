"""Federated data: the rows of every client, ragged, and as stacked blocks.

Clients have different numbers of rows. `FederatedData` stores the rows of all of them concatenated in client order, so
that a client is a view and nothing is padded until a block of clients is stacked: `buckets` groups clients of similar
size, which bounds the padding, and every block is `(K, N, ...)` with a count per client.

>>> import torch
>>> from fedtorch.data import FederatedData
>>> x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 1, 1])
>>> data = FederatedData((x, y), counts=torch.tensor([1, 5]), names=("small", "large"))
>>> data
FederatedData(2 clients, 6 rows, 1–5 per client, fields 0: float32 (2,), 1: int64 ())
>>> data[0]
(tensor([[0., 1.]]), tensor([0]))
>>> data.stack([0, 1]).mask
tensor([[ True, False, False, False, False],
        [ True,  True,  True,  True,  True]])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, random, tree
from fedtorch.data._rows import check_counts, check_names, first_not_finite, gather_rows
from fedtorch.expected import loaded
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas

    from fedtorch.data.formulas.design import Design
    from fedtorch.data.frames.incomplete import Absent


class ClientData(NamedTuple):
    """The data of `K` clients as one block, padded to the largest of them.

    >>> block = FederatedData(torch.tensor([5, 6, 7]), counts=torch.tensor([1, 2])).stack([0, 1])
    >>> block.batch, block.count
    (tensor([[5, 0],
            [6, 7]]), tensor([1, 2]))
    """

    batch: Tree  # leaves (K, N, ...); rows beyond a client's count are zeros
    count: Tensor  # type: ignore[assignment]  # (K,) int64, on the device of the batch

    @property
    def mask(self) -> Tensor:
        """Return which rows are data and not padding, `(K, N)` bool."""
        size = tree.leaves(self.batch)[0].shape[1]
        return torch.arange(size, device=self.count.device) < self.count[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """The rows of `K` clients, immutable and checked at construction.

    Iterating gives each client's rows, `data[k]` those of client `k`: views, not copies. The counts and the
    ids of clients live on the CPU, wherever the rows are.

    Args:
        rows: a tree whose leaves are `(total, ...)`, the clients' rows one after the other.
        counts: `(K,)` int64, how many of the rows are each client's.
        names: the clients' names; default: `"0"`, `"1"`, ….
        allow_empty: whether a client may have no rows, as in a validation split.
        features: the names of the columns of the first field, x `(total, d)`, where they are known.
        on_disk: whether rows are checked for NaN and Inf only when stacked, as for a file; see `from_file`.
        design: the formula of the columns x, with its encoding; see `from_frame`.

    Raises:
        TypeError: a field is not a tensor, or the counts are not int64.
        ValueError: no clients; an empty client; numbers of rows that disagree; a NaN or Inf in a float field.
            The message names client, field and row. Also names of features that are not one per column.
    """

    rows: Tree
    counts: Tensor
    names: tuple[str, ...] = ()
    allow_empty: bool = False
    features: tuple[str, ...] = ()
    on_disk: bool = False
    design: Design | None = None
    absent: Absent | None = None  # missing cells before rows were completed or left out, see `missing`
    starts: Tensor = field(init=False)  # (K,) int64, first row of each client

    def __post_init__(self) -> None:
        check_counts(self.counts)
        object.__setattr__(self, "names", tuple(self.names) or tuple(map(str, range(len(self.counts)))))
        check_names(self.names, len(self.counts))
        object.__setattr__(self, "starts", self.counts.cumsum(0) - self.counts)
        if not self.allow_empty and bool((self.counts == 0).any()):
            raise ValueError(
                "Expected at least one row per client, but got none for client "
                f"{self.names[int(self.counts.argmin())]!r}; leave the client out, or pass allow_empty=True where a "
                "client without rows means something, such as an unlabelled node of a network"
            )
        self._check_rows()

    def _check_rows(self) -> None:
        leaves = list(tree.items(self.rows))
        if not leaves:
            raise ValueError("Expected rows with at least one field, but got an empty tree; pass for example (x, y)")
        total = int(self.counts.sum())
        for path, leaf in leaves:
            expected.dense(leaf, field_name(path))
            if leaf.ndim == 0 or len(leaf) != total:
                raise ValueError(
                    f"Expected {total} rows in {field_name(path)}, the sum of the counts, but got shape "
                    f"{tuple(leaf.shape)}; every field needs one row per example"
                )
            if leaf.device != leaves[0][1].device:
                raise ValueError(
                    f"Expected all fields on {leaves[0][1].device}, but got {leaf.device} for "
                    f"{field_name(path)}; move them to one device"
                )
            if not self.on_disk and (row := first_not_finite(leaf)) is not None:
                client = int(torch.searchsorted(self.starts + self.counts, row, right=True))
                raise self._not_finite(path, client, row - int(self.starts[client]))
        first = leaves[0][1]
        if self.features and (first.ndim != 2 or first.shape[1] != len(self.features)):
            raise ValueError(
                f"Expected one name per column of {field_name(leaves[0][0])}, which is {tuple(first.shape)}, but got "
                f"{len(self.features)} names of features; pass one per column"
            )
        if twice := [name for name in dict.fromkeys(self.features) if self.features.count(name) > 1]:
            raise ValueError(f"Expected a name for each feature, but got {twice} twice; rename one of them")

        before_coding = isinstance(self.rows, loaded("fedtorch.data.frames.incomplete", "Incomplete"))
        coded = self.design is not None and not before_coding
        if self.design is not None and coded and first.shape[1:] != (len(self.design.columns),):
            raise ValueError(
                f"Expected the {len(self.design.columns)} columns of the design in x, but got shape "
                f"{tuple(first.shape)}; pass design=None for other columns"
            )

    def _not_finite(self, path: str, client: int, row: int) -> ValueError:
        return ValueError(
            f"Expected finite values, but got NaN or Inf in {field_name(path)} of client "
            f"{self.names[client]!r}, row {row}; remove or impute such rows, see fedtorch.models.gibbs.imputation, or "
            'keep them by from_frame(..., missing="impute") for ft.inference.imputed'
        )

    @property
    def clients(self) -> int:
        """Return the number of clients, `K`."""
        return len(self.counts)

    @property
    def device(self) -> torch.device:
        """Return the rows' device."""
        return tree.leaves(self.rows)[0].device

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, client: int) -> Tree:
        k = operator.index(client)
        if not -self.clients <= k < self.clients:
            raise IndexError(f"Expected a client in 0…{self.clients - 1}, but got {k}")
        start = int(self.starts[k])
        return tree.take(self.rows, slice(start, start + int(self.counts[k])))

    def __iter__(self) -> Iterator[Tree]:
        for start, count in zip(self.starts.tolist(), self.counts.tolist()):
            yield tree.take(self.rows, slice(start, start + count))

    def __repr__(self) -> str:
        return (
            f"FederatedData({self.clients} client{'s' * (self.clients != 1)}, {int(self.counts.sum())} rows, "
            f"{int(self.counts.min())}–{int(self.counts.max())} per client, fields {described_rows(self.rows, 1)})"
        )

    def stack(self, ids: Tensor | Sequence[int], size: int | None = None) -> ClientData:
        """Return the data of clients `ids` `(C,)` as one block, in the order of `ids`.

        Args:
            ids: of the clients.
            size: number of rows to which each is padded with zeros; default: that of the largest client.
        """
        ids = self._ids(ids)
        counts = self.counts[ids]
        size = size or int(counts.max() if len(ids) else 0)
        within = torch.arange(size)
        padding = (within >= counts[:, None]).flatten().nonzero().squeeze(1)
        index = (self.starts[ids, None] + within).flatten().index_fill_(0, padding, 0)

        def block(leaf: Tensor) -> Tensor:
            taken = gather_rows(leaf, index).index_fill_(0, padding.to(leaf.device), 0)
            return taken.reshape(len(ids), size, *leaf.shape[1:])

        batch = tree.map(block, self.rows)
        for path, leaf in tree.items(batch) if self.on_disk else ():
            if (row := first_not_finite(leaf.flatten(0, 1))) is not None:
                raise self._not_finite(path, int(ids[row // size]), row % size)
        return ClientData(batch, counts.to(self.device))

    def buckets(self, max_ratio: float = 1.5, small: int = 0) -> list[tuple[Tensor, ClientData]]:
        """Return all clients as blocks of similar size: `(ids, data)`; see `groups`."""
        return [(ids, self.stack(ids)) for ids in self.groups(max_ratio, small)]

    def groups(self, max_ratio: float = 1.5, small: int = 0) -> list[Tensor]:
        """Return the ids of all clients in groups of similar size, each ascending, the smallest clients first.

        Args:
            max_ratio: bound on largest / smallest number of rows within a block, at least 1; 1 pads nothing. Clients of
                equal size are always together.
            small: a block of up to this many rows, padding included, may exceed the ratio: many tiny blocks cost more
                than their padding.
        """
        if not max_ratio >= 1:
            raise ValueError(f"Expected max_ratio >= 1, but got {max_ratio}; 1 groups clients of equal size only")
        counts, order = self.counts.double().sort(stable=True)
        rows_of_client, start = [], 0
        while start < len(order):
            stop = int(torch.searchsorted(counts, counts[start] * max_ratio, right=True))
            padded = (torch.arange(start, len(order)) - start + 1) * counts[start:]
            stop = max(stop, start + int((padded <= small).sum()))
            stop = int(torch.searchsorted(counts, counts[stop - 1], right=True))
            rows_of_client.append(order[start:stop].sort().values)
            start = stop
        return rows_of_client

    def select(self, ids: Tensor | Sequence[int]) -> FederatedData:
        """Return the clients `ids` `(C,)`, all different, with their names, in the order of `ids`."""
        ids = self._ids(ids)
        counts = self.counts[ids]
        shift = self.starts[ids] - (counts.cumsum(0) - counts)
        index = torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)
        names = tuple(self.names[k] for k in ids.tolist())
        return replace(self, rows=self._take(index), counts=counts, names=names, on_disk=False)

    def split(self, fraction: float, seed: int) -> tuple[FederatedData, FederatedData]:
        """Split the rows of every client at random: (training, validation).

        A client of n rows keeps `fraction` · n of them for training, rounded, but at least one, so that the
        validation part of a tiny client may be empty. Rows stay in their order.

        Args:
            fraction: the part for training, between 0 and 1.
            seed: seed of the random split.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"Expected a fraction between 0 and 1, but got {fraction}; it is the part for training")
        total = int(self.counts.sum())
        client = torch.arange(self.clients).repeat_interleave(self.counts)
        draw = random.uniform(random.key(seed), (total,), torch.float64)
        order = draw.argsort()
        order = order[client[order].argsort(stable=True)]  # clients in order, the rows of each at random
        rank = torch.empty(total, dtype=torch.int64)
        rank[order] = torch.arange(total) - self.starts[client]
        counts = (self.counts.double() * fraction).round().long().clamp(min=1).minimum(self.counts)
        training = rank < counts[client]
        held_out, loaded = self._take((~training).nonzero().squeeze(1)), replace(self, on_disk=False)
        return (
            replace(loaded, rows=self._take(training.nonzero().squeeze(1)), counts=counts),
            replace(loaded, rows=held_out, counts=self.counts - counts, allow_empty=True),
        )

    def pool(self) -> FederatedData:
        """Return the rows of all clients in one, called `"pool"`, as for a central fit."""
        return replace(self, counts=self.counts.sum().reshape(1), names=("pool",))

    def missing(self) -> pandas.DataFrame:
        """Return the share of missing cells of each client, by column, and of rows that lack or lacked any (`any`)."""
        from fedtorch.data.frames.incomplete import missing_shares

        return missing_shares(self)

    def map(self, function: Callable[[Tree], Tree]) -> FederatedData:
        """Apply `function` to the tree of all rows, which it must keep in number and order.

        Names of features and the design are dropped, unless the first field is the same tensor as before.
        """
        rows = function(self.rows)
        if tree.leaves(rows)[:1] == [] or tree.leaves(rows)[0] is not tree.leaves(self.rows)[0]:
            return replace(self, rows=rows, features=(), design=None, on_disk=False)
        return replace(self, rows=rows, on_disk=False)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FederatedData:
        """Return the rows on `device`, and the floating point fields in `dtype`."""
        return replace(self, rows=tree.map(lambda leaf: _to(leaf, device, dtype), self.rows), on_disk=False)

    def to_file(self, file: Path | str) -> None:
        """Write the clients' rows, a tuple or a dict of tensors, to a safetensors file."""
        from fedtorch.data._row_files import write_rows

        numbered = self.names == tuple(map(str, range(len(self))))
        about = {"names": () if numbered else self.names, "features": self.features, "allow_empty": self.allow_empty}
        about["design"] = None if self.design is None else self.design.to_json()
        write_rows(file, self.rows, self.counts, about)

    @classmethod
    def from_file(cls, file: Path | str) -> FederatedData:
        """Return the rows of a safetensors file, which are read on demand.

        `ft.InProcess` reads and prepares the rows of a round's clients, so the data may exceed memory. Operations that
        make other rows, such as `select`, `split` or `to`, load them into memory, and so do evaluation and
        `ft.Distributed`. A client's rows are checked for NaN and Inf when they are read. The file must not change.

        Args:
            file: of `to_file`, or of another program: with a tensor `counts` `(K,)` int64, each client's number of
                rows, and the fields, called `0`, `1`, … for a tuple such as (x, y), or by names for a dict.

        Raises:
            ValueError: the file is damaged, or has no counts.
        """
        from fedtorch.data._row_files import read_rows
        from fedtorch.data.formulas.design import Design

        parts = read_rows(file)
        design = parts.pop("design")
        return cls(**parts, on_disk=True, design=None if design is None else Design.from_json(design))

    def _take(self, index: Tensor) -> Tree:
        return tree.map(lambda leaf: gather_rows(leaf, index), self.rows)

    def _ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        ids = torch.as_tensor(ids, device="cpu")
        if ids.numel() == 0:
            return ids.new_empty(0, dtype=torch.int64)
        if ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Expected client ids as integers (C,), but got {ids.dtype} of shape {tuple(ids.shape)}")
        if bool(((ids < 0) | (ids >= self.clients)).any()):
            raise IndexError(f"Expected client ids in 0…{self.clients - 1}, but got {ids.tolist()}")
        return ids.long()


def described_rows(rows: Tree, dims: int = 2) -> str:
    """Return the fields of stacked rows with dtype and shape, without the leading `dims` dimensions.

    >>> described_rows({"x": torch.zeros(4, 9, 3), "y": torch.zeros(4, 9, dtype=torch.int64)})
    'x: float32 (3,), y: int64 ()'
    """
    fields = (
        f"{path + ': ' if path else ''}{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape[dims:])}"
        for path, leaf in tree.items(rows)
    )
    return ", ".join(fields)


def field_name(path: str) -> str:
    """Return the name of the leaf at `path` in messages.

    >>> field_name("0"), field_name("")
    ("field '0'", 'the tensor of rows')
    """
    return f"field {path!r}" if path else "the tensor of rows"


def _to(leaf: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)
