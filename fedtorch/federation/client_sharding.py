"""A Trainer over ranks: the strategy of a federation whose clients are sharded, and its checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from fedtorch.federation.distributed import Distributed
from fedtorch.federation.population import Population

__all__ = ["ClientSharding", "check_place"]


class ClientSharding(DDPStrategy):
    """The Trainer's strategy for a `Distributed` population: one process per rank, the module is not wrapped.

    A checkpoint is a folder, on a file system that all ranks share, with a file per rank that has the states of that
    rank's clients. It can be loaded with another number of ranks, one included, and so can the file of one process.
    """

    def configure_ddp(self) -> None:
        """Nothing to wrap: the ranks meet in the population's exchange."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Writes this rank's file; the folder appears under its name when all ranks have written."""
        final = Path(filepath)
        partial = final.with_name(final.name + ".partial")
        if self.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.barrier()
        name = f"rank-{self.global_rank:05d}-of-{self.world_size:05d}.ckpt"
        self.checkpoint_io.save_checkpoint(checkpoint, partial / name, storage_options=storage_options)
        self.barrier()
        if self.is_global_zero:
            old = _older(final)
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            partial.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The first rank's checkpoint with all ranks' clients in it."""
        arguments = {} if weights_only is None else {"weights_only": weights_only}
        folder = Path(checkpoint_path)
        if not folder.exists() and _older(folder).exists():
            folder = _older(folder)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, **arguments)
        files = sorted(folder.glob("rank-*-of-*.ckpt"))
        expected = int(files[0].stem.split("-")[-1]) if files else 1
        if len(files) != expected:
            raise ValueError(f"Expected {expected} files rank-*.ckpt in {folder}, but got {len(files)}")
        shards = [super(ClientSharding, self).load_checkpoint(file, **arguments) for file in files]
        whole = shards[0]
        states = [shard["state_dict"]["_extra_state"] for shard in shards]
        clients = [name for name in states[0] if name.startswith("clients.")]
        whole["state_dict"]["_extra_state"].update({n: torch.cat([s[n] for s in states]) for n in clients})
        return whole


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


def _older(folder: Path) -> Path:
    """Where a checkpoint is while the next one takes its name: what a kill at that moment leaves."""
    return folder.with_name(folder.name + ".old")
