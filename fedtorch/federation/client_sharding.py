"""A Trainer over ranks: the strategy of a federation whose clients are sharded."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from fedtorch.federation.checkpoint_io import PlainCheckpointIO
from fedtorch.federation.distributed import Distributed
from fedtorch.federation.population import Population


class ClientSharding(DDPStrategy):
    """The Trainer's strategy for a `Distributed` population: one process per rank, the module is not wrapped.

    The first rank writes checkpoints, with the states of all ranks' clients in them; each can be loaded with another
    number of ranks, one included.

    Example:
        >>> import fedtorch as ft
        >>> strategy = ft.ClientSharding()  # for L.Trainer(devices=2, strategy=strategy), started by torchrun
        >>> strategy.checkpoint_io
        <fedtorch.federation.checkpoint_io.PlainCheckpointIO object at ...>
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None, **options: Any) -> None:
        super().__init__(checkpoint_io=checkpoint_io or PlainCheckpointIO(), **options)

    def configure_ddp(self) -> None:
        """Nothing to wrap: the ranks meet in the population's exchange."""


def check_place(trainer: L.Trainer, population: Population) -> None:
    """Refuses to train the same clients several times over, or to lose those of other ranks.

    Raises:
        ValueError: population, strategy and number of processes do not belong together; the message says what does.
    """
    place = trainer.global_rank, trainer.world_size
    if isinstance(population, Distributed):
        if place != (population.rank, population.world_size):
            raise ValueError(
                f"Expected the population and the Trainer in one place, but the population is rank "
                f"{population.rank} of {population.world_size} and the Trainer {place[0]} of {place[1]}; start "
                "with torchrun, and give the Trainer as many devices= and num_nodes="
            )
    elif trainer.world_size > 1:
        raise ValueError(
            f"Expected a ft.Distributed population for {trainer.world_size} processes, but got "
            f"{type(population).__name__}, whose clients would all run in every process; use ft.Distributed(data) "
            "and strategy=ft.ClientSharding()"
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, ClientSharding):
        raise ValueError(
            f"Expected strategy=ft.ClientSharding() for {trainer.world_size} processes, but got "
            f"{type(trainer.strategy).__name__}, which would save the clients of one rank only"
        )
