"""The loaders of a block of clients, in place of rows, and the passes over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fedtorch.data.bad_clients import BadClients
from fedtorch.data.items import seeded
from fedtorch.data.seeded_loader import Draws, seeded_loader
from fedtorch.expected import loaded


class NoRows(TypeError):
    """Raised when tensors of rows are requested from clients with loaders."""

    def __init__(self) -> None:
        super().__init__(
            "Expected rows as tensors, all of a client's at once, but these clients have loaders; read them with "
            "ft.data.from_datasets([loader.dataset, …]), or train by ft.lightning_fit or ft.gradient_descent"
        )


class _Numbered(NamedTuple):
    number: Tensor  # (K,) int64, the clients' numbers in `source`
    count: Tensor  # type: ignore[assignment]  # (K,) int64, rows of one pass


class ClientLoaders(_Numbered):
    """The loaders of `K` clients in place of a block of rows: a tree of numbers that `source` maps to loaders.

    >>> import fedtorch as ft
    >>> from torch.utils.data import DataLoader
    >>> loaders = ft.data.from_loaders({"a": DataLoader([1.0, 2.0, 3.0], batch_size=2)})
    >>> with loaders.stack([0]).opened(0, seed=1) as batches:
    ...     print(list(batches))
    [tensor([1., 2.], dtype=torch.float64), tensor([3.], dtype=torch.float64)]
    """

    source: Any  # the `FederatedLoaders`

    @property
    def batch(self) -> NoReturn:
        """Raise NoRows: there are no rows in tensors."""
        raise NoRows

    @property
    def mask(self) -> NoReturn:
        """Raise NoRows: there are no rows in tensors."""
        raise NoRows

    def steps(self, row: int) -> int:
        """Return the batches of one pass over a client's loader, if its length is known."""
        return self.source.steps(int(self.number[row]))

    @contextmanager
    def opened(self, row: int, seed: int, apart: bool = False) -> Iterator[Iterable[Any]]:
        """Yield the passes over a client's loader, one for each `iter`; see `FederatedLoaders.batches`.

        Args:
            row: of the client in the block.
            seed: of all its random draws.
            apart: whether other clients' loaders are open meanwhile, so that the process's generators are seeded only
                while a batch is read; or all the time.

        Raises:
            BadClients: the loader fails, or has no batch.
        """
        source, draws = self.source, Draws(seed) if apart else nullcontext()
        whole = nullcontext() if apart else seeded(seed)
        with whole, seeded_loader(source.loader(int(self.number[row])), seed) as loader:
            yield Passes(loader, row, source.device, draws)


class Passes:
    """The passes over one client's loader: each `iter` is one, its batches are moved to a device.

    Args:
        loader: any iterable of batches.
        row: of the client in its block, for errors.
        device: of the batches.
        draws: around all that the loader does.
    """

    def __init__(
        self, loader: Iterable[Any], row: int, device: torch.device, draws: AbstractContextManager[Any]
    ) -> None:
        self._loader, self._row, self._device, self._draws = loader, row, device, draws
        # Lightning's combined loader also returns the numbers of batch and loader, which a module does not get.
        self._numbered = isinstance(loader, loaded("lightning.pytorch.utilities.combined_loader", "CombinedLoader"))

    def __iter__(self) -> Iterator[Any]:
        number, batches = 0, None
        while True:
            try:
                with self._draws:
                    batches = iter(self._loader) if batches is None else batches
                    batch = next(batches)
            except StopIteration:
                break
            except Exception as error:
                raise failed(self._row, f"its loader raised at batch {number}:", error) from error
            number += 1
            yield moved(batch[0] if self._numbered else batch, self._device)
        if number == 0:
            raise BadClients(torch.tensor([self._row]), "Expected at least one batch, but its loader gave none")


def failed(row: int, what: str, error: Exception) -> BadClients:
    """Return the error for a client that could not take part, in `row` of its block."""
    return BadClients(torch.tensor([row]), f"{what} {type(error).__name__}: {error}")


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device: tensors in lists, tuples and dicts, and objects with `to`, as by Lightning."""
    if device.type == "cpu":
        return batch
    from lightning.fabric.utilities.apply_func import move_data_to_device

    return move_data_to_device(batch, device)
