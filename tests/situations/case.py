"""A situation as the corpus takes it: a module, the clients' rows, and what a user says to train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MakeOptimizer = Callable[[Any], Any]
FEDERATIONS = {"mixed": (4, 7, 4, 3, 4), "unequal": (5, 9, 3), "equal": (4, 4, 4, 4)}  # rows of the clients


def sgd(lr: float = 0.1, **options: Any) -> MakeOptimizer:
    """Return a maker of `torch.optim.SGD`."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def adam(lr: float = 0.05, **options: Any) -> MakeOptimizer:
    """Return a maker of `torch.optim.Adam`."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, **options)


def adamw(lr: float = 0.05, weight_decay: float = 0.5, **options: Any) -> MakeOptimizer:
    """Return a maker of `torch.optim.AdamW`."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, **options)


def regression(inputs: int = 4, outputs: int = 1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return number of rows n -> (x (n, inputs), y (n, outputs))."""
    return lambda n: (torch.randn(n, inputs), torch.randn(n, outputs))


def labelled(inputs: int = 4, classes: int = 3) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return number of rows n -> (x (n, inputs), labels (n,))."""
    return lambda n: (torch.randn(n, inputs), torch.randint(classes, (n,)))


def tokens(length: int = 3, size: int = 6, outputs: int = 1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return number of rows n -> (indices (n, length), y (n, outputs)); about a third of the indices are 0."""

    def rows(n: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(size, (n, length)) * (torch.rand(n, length) < 0.8)
        return words, torch.randn(n, outputs)

    return rows


def series(length: int = 3, inputs: int = 2, outputs: int = 1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return number of rows n -> (x (n, length, inputs), y (n, outputs))."""
    return lambda n: (torch.randn(n, length, inputs), torch.randn(n, outputs))


def images(size: int = 4, channels: int = 2, outputs: int = 1) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return number of rows n -> (pixels (n, channels, size, size), y (n, outputs))."""
    return lambda n: (torch.randn(n, channels, size, size), torch.randn(n, outputs))


def mlp(inputs: int = 4, outputs: int = 1, hidden: int = 3) -> nn.Sequential:
    """Return a perceptron of one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def size(prediction: Any, target: Any) -> Tensor:
    """Return the mean absolute output of each row, `(N,)`: a metric that needs no target."""
    return prediction.abs().flatten(1).mean(1)


def first_two(rows: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of rows `(inputs, targets, …)`."""
    return rows[0], rows[1] if len(rows) > 1 else {}


@dataclass(frozen=True, eq=False)
class Case:
    """One situation.

    Args:
        name: of the situation, with the report after `#` where there is one.
        make: the module, made under a fixed seed: a LightningModule, or an `nn.Module` with `loss` and `optimizer`.
        rows: number of rows -> a client's made rows.
        loss: (output, target) -> loss, of an `nn.Module`.
        optimizer: of an `nn.Module`: parameters -> optimiser, or what `configure_optimizers` may return.
        epochs: passes over a client's rows in a round.
        rounds: communication rounds.
        size: rows of a minibatch: the clients then have loaders, whose batches are taken in order; None: full batches.
        says: further arguments of `gradient_descent`.
        dtype: of module and rows, where they are floating-point.
        tolerance: of a difference, relative to the movement of the loop.
        rowwise: whether a batch's loss is the mean of its rows' losses and an output depends on its row alone.
        compiles: whether every step executes the same operations, so that `compile=True` can be promised.
        refused: way of training -> regular expression of the refusal that may come there instead of the loop's numbers.
        metrics: of the evaluation, by name; None: the loss, if there is one, and `size`.
        split: rows -> (inputs, targets), of the evaluation.
        times: how many times the rows of `FEDERATIONS` the clients have.
    """

    name: str
    make: Callable[[], nn.Module]
    rows: Callable[[int], Any] = field(default_factory=regression)
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: MakeOptimizer | None = None
    epochs: int = 2
    rounds: int = 1
    size: int | None = None
    says: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    rowwise: bool = False
    compiles: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    split: Callable[[Any], tuple[Any, Any]] = first_two
    times: int = 1

    def counts(self, federation: str) -> tuple[int, ...]:
        """Return the rows of each client of a federation."""
        return tuple(self.times * count for count in FEDERATIONS[federation])

    @property
    def scores(self) -> dict[str, Any]:
        if self.metrics is not None:
            return dict(self.metrics)
        return {"size": size} | ({"loss": self.loss} if self.loss is not None else {})


class Step(L.LightningModule):
    """A network, a training step and an optimiser, as a LightningModule.

    Args:
        net: the network.
        step: (this module, batch) -> loss.
        optimizer: as `Case.optimizer`.
    """

    def __init__(self, net: nn.Module, step: Callable[[Any, Any], Any], optimizer: MakeOptimizer | None = None) -> None:
        super().__init__()
        self.net, self._step, self._optimizer = net, step, optimizer or sgd()

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.net(*args, **named)

    def training_step(self, batch: Any) -> Any:
        return self._step(self, batch)

    def configure_optimizers(self) -> Any:
        return self._optimizer([p for p in self.parameters() if p.requires_grad])


def net(name: str, make: Callable[[], nn.Module], rows: Any = None, loss: Any = F.mse_loss, **options: Any) -> Case:
    """Return a case of a network under a loss of its output and its rows' targets.

    `compile=True` is promised of those whose loss is the mean of its rows' losses and that keep no state.
    """
    still = options.get("rowwise", False) and not options.get("refused") and "says" not in options
    return Case(
        name, make, rows or regression(), loss, options.pop("optimizer", sgd()), **{"compiles": still, **options}
    )


def step(name: str, function: Callable[[Any, Any], Any], make: Any = mlp, rows: Any = None, **options: Any) -> Case:
    """Return a case of a training step of a network."""
    optimizer = options.pop("optimizer", None)
    return Case(name, lambda: Step(make(), function, optimizer), rows or regression(), **options)
