"""Parties, each with its features of its rows, and the alignment of their rows.

>>> clinic = Party("clinic", ["ann", "bob", "cem"], torch.tensor([[1.0], [2.0], [3.0]]), ["age"])
>>> labels = Party("registry", ["cem", "ann"], response=torch.tensor([1.0, 0.0]))
>>> aligned = align([clinic, labels])
>>> aligned.data.features[0].flatten().tolist(), aligned.data.response.tolist()
([1.0, 3.0], [0.0, 1.0])
"""

from __future__ import annotations

import dataclasses
import math
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedtorch._representation import call, one_line, without_rows
from fedtorch.data.partition import split_features
from fedtorch.vfl.rows.data import VerticalData

if TYPE_CHECKING:
    from fedtorch.data import VerticalTable


_CHANCE = 1e-6
_MOST_CLASSES = 20


@dataclass(frozen=True, repr=False)
class Party:
    """Data of one party: features, labels, or both.

    Attributes:
        name: of the party.
        identifiers: of its rows, such as patients' numbers; strings, compared in Unicode's normal form C.
        x: its features, `(n, p)`, or rows of any shape `(n, ...)`; None for a party with labels only.
        features: names of its columns, where it has columns.
        response: the labels `(n,)`, at the party that has them.

    Raises:
        ValueError: neither features nor labels, or numbers of rows or columns that differ.
    """

    name: str
    identifiers: Sequence[str]
    x: Tensor | None = None
    features: Sequence[str] = ()
    response: Tensor | None = None

    def __post_init__(self) -> None:
        rows = len(self.identifiers)
        if self.x is None and self.response is None:
            raise ValueError(f"Expected features or labels at {self.name!r}, but got neither")
        for what, value in (("features", self.x), ("response", self.response)):
            if value is not None and (value.ndim == 0 or len(value) != rows):
                raise ValueError(
                    f"Expected {rows} rows of {what} at {self.name!r}, one per identifier, but got {tuple(value.shape)}"
                )
        if self.features and (self.x is None or len(self.features) != self.x.shape[1]):
            shape = None if self.x is None else tuple(self.x.shape)
            raise ValueError(
                f"Expected a column for each of {len(self.features)} names at {self.name!r}, but got {shape}"
            )

    def __repr__(self) -> str:
        """Return a line that is safe to log: sizes and names of columns, and no identifier, row or label."""
        has = {"x": self.x, "features": list(self.features) or None, "response": self.response}
        return one_line(partial(call, "Party", [repr(self.name), f"{len(self.identifiers)} rows"], has))

    def distinct(self) -> Party:
        """Return the party with the first row of each identifier only."""
        names = [
            unicodedata.normalize("NFC", identifier) for identifier in self.identifiers
        ]  # as `align` compares them
        first = {name: row for row, name in reversed(list(enumerate(names)))}
        return self.take(torch.tensor(sorted(first.values()), dtype=torch.long))

    def take(self, rows: Tensor) -> Party:
        """Return the party with these rows `(m,)` only, in this order."""
        select = lambda value: None if value is None else value[rows]
        names = [self.identifiers[row] for row in rows.tolist()]
        return dataclasses.replace(self, identifiers=names, x=select(self.x), response=select(self.response))

    @classmethod
    def from_table(
        cls, table: VerticalTable, identifiers: Sequence[str] | None = None, names: Sequence[str] | None = None
    ) -> list[Party]:
        """Return the parties that hold the columns of a table, and one named `labels` that holds the labels only.

        Args:
            table: such as `fedtorch.data.heart_failure()`.
            identifiers: of the rows; their numbers by default.
            names: of the parties; `party 0`, … by default.

        >>> import fedtorch as ft
        >>> columns = ("age", "sex", "pulse")
        >>> table = ft.data.VerticalTable(torch.ones(2, 3), torch.tensor([0, 1]), columns, ((0, 2), (1,)), (0, 2))
        >>> clinic, laboratory, labels = Party.from_table(table, names=["clinic", "laboratory"])
        >>> clinic.features, clinic.x.shape, labels.response
        (['age', 'pulse'], torch.Size([2, 2]), tensor([0, 1]))
        """
        rows = [str(row) for row in range(len(table.y))] if identifiers is None else list(identifiers)
        party_names = [f"party {j}" for j in range(len(table.parties))] if names is None else list(names)
        parts = zip(party_names, split_features(table.x, table.parties), table.parties, strict=True)
        holders = [cls(name, rows, x, [table.features[c] for c in columns]) for name, x, columns in parts]
        return [*holders, cls("labels", rows, response=table.y)]


@without_rows
class Aligned(NamedTuple):
    """Rows that parties share, in one order.

    >>> clinic = Party("clinic", ["ann", "bob"], torch.tensor([[1.0], [2.0]]))
    >>> labels = Party("registry", ["bob", "cem"], response=torch.tensor([1.0, 0.0]))
    >>> aligned = align([clinic, labels], required=["registry"])
    >>> aligned.names, aligned.rows
    (('clinic',), {'clinic': tensor([ 1, -1]), 'registry': tensor([0, 1])})
    >>> aligned.data.present
    tensor([[ True], [False]])
    """

    data: VerticalData
    names: tuple[str, ...]  # of the parties with features, in the order of `data.features`
    rows: dict[str, Tensor]  # (n,) each party's own rows by its name, −1 where it lacks one
    bytes: int  # that the alignment sent


def align(parties: Sequence[Party], *, required: Iterable[str] | None = None) -> Aligned:
    """Align rows by private set intersection; `fedtorch.vfl.rows.alignment` says what each party learns.

    The party with the labels leads, and the common order is that of its identifiers. A row is included if all required
    parties have it. Where another party lacks it, that party's features are zero and `data.present` is False.

    Args:
        parties: with distinct names; one of them has the labels.
        required: names of the parties that must have a row for it to be included; all by default.

    Raises:
        ValueError: not exactly one party with labels, an unknown name, an identifier twice at one party, or no row in
            common.

    Warns:
        LabelLeakageWarning: a feature that determines the label.
    """
    from fedtorch.vfl.rows.alignment import intersect  # imported here, because only alignment needs `cryptography`

    leader = _with_labels(parties)
    needed = None if required is None else [name for name in required if name != leader.name]
    for name in needed or []:
        party_named(parties, name)
    common = intersect({party.name: party.identifiers for party in parties}, leader.name, needed)
    rows = {party.name: places for party, places in zip(parties, common.rows)}
    assert leader.response is not None
    response = leader.response[rows[leader.name]]
    holders = [party for party in parties if party.x is not None]
    features = tuple(_filled(party, rows[party.name]) for party in holders)
    present = torch.stack([rows[party.name] >= 0 for party in holders], 1)
    for party, x, places in zip(holders, features, present.T):
        warn_of_leakage(x[places], response[places], party.name, party.features)
    data = VerticalData(features, response, present=None if bool(present.all()) else present)
    return Aligned(data, tuple(party.name for party in holders), rows, common.bytes)


def joined(parties: Sequence[Party]) -> VerticalData:
    """Join the features of rows that are aligned already.

    Raises:
        ValueError: not exactly one party with labels, different numbers of rows, or identifiers in different orders.

    Warns:
        LabelLeakageWarning: a feature that determines the label.

    >>> clinic = Party("clinic", ["ann", "bob"], torch.tensor([[1.0], [2.0]]), response=torch.tensor([0.0, 1.0]))
    >>> laboratory = Party("laboratory", ["ann", "bob"], torch.zeros(2, 3))
    >>> [x.shape for x in joined([clinic, laboratory]).features]
    [torch.Size([2, 1]), torch.Size([2, 3])]
    """
    leader = _with_labels(parties)
    assert leader.response is not None
    for party in parties:
        if len(party.identifiers) != len(leader.identifiers):
            raise ValueError(
                f"Expected {len(leader.identifiers)} rows at {party.name!r} as at {leader.name!r}, but got "
                f"{len(party.identifiers)}; align them first"
            )
        differ = [i for i, (a, b) in enumerate(zip(party.identifiers, leader.identifiers)) if a != b]
        if differ:
            raise ValueError(
                f"Expected the identifiers of {leader.name!r} at {party.name!r}, but row {differ[0]} has another "
                f"({len(differ)} do); align them first"
            )
    holders = [party for party in parties if party.x is not None]
    for party in holders:
        assert party.x is not None
        warn_of_leakage(party.x, leader.response, party.name, party.features)
    return VerticalData(tuple(party.x for party in holders if party.x is not None), leader.response)


def party_named(parties: Sequence[Party], name: str) -> Party:
    """Return the party of this name.

    Raises:
        ValueError: there is none.
    """
    for party in parties:
        if party.name == name:
            return party
    raise ValueError(f"Expected one of the parties {[party.name for party in parties]}, but got {name!r}")


def _with_labels(parties: Sequence[Party]) -> Party:
    names = [party.name for party in parties]
    if len(set(names)) < len(names):
        raise ValueError(f"Expected parties with distinct names, but got {names}")
    holders = [party for party in parties if party.response is not None]
    if len(holders) != 1 or not any(party.x is not None for party in parties):
        raise ValueError(
            f"Expected one party with labels and at least one with features, but got labels at "
            f"{[party.name for party in holders]} of {names}"
        )
    return holders[0]


def _filled(party: Party, rows: Tensor) -> Tensor:
    """Return the party's features in the common order, zero for rows that it lacks."""
    assert party.x is not None
    values = party.x.new_zeros(len(rows), *party.x.shape[1:])
    values[rows >= 0] = party.x[rows[rows >= 0]]
    return values


class LabelLeakageWarning(UserWarning):
    """Warning that a party's feature determines the label.

    >>> ill = torch.tensor([0.0, 1.0] * 20)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", LabelLeakageWarning)
    ...     warn_of_leakage(torch.stack([torch.arange(40.0) % 7, 1 - ill], 1), ill, "clinic", ["ward", "discharged"])
    Traceback (most recent call last):
    fedtorch.vfl.rows.parties.LabelLeakageWarning: Feature 'discharged' of party 'clinic' determines the label;
    is it made from it, or known only after it?
    """


def warn_of_leakage(x: Tensor, response: Tensor, party: str, names: Sequence[str] = ()) -> None:
    r"""Warn of every column of a party that determines the response.

    A column with v distinct values determines the labels where all rows of one value have one label, or where the
    labels follow each other in blocks along its order. Of all arrangements of n labels with class counts :math:`n_c` at
    most :math:`C^v`, and C! for blocks, do so; where these are a share of less than 10⁻⁶, the column is not taken to
    determine the labels by chance. A real response is determined where it is a linear function of a column.

    Args:
        x: `(n, p)`; features of another shape, such as images, are not checked.
        response: `(n,)`.
        party: its name.
        names: of the columns.
    """
    if x.ndim != 2:
        return
    for column in range(x.shape[1]):
        if determines(x[:, column], response):
            name = repr(names[column]) if names else f"number {column}"
            warnings.warn(
                f"Feature {name} of party {party!r} determines the label; is it made from it, or known only after it?",
                LabelLeakageWarning,
                stacklevel=3,
            )


def determines(feature: Tensor, response: Tensor) -> bool:
    """Return whether a column `(n,)` determines a response `(n,)`, beyond chance."""
    seen = feature.isfinite()
    feature, response = feature[seen].double(), response[seen].double()
    labels, codes, counts = response.unique(return_inverse=True, return_counts=True)
    if len(feature) < 3 or len(labels) < 2:
        return False
    if len(labels) > _MOST_CLASSES:
        return _linear(feature, response)
    arrangements = math.lgamma(len(feature) + 1) - sum(math.lgamma(count + 1) for count in counts.tolist())
    values, places = feature.unique(return_inverse=True)
    pure = torch.zeros(len(values), len(labels), dtype=torch.bool)
    pure[places, codes] = True
    if bool((pure.sum(1) > 1).any()):
        return False
    ordered = pure.int().argmax(1)  # the one label of each value, in the order of values
    blocks = int((ordered[1:] != ordered[:-1]).sum()) + 1
    ways = len(values) * math.log(len(labels))
    if blocks == len(labels):
        ways = min(ways, math.lgamma(len(labels) + 1))
    return ways - arrangements < math.log(_CHANCE)


def _linear(feature: Tensor, response: Tensor) -> bool:
    a, b = feature - feature.mean(), response - response.mean()
    scale = a.norm() * b.norm()
    return bool(scale > 0 and (a @ b).abs() / scale > 1 - 1e-9)
