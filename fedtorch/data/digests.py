"""Counts and digests of clients' rows, which detect accidental changes.

They detect mistakes, not deception. Words that divide a row are added up, in stretches whose order counts, at the speed
of memory; in addition a digest of evenly spread rows depends on the order within stretches. A changed number is
therefore always detected; a changed order within a stretch always in small data, usually in large ones.

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0])), (torch.ones(1, 2), torch.ones(1))])
>>> before = noted(data)
>>> other = data.map(lambda rows: (rows[0], rows[1].index_fill(0, torch.tensor([2]), 7.0)))
>>> different(before, noted(other), data.names)
"client '1' has other rows"
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data.federated import FederatedData
from fedtorch.data.loaders import FederatedLoaders

_STRETCH = 512  # words that are added up together
_SPREAD = 16 * 2**10  # bytes of evenly spread rows in the digest
_WORDS = tuple(np.dtype(kind) for kind in (np.int64, np.int32, np.int16, np.uint8))

Notes = dict[str, Tensor]


def noted(data: FederatedData | FederatedLoaders, clients: int | None = None) -> Notes:
    """Return the numbers of rows and their digests of the first `clients` of some data, default all.

    Returns:
        `counts` `(K,)`; of rows in memory `digests` `(K,)` and `spread` `()` too.
    """
    counts = data.counts[:clients]
    if data.on_disk:
        return {"counts": counts}
    lengths, digests = counts.numpy(), np.zeros(len(counts), dtype=np.int64)
    total, hashed = int(lengths.sum()), hashlib.sha256()
    rows = [_bytes(leaf, total) for leaf in tree.leaves(data.rows)]
    every = 1 + sum(leaf.size for leaf in rows) // _SPREAD
    for i, leaf in enumerate(rows):
        digests += (2 * i + 1) * _sums(leaf, lengths)
        hashed.update(f"{leaf.shape[1]} bytes".encode())
        hashed.update(leaf[::every].tobytes())
    spread = torch.tensor(int.from_bytes(hashed.digest()[:8], "big", signed=True))
    return {"counts": counts, "digests": torch.from_numpy(digests), "spread": spread}


def different(before: Mapping[str, Tensor], now: Mapping[str, Tensor], names: Sequence[str]) -> str | None:
    """Describe the clients whose rows differ between two sets of digests; None without a difference."""
    if "counts" in before and "counts" in now:
        if len(before["counts"]) != len(now["counts"]):
            return f"there are {len(now['counts'])} clients and were {len(before['counts'])}"
        for client in (before["counts"] != now["counts"]).nonzero()[:1, 0].tolist():
            return (
                f"client {names[client]!r} has {int(now['counts'][client])} rows and had "
                f"{int(before['counts'][client])}"
            )
    if "digests" in before and "digests" in now:
        for client in (before["digests"] != now["digests"]).nonzero()[:1, 0].tolist():
            return f"client {names[client]!r} has other rows"
        if not torch.equal(before["spread"], now["spread"]):
            return "clients have their rows in another order, or their fields"
    return None


def _bytes(leaf: Tensor, total: int) -> np.ndarray:
    """Return the first rows as bytes, `(total, bytes of a row)`."""
    return leaf[:total, None].flatten(1).detach().cpu().contiguous().view(torch.uint8).numpy()


def _sums(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return a sum of each client's words `(K,)`, in which the order of stretches counts."""
    filled, size = counts.nonzero()[0], rows.shape[1]
    if rows.size == 0:
        return np.zeros(len(counts), dtype=np.int64)
    word = next(word for word in _WORDS if size % word.itemsize == 0)
    words, lengths = rows.reshape(-1).view(word), counts[filled] * (size // word.itemsize)
    kind = word if word.itemsize > 2 else _WORDS[0]  # sums of short words would be short
    starts = lengths.cumsum() - lengths
    if lengths.max() <= _STRETCH:
        sums = np.add.reduceat(words, starts, dtype=kind)
    else:
        stretches = -(-lengths // _STRETCH)
        firsts = stretches.cumsum() - stretches
        place = np.arange(stretches.sum()) - np.repeat(firsts, stretches)  # of a stretch, in its client
        each = np.add.reduceat(words, np.repeat(starts, stretches) + place * _STRETCH, dtype=kind)
        sums = np.add.reduceat(each * (2 * place + 1), firsts)
    if len(filled) == len(counts):
        return sums
    digests = np.zeros(len(counts), dtype=np.int64)
    digests[filled] = sums
    return digests
