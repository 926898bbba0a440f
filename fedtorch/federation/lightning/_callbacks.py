"""Callbacks of a Trainer that act on epochs or on parameters, on a federation.

StochasticWeightAveraging averages the server's parameters over rounds.

Source: Izmailov et al. (2018), algorithm 1, where an epoch is a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar, StochasticWeightAveraging, TQDMProgressBar
from torch import Tensor, nn

from fedtorch import tree
from fedtorch.federation.lightning.round_progress_bar import RoundProgressBar
from fedtorch.federation.runs.run import Run
from fedtorch.tree import Tree

_OWN_BARS = (RichProgressBar, TQDMProgressBar)  # Lightning's bars, one of which is a Trainer's default


def callbacks_of_rounds(callbacks: Sequence[L.Callback]) -> list[L.Callback]:
    """Replace Lightning's default callbacks by those for rounds, without the summary of a module's parameters."""
    return [_of_rounds(each) for each in callbacks if type(each) is not ModelSummary]


def _of_rounds(callback: L.Callback) -> L.Callback:
    if type(callback) in _OWN_BARS:
        return RoundProgressBar()
    return RoundAveraging(callback) if type(callback) is StochasticWeightAveraging else callback


class RoundAveraging(StochasticWeightAveraging):
    """Average the server's parameters over the last rounds, and anneal the clients' learning rates to `swa_lrs`.

    Args:
        given: the Trainer's callback, whose settings and state the average uses.
    """

    def __init__(self, given: StochasticWeightAveraging) -> None:
        self.__dict__ = vars(given)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start the average with the server's parameters.

        Raises:
            ValueError: the server has none.
        """
        self._average_model: Any = _parameters_module(_run(pl_module))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the server's parameters to the average; from the first time on clients' schedules stop."""
        super().on_train_epoch_start(trainer, pl_module)
        if self._initialized:
            for group in trainer.optimizers[0].param_groups:
                group["held"] = True

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Anneal the learning rate, as Lightning does where it steps the optimiser itself."""
        super().on_train_epoch_end(trainer, *args)
        if self._swa_scheduler is not None:
            self._swa_scheduler.step()

    @staticmethod
    def update_parameters(
        average_model: Any, model: L.LightningModule, n_averaged: Tensor, avg_fn: Callable[..., Tensor]
    ) -> None:
        """Add the server's parameters to the average."""
        now: Any = _parameters_module(_run(model))
        StochasticWeightAveraging.update_parameters(average_model, now, n_averaged, avg_fn)

    @staticmethod
    def transfer_weights(src_pl_module: Any, dst_pl_module: L.LightningModule) -> None:
        """Set the server's parameters to the average."""
        run = _run(dst_pl_module)
        leaves = [new.detach().clone() for new in src_pl_module.parameters()]
        old = _parameters(run.server)
        new = tree.map(lambda a, b: b.to(a.device, a.dtype), old, tree.refill(old, leaves))
        run.server = new if old is run.server else run.server._replace(parameters=new)


def _run(federation: Any) -> Run:
    return federation.run


def _parameters(server: Any) -> Tree:
    """Return the parameters in a server's state."""
    return server if isinstance(server, dict) else getattr(server, "parameters", None)


def _parameters_module(run: Run) -> nn.Module:
    """Build a module with copies of the server's parameters."""
    parameters = _parameters(run.server)
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError(
            "Expected a server with parameters for StochasticWeightAveraging, but got "
            f"{run.algorithm.settings.get('algorithm', 'one')!r} without; leave the callback out"
        )
    return nn.ParameterList([nn.Parameter(leaf.clone(), requires_grad=False) for leaf in tree.leaves(parameters)])
