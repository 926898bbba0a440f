"""Aligned rows: the parties' features, and the response, offset and weights.

What does not differ over the batch (folds × models × seeds) has no leading dimension.

>>> import torch, fedtorch as ft
>>> data = ft.vfl.VerticalData((torch.ones(3, 2), torch.ones(3, 4)), torch.tensor([0.0, 1.0, 1.0]))
>>> len(data.features), int(data.total)
(2, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch._representation import call, one_line, without_rows


@without_rows
class _Fields(NamedTuple):
    features: tuple[Tensor, ...]  # (n, ...) or (B, n, ...), one per party
    response: Tensor  # (n,) or (B, n)
    offset: Tensor | None = None  # (n,) or (B, n), added to the predictor
    weight: Tensor | None = None  # (n,) or (B, n), zero for the rows that a fold leaves out
    present: Tensor | None = None  # (n, J) bool, False for the rows that a party lacks; split networks take these
    weight_total: Tensor | None = None  # () or (B,), the sum of the weights of all rows, where these are a minibatch
    rows: Tensor | None = None  # (n,) which rows a minibatch has


class VerticalData(_Fields):
    """Aligned rows, or a minibatch of them.

    Args:
        features: `(n, ...)` or `(B, n, ...)`, one per party.
        response: `(n,)` or `(B, n)`; NaN everywhere at a party that does not know it.
        offset: `(n,)` or `(B, n)`, added to the predictor.
        weight: `(n,)` or `(B, n)`, zero for the rows that a fold leaves out.
        present: `(n, J)` bool, False for the rows that a party lacks; split networks take these.
        weight_total: `()` or `(B,)`, the sum of the weights of all rows, where these are a minibatch.
        rows: `(n,)` which rows a minibatch has.

    Raises:
        ValueError: parts of other numbers of rows, or features that are not finite.
    """

    __slots__ = ()

    def __new__(
        cls,
        features: tuple[Tensor, ...],
        response: Tensor,
        offset: Tensor | None = None,
        weight: Tensor | None = None,
        present: Tensor | None = None,
        weight_total: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> VerticalData:
        made = super().__new__(cls, features, response, offset, weight, present, weight_total, rows)
        _check_parts(made)
        return made

    def __repr__(self) -> str:
        """Return a line that is safe to log: shapes, and no row."""
        shapes = [tuple(x.shape) for x in self.features]
        return one_line(partial(call, "VerticalData", [f"features={shapes}"], dict(zip(self._fields[1:], self[1:]))))

    @property
    def y(self) -> Tensor:
        """Return the response beside draws, `(1 or B, 1, n)`."""
        return self.response.reshape(-1, 1, self.response.shape[-1])

    @property
    def total(self) -> Tensor:
        """The sum of all rows' weights, with those that a minibatch leaves out, `()` or `(B,)`."""
        if self.weight_total is not None:
            return self.weight_total
        if self.weight is None:
            return torch.tensor(self.response.shape[-1], device=self.response.device)
        return self.weight.sum(-1)

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Return Σ_i w_i v_i, `(B, M, n)` -> `(B, M)`."""
        if self.weight is None:
            return values.sum(-1)
        return (values * self.weight.reshape(-1, 1, self.weight.shape[-1])).sum(-1)

    def to(self, device: torch.device | str) -> VerticalData:
        """Return the rows on a device.

        >>> VerticalData((torch.ones(3, 2),), torch.zeros(3)).to("cpu").features[0].device
        device(type='cpu')
        """
        return VerticalData._make(tree.to(tuple(self), device))

    def to_dtype(self, dtype: torch.dtype) -> VerticalData:
        """Convert response, offset and weights to this dtype; features keep theirs."""
        convert = lambda value: None if value is None else value.to(dtype)
        return self._replace(response=self.response.to(dtype), offset=convert(self.offset), weight=convert(self.weight))

    def take(self, rows: Tensor, row_dims: Sequence[int] | None = None) -> VerticalData:
        """Return the minibatch of these rows, weighted so that its sums are unbiased estimates of those of all rows.

        Args:
            rows: `(m,)` indices.
            row_dims: dimensions of one party's row; 1 each by default.
        """
        scale = self.response.shape[-1] / len(rows)
        dims = [1] * len(self.features) if row_dims is None else row_dims
        select = lambda value: None if value is None else value.index_select(-1, rows)
        if self.weight is None:
            weight = torch.full_like(rows, scale, dtype=torch.promote_types(self.response.dtype, torch.float32))
        else:
            weight = self.weight.index_select(-1, rows) * scale
        return self._replace(
            features=tuple(x.index_select(x.ndim - 1 - d, rows) for x, d in zip(self.features, dims)),
            response=self.response.index_select(-1, rows),
            offset=select(self.offset),
            weight=weight,
            present=None if self.present is None else self.present[rows],
            weight_total=self.total,
            rows=rows,
        )

    def of_party(self, index: int) -> VerticalData:
        """Return the data of party `index`, from 0 on: its features alone, and weight zero on rows that it lacks."""
        mine = self._replace(features=self.features[index : index + 1])
        if self.present is None:
            return mine
        present = self.present[:, index : index + 1]
        known = present[:, 0].to(self.response.dtype)
        weight = known if self.weight is None else self.weight * known
        return mine._replace(weight=weight, present=present, weight_total=self.total)

    def known_to_parties(self, response: bool) -> list[VerticalData]:
        """Return each party's data: its features, and the response or NaN in its place."""
        response_or_nan = self.response if response else torch.full_like(self.response, torch.nan, dtype=torch.float32)
        split = [None] * len(self.features) if self.present is None else list(self.present.split(1, 1))
        return [
            VerticalData._make(((x,), response_or_nan, None, self.weight, of_party, None, None))
            for x, of_party in zip(self.features, split)
        ]

    def known_to_server(self) -> VerticalData:
        """Return the server's data: everything but the features."""
        return self._replace(features=(), present=None)

    def check_known(self) -> None:
        """Raise `ValueError` unless offset, weights and `present` have the rows' shapes, are finite and weights ≥ 0."""
        rows = self.response.shape[-1]
        if not rows:
            raise ValueError("Expected at least one row, but got none; see how the parties' rows were aligned")
        for name, value in (("offset", self.offset), ("weight", self.weight)):
            if value is None:
                continue
            if value.shape[-1] != rows:
                raise ValueError(f"Expected {name} of {rows} rows, but got shape {tuple(value.shape)}")
            if not bool(value.isfinite().all()) or (name == "weight" and bool((value < 0).any())):
                raise ValueError(f"Expected a finite offset and weights from 0 on, but got {name} with others")
        if self.present is not None and self.present.shape != (rows, len(self.features)):
            parties = len(self.features)
            raise ValueError(f"Expected present of shape ({rows}, {parties}), but got {tuple(self.present.shape)}")


def _check_parts(data: VerticalData) -> None:
    """Raise `ValueError` unless all parts have the response's rows, and features are finite."""
    for j, x in enumerate(data.features):
        expected.kind(x, Tensor, f"features of party {j} as a tensor", "use torch.as_tensor, a tensor for every party")
        expected.dense(x, f"features of party {j}")
    rows = data.response.shape[-1] if data.response.ndim else -1
    parts = [(f"features of party {j}", x, x.shape[:2]) for j, x in enumerate(data.features)]
    parts += [
        (name, x, x.shape[-1:]) for name, x in (("offset", data.offset), ("weight", data.weight)) if x is not None
    ]
    for name, value, sizes in parts:
        if rows not in sizes:
            raise ValueError(
                f"Expected {name} of {max(rows, 0)} rows, as many as the response has, but got shape "
                f"{tuple(value.shape)}; align the rows, see `fedtorch.vfl.align`"
            )
    for j, x in enumerate(data.features):
        if x.is_complex():
            raise TypeError(f"Expected real features of party {j}, but got {x.dtype}; pass real and imaginary parts")
        if not bool(x.isfinite().all()):
            raise ValueError(f"Expected finite features of party {j}, but got NaN or Inf; impute them first")
    unknown = data.response.isnan()
    if bool(unknown.any()) and not bool(unknown.all()):
        raise ValueError(
            f"Expected a response of numbers, or NaN everywhere where it is not known, but got NaN in row "
            f"{int(unknown.nonzero()[0, -1])}; leave such rows out"
        )
    data.check_known()
