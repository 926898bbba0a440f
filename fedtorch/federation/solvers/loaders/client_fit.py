"""One client's rows, its own loader or its data module, as a Trainer's `fit` is given them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from fedtorch import random, tree
from fedtorch.data import BadClients
from fedtorch.data.client_loaders import ClientLoaders, failed
from fedtorch.data.seeded_loader import seeded_loader
from fedtorch.federation.solvers._watch import Watch
from fedtorch.tree import Tree


@contextmanager
def client_batches(data: ClientLoaders, client: int, seed: int) -> Iterator[dict[str, Any]]:
    """Give the arguments of `Trainer.fit` for a client of a block, whose loader draws from `seed`.

    A data module has been prepared and set up when the clients were made, which a Trainer does not do again.
    """
    source, number = data.source, int(data.number[client])
    with seeded_loader(source.loader(number), seed) as loader:
        if not source.modules:
            yield {"train_dataloaders": loader}
            return
        module = copy.copy(source.modules[number])
        module.prepare_data = module.setup = module.teardown = _nothing
        module.train_dataloader = lambda: loader
        yield {"datamodule": module}


@contextmanager
def named(client: int, watch: Watch) -> Iterator[None]:
    """Say of whatever goes wrong in a fit that it is this client's, unless it is the module's or the settings'.

    Raises:
        BadClients: it is, or the loader gave no batch.
    """
    try:
        yield
    except (BadClients, MisconfigurationException):
        raise
    except Exception as error:
        if watch.exception is not error or watch.refusal is error:
            raise
        raise failed(client, "its training raised", error) from error
    if not watch.batches:
        raise BadClients(torch.tensor([client]), "Expected at least one batch, but its loader gave none")


class RowsOfClient(Dataset):
    """One client's rows for a `DataLoader`, taken a batch at a time."""

    def __init__(self, rows: Tree, count: int) -> None:
        self.rows, self.count = rows, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Tree:
        return tree.map(lambda leaf: leaf[row], self.rows)

    def __getitems__(self, rows: list[int]) -> Tree:
        index = torch.tensor(rows, device=tree.leaves(self.rows)[0].device)
        return tree.take(self.rows, index)


class OrderOfRows(Sampler[int]):
    """The rows in the order of `Batches`: a permutation from (key, epoch)."""

    def __init__(self, key: Tensor, count: int, shuffle: bool) -> None:
        self.key, self.count, self.shuffle, self.epoch = key, count, shuffle, 0
        self.first: int | None = None  # epoch of the round, by the federation's clock

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch, as Lightning does at the start of each."""
        self.first = epoch if self.first is None else self.first
        self.epoch = epoch - self.first

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.count))
        return iter(random.permutation(random.fold_in(self.key, self.epoch), self.count).tolist())


def _nothing(stage: str = "") -> None:
    """Do nothing."""
