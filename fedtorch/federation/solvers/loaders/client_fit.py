"""One client's own loader, or its data module, as a Trainer's `fit` is given it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fedtorch.data import BadClients
from fedtorch.data.client_loaders import ClientLoaders, failed
from fedtorch.data.seeded_loader import seeded_loader
from fedtorch.federation.solvers._watch import Watch


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


def _nothing(stage: str = "") -> None:
    """Do nothing."""
