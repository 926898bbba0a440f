"""How many rows and batches one pass over a loader has."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset


def rows_of_pass(name: str, loader: Any, stated: int | None) -> int:
    """Return the rows of one pass over a client's loader."""
    if not isinstance(name, str):
        raise TypeError(f"Expected client names as strings, but got {name!r}; use str()")
    if isinstance(loader, Tensor | str) or not hasattr(loader, "__iter__"):
        raise TypeError(f"Expected a DataLoader for client {name!r}, but got {type(loader).__name__}")
    parts = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, (list, tuple)) else ()
    if any(isinstance(part, DataLoader) for part in parts):
        raise TypeError(
            f"Expected one loader for client {name!r}, but got a {type(loader).__name__} of {len(loader)}; join "
            "them by Lightning's CombinedLoader, or make data of each"
        )
    if hasattr(loader, "__next__") and not hasattr(loader, "__len__"):
        raise TypeError(
            f"Expected a loader that begins anew in every round for client {name!r}, but got {type(loader).__name__}, "
            "which can be gone through once only"
        )
    count = _known_rows(loader) if stated is None else operator.index(stated)
    if count is None:
        raise ValueError(
            f"Expected a known number of rows of client {name!r}, but its loader does not tell; state it: "
            f"lengths={{{name!r}: rows}}"
        )
    if count < 1 or steps_of_pass(loader, count) < 1:
        raise ValueError(
            f"Expected at least one batch per client, but got none from the loader of client {name!r}; leave the "
            "client out, or take drop_last=False"
        )
    return count


def _known_rows(loader: Any) -> int | None:
    """Return the rows of one pass, None if the loader does not tell."""
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_sampler is None and loader.batch_size is None:  # of rows or of whole batches: it does not say
        return None
    if isinstance(loader.batch_sampler, (list, tuple)):
        return sum(len(batch) for batch in loader.batch_sampler)
    try:
        if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
            return len(loader.dataset)  # type: ignore[arg-type]
        count = len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    size = loader.batch_size or 1
    return count // size * size if loader.drop_last else count


def steps_of_pass(loader: Any, count: int) -> int:
    """Return the batches of one pass, by the loader's length or else by its rows and batch size."""
    try:
        return len(loader if not hasattr(loader, "__next__") else iter(loader))  # which some know once they have begun
    except (TypeError, NotImplementedError):
        size = getattr(loader, "batch_size", None) or 1
        return count // size if getattr(loader, "drop_last", False) else -(-count // size)
