"""The first batches of every client, as a Trainer's limits of validation and tests mean them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch

from fedtorch import expected, tree
from fedtorch.data import BadClients, FederatedLoaders
from fedtorch.federation.local_schedule import limited
from fedtorch.federation.runs.evaluation import Evaluable


def first_batches(data: Evaluable, batch_size: int | None, limit: float) -> Evaluable:
    """Return the first batches of each client, at most so many, or this share of them if the limit is a float.

    Args:
        data: of clients with rows, or with loaders.
        batch_size: of rows.
        limit: see above.

    Raises:
        ValueError: a share leaves none of some client's, or all rows are one batch.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([torch.arange(5.0), torch.arange(3.0)])
        >>> [rows.tolist() for rows in first_batches(data, batch_size=2, limit=1)]
        [[0.0, 1.0], [0.0, 1.0]]
    """
    if isinstance(data, FederatedLoaders):
        return FirstOfLoaders(**{f.name: getattr(data, f.name) for f in fields(data) if f.init}, limit=limit)
    if batch_size is None:
        raise ValueError(
            f"Expected ft.Federation(…, evaluation_batch_size=) for a limit of {limit} batches, but got none: a "
            "client's rows are one batch"
        )
    try:
        taken = limited((data.counts + batch_size - 1) // batch_size, limit)
    except BadClients as error:
        raise ValueError(f"Client {data.names[error.rows[0]]!r}: {error}") from error
    counts = (taken * batch_size).minimum(data.counts)
    within = torch.arange(int(data.counts.sum())) - data.starts.repeat_interleave(data.counts)
    kept = (within < counts.repeat_interleave(data.counts)).nonzero()[:, 0]
    return replace(data, rows=tree.map(lambda leaf: leaf[kept.to(leaf.device)], data.rows), counts=counts)


@dataclass(frozen=True, eq=False, repr=False)
class FirstOfLoaders(FederatedLoaders):
    """Clients with loaders, of which the first batches are read.

    Args:
        limit: see `first_batches`.
    """

    limit: float = 1.0

    def batches(self, client: int | str, seed: int) -> Iterator[Any]:
        """Iterate over the first batches of a client's loader; see `FederatedLoaders.batches`."""
        number = expected.client_number(client, self.names)
        most = int(limited(torch.tensor([self.steps(number)]), self.limit))
        with closing(super().batches(client, seed)) as every:  # type: ignore[type-var]
            yield from islice(every, most)
