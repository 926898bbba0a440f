"""Training split networks with a Lightning `Trainer`: loaders of aligned rows, and early stopping of a whole stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Never

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fedtorch import random
from fedtorch.vfl.fit.run import Iterated, VerticalRun
from fedtorch.vfl.rows.data import VerticalData


class _Epoch:
    """The number of the epoch, which Lightning sets through `loader.sampler` when training is resumed."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class VerticalLoader:
    """A loader for a `Trainer`: all rows at every step, or minibatches, shuffled anew in every epoch.

    A minibatch's rows are weighted so that its bound is unbiased for that of all rows.

    Args:
        data: aligned rows.
        batch_size: rows of a minibatch; all rows by default.
        steps: iterations of an epoch with all rows; an epoch of minibatches passes once over the rows.
        seed: of the shuffling.
        row_dims: dimensions of one party's row; 1 each by default.

    Raises:
        ValueError: a batch size or number of steps that is not positive.
    """

    def __init__(
        self,
        data: VerticalData,
        *,
        batch_size: int | None = None,
        steps: int = 1,
        seed: int = 0,
        row_dims: Sequence[int] | None = None,
    ) -> None:
        if steps < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"Expected a positive batch_size and steps, but got {batch_size} and {steps}")
        self.data, self.batch_size, self.steps, self.row_dims = data, batch_size, steps, row_dims
        self.key = random.key(seed)
        self.sampler, self.batch_sampler = _Epoch(), None  # where Lightning looks for them in a DataLoader

    def __len__(self) -> int:
        if self.batch_size is None:
            return self.steps
        return -(-self.data.response.shape[-1] // self.batch_size)

    def __iter__(self) -> Iterator[VerticalData]:
        if self.batch_size is None:
            for _ in range(self.steps):
                yield self.data
            return
        total = self.data.response.shape[-1]
        order = random.permutation(random.fold_in(self.key, self.sampler.epoch), total).to(self.data.response.device)
        self.sampler.epoch += 1
        for rows in order.split(self.batch_size):
            yield self.data.take(rows, self.row_dims)


class StackedEarlyStopping(L.Callback):
    """Early stopping of each element of a stack by itself; each ends with the weights of its best validation epoch.

    Training ends when all elements have stopped.

    Args:
        patience: validation epochs without improvement after which an element stops.

    Attributes:
        best: `(B,)` the lowest validation losses.
        epoch: `(B,)` the validation epochs, from 0 on, in which they were reached.

    Raises:
        ValueError: a patience that is not positive.

    >>> import fedtorch as ft
    >>> x, ill = torch.tensor([[-1.0], [1.0]]), torch.tensor([0.0, 1.0])
    >>> train, other = ft.vfl.VerticalData((x,), ill), ft.vfl.VerticalData((x,), 1 - ill)
    >>> network = ft.vfl.SplitNetwork([torch.nn.Linear(1, 1)], ft.vfl.likelihoods.bernoulli(), seed=[0, 1])
    >>> stopping = StackedEarlyStopping(patience=2)
    >>> trainer = L.Trainer(max_epochs=50, callbacks=stopping, logger=False, enable_checkpointing=False,
    ...                     enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    >>> trainer.fit(network, VerticalLoader(train), VerticalLoader(other))
    >>> stopping.epoch, trainer.current_epoch  # labels the other way round: the first epoch is the best of both
    (tensor([0, 0]), 3)
    """

    def __init__(self, patience: int = 10) -> None:
        if patience < 1:
            raise ValueError(f"Expected a positive patience, but got {patience}")
        self.patience = patience
        self.best = self.epoch = torch.empty(0)
        self._weights: dict[str, Tensor] = {}
        self._count = 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Save the weights of each element whose validation loss is its lowest so far."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        losses = pl_module.validation_losses.detach()
        self._move(losses.device)
        if not self._count:
            self.best, self.epoch = torch.full_like(losses, torch.inf), torch.zeros_like(losses, dtype=torch.long)
            self._weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        going = self._count - self.epoch <= self.patience
        better = going & (losses < self.best)
        self.best, self.epoch = torch.where(better, losses, self.best), self.epoch.masked_fill(better, self._count)
        for name, parameter in pl_module.named_parameters():
            self._weights[name][better] = parameter.detach()[better]
        self._count += 1
        if bool((self._count - self.epoch > self.patience).all()):
            trainer.should_stop = True

    def _move(self, device: torch.device) -> None:
        """Move the saved weights and losses to the device of the training, which may differ from a checkpoint's."""
        if self.best.device != device:
            self.best, self.epoch = self.best.to(device), self.epoch.to(device)
            self._weights = {name: weight.to(device) for name, weight in self._weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the best weights and losses so far, for Lightning's checkpoints."""
        return {"best": self.best, "epoch": self.epoch, "weights": self._weights, "count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.epoch = state_dict["best"], state_dict["epoch"]
        self._weights, self._count = state_dict["weights"], state_dict["count"]

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Restore every element's best weights."""
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                if name in self._weights:
                    parameter.copy_(self._weights[name])


class TrainerRun(VerticalRun):
    """The run of a split network that a Lightning `Trainer` trains, with the methods of `ft.Run`; a round is an epoch.

    Args:
        network: a `SplitNetwork`, whose run it is.
    """

    def __init__(self, network: Any) -> None:
        model = network.server.model
        settings = {
            "algorithm": "split network",
            "likelihood": model.likelihood,
            "guide": network.server.guide,
            "elements": network.size,
        }
        super().__init__([party.name for party in network.parties], settings)
        self.network, self.likelihood = network, model.likelihood

    def epoch(self, report: Mapping[str, Tensor], seconds: float) -> None:
        """Record an epoch that the Trainer has done."""
        self._record(Iterated(report, torch.arange(len(self.names))), seconds)

    def predict(
        self,
        features: Sequence[Tensor] | VerticalData,
        *,
        draws: int = 100,
        seed: int = 0,
        noise: bool = True,
    ) -> Tensor:
        """Predict by the network, see `SplitNetwork.predict`."""
        return self.network.predict(features, draws=draws, seed=seed, noise=noise)

    def _iterate(self, number: int) -> Never:
        raise TypeError(
            "Expected a Trainer to do the iterations of this run, trainer.fit(network, loader), but got a step of it; "
            "among nodes that is ft.vfl.NodesRun(*network.nodes(data))"
        )

    def _state(self) -> dict[str, Tensor]:
        return {name: leaf.detach().clone() for name, leaf in self.network.state_dict().items()}

    def _load(self, flat: Mapping[str, Tensor]) -> None:
        self.network.load_state_dict(flat)
