"""A Trainer over ranks: the strategy of a federation whose clients are sharded."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from fedtorch.checkpoint_io import PlainCheckpointIO


class ClientSharding(DDPStrategy):
    """The Trainer's strategy for a `Distributed` population: one process per rank, the module is not wrapped.

    The first rank writes checkpoints, with the states of all ranks' clients in them; each can be loaded with another
    number of ranks, one included.

    Example:
        >>> import fedtorch as ft
        >>> strategy = ft.ClientSharding()  # for L.Trainer(devices=2, strategy=strategy), started by torchrun
        >>> strategy.checkpoint_io
        <fedtorch.checkpoint_io.PlainCheckpointIO object at ...>
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None, **options: Any) -> None:
        super().__init__(checkpoint_io=checkpoint_io or PlainCheckpointIO(), **options)

    def configure_ddp(self) -> None:
        """Return the module unwrapped: ranks communicate in the population's exchange."""
