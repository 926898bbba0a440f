"""Shared helpers of the loaders: from files' tables to clients' rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data.cache import locate
from fedtorch.data.federated import FederatedData
from fedtorch.data.sources import as_tensors
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas


def read(name: str, filename: str, **options: Any) -> pandas.DataFrame:
    """Read a file of a data set by pandas."""
    import pandas  # imported here, because it is slow to import and few runs need it

    return pandas.read_csv(locate(name, filename), **options)


def by_client(
    client: Any, rows: Tree, dtype: torch.dtype, features: Sequence[str], names: Sequence[str] | None = None
) -> FederatedData:
    """Return rows grouped by client, otherwise in their order.

    Args:
        client: of each row, n strings.
        rows: a tree of arrays `(n, ...)`; floats become `dtype`, integers int64.
        dtype: of the floats.
        features: the names of the columns of the first array.
        names: the selected clients, in their order; default: all in order of first appearance.
    """
    labels = [str(c) for c in client]
    wanted = list(dict.fromkeys(labels)) if names is None else list(names)
    number = {name: k for k, name in enumerate(wanted)}
    codes = torch.tensor([number.get(label, -1) for label in labels])
    index = codes.argsort(stable=True)[int((codes < 0).sum()) :]

    def take(leaf: Tensor) -> Tensor:
        return leaf.to(dtype if leaf.is_floating_point() else torch.int64)[index]

    counts = codes[index].bincount(minlength=len(wanted))
    return FederatedData(tree.map(take, as_tensors(rows)), counts, tuple(wanted), features=tuple(features))


def scaled(x: numpy.ndarray, standardise: bool) -> numpy.ndarray:
    """Return `x` `(n, d)` with mean 0 and variance 1 per column if so wished; constant columns become 0."""
    if not standardise:
        return x
    spread = x.std(axis=0)
    return (x - x.mean(axis=0)) / numpy.where(spread > 0, spread, 1.0)


def one_hot(frame: pandas.DataFrame, drop_first: bool) -> pandas.DataFrame:
    """Return the numeric columns unchanged, each other one as columns `name=level` in sorted order of the levels."""
    import pandas

    text = [name for name in frame.columns if not pandas.api.types.is_numeric_dtype(frame[name])]
    return pandas.get_dummies(frame, columns=text, prefix_sep="=", drop_first=drop_first, dtype=float)


def choose(what: str, wanted: Sequence[str] | None, available: Sequence[str]) -> list[str]:
    """Return the `wanted` names, or all; refuse unavailable and repeated names."""
    if wanted is None:
        return list(available)
    if isinstance(wanted, str) or not wanted:
        raise ValueError(f"Expected a list of {what}, but got {wanted!r}; pass for example [{available[0]!r}]")
    if unknown := [name for name in wanted if name not in set(available)]:
        raise ValueError(f"Expected {what} in {list(available)}, but got {unknown}")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"Expected every one of the {what} once, but got {list(wanted)}; remove the repetition")
    return list(wanted)
