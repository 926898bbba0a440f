"""A population whose clients all run in this process, stacked."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch._devices import is_cuda
from fedtorch.data import ClientData, FederatedData
from fedtorch.expected import loaded
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry, plain
from fedtorch.federation.populations.clients import SMALL_BLOCK, LocalClients
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.data import FederatedLoaders
    from fedtorch.data.digests import Notes


class InProcess:
    """All clients in this process, stacked in blocks of similar size.

    Args:
        data: the clients' rows; rows on disk, see `FederatedData.from_file`, are read for the clients of a round only.
            Or their loaders, see `ft.data.from_loaders`, from which a round takes batches.
        chunk: most clients at once; 1 runs one after another. Default: as many as fit 128 MiB, or a quarter of a CUDA
            device's free memory; 8 clients with loaders, or 64 if their batches are padded.
        device: device of blocks and states; default: the data's.
        carry: transport of messages; sums under masks are simulated, with every key, share and signature, and protect
            nobody here.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))] * 3)
        >>> ft.InProcess(data, chunk=1).names  # one client after another
        ('0', '1', '2')
    """

    def __init__(
        self,
        data: FederatedData | FederatedLoaders,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        *,
        carry: Carry = plain(),  # noqa: B008
    ) -> None:
        self.data, self.names, self.device = placed(data, chunk, device)
        self.chunk, self.leads, self.carry = chunk, True, carry
        self._blocks: list[tuple[Tensor, ClientData]] | None = None

    def blocks(self) -> list[tuple[Tensor, ClientData]]:
        """Return the clients stacked in blocks of similar size, made once."""
        if self._blocks is None:
            self._blocks = self.data.buckets(small=SMALL_BLOCK)
        return self._blocks

    @functools.cached_property
    def _noted(self) -> Notes:
        from fedtorch.data.digests import noted

        return noted(self.data)

    def noted(self, clients: int | None = None) -> Mapping[str, Tensor]:
        """Return the digests of rows for checkpoints; see `Population.noted`."""
        from fedtorch.data.digests import noted

        return self._noted if clients in (None, len(self.data)) else noted(self.data, clients)

    def bind(self, algorithm: Algorithm, state: Tree) -> LocalClients:
        """Return the clients for one run of `algorithm`."""
        if self.data.on_disk:
            from fedtorch.federation.populations.stored import StoredClients

            return StoredClients(algorithm, state, self.data, self.chunk)
        return LocalClients(algorithm, state, self.data.names, self.blocks(), len(self.data), self.chunk)

    def __repr__(self) -> str:
        return f"InProcess({self.data!r})"


def placed(
    data: Any, chunk: int | None, device: torch.device | str | None
) -> tuple[Any, tuple[str, ...], torch.device]:
    """Return (data on the device, their clients' names, the device), after checks for a population."""
    if not isinstance(data, (FederatedData, loaded("fedtorch.data.loaders", "FederatedLoaders"))):
        raise TypeError(
            f"Expected FederatedData, but got {type(data).__name__}; make it with ft.data.from_tensors, "
            "from_datasets, from_frame or partition, or take loaders as they are by from_loaders"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"Expected chunk of at least 1, but got {chunk}")
    if device is not None and is_cuda(torch.device(device)) and not torch.cuda.is_available():
        raise ValueError(f"Expected a CUDA device for device={str(device)!r}, but got none; leave device= away")
    data = data if device is None else data.to(device)
    return data, data.names, data.device
