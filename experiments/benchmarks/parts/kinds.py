"""Kinds of modules, rows of their clients, and rounds of FedAvg as one writes them by hand and as fedtorch has them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from experiments.benchmarks.peers.tasks import Attention, Recurrent

CLIENTS, ROWS, STEPS, BATCH = 50, 40, 5, 10
WORDS = 50


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The clients' optimiser."""
    return torch.optim.Adam(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """That of a linear model."""
    return torch.optim.SGD(parameters, lr=0.05)


class Kind(NamedTuple):
    """A module, the shape of a row, of words if it has no second dimension, and how clients train it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam
    steps: int = STEPS
    batch: int | None = BATCH


class Cells(nn.Module):
    """A loop over the lines that calls a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for line in x.unbind(1):
            state = self.cell(line, state)
        return self.head(state)


class Masked(nn.Module):
    """Attention of words to those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, 10)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.register_buffer("mask", torch.ones(12, 12).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(self.attention(h, h, h, attn_mask=self.mask, need_weights=False)[0].mean(1))


class Residual(nn.Module):
    """A convolution and what two more add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.block = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head((h + self.block(h)).relu().mean((2, 3)))


class Experts(nn.Module):
    """Four perceptrons, mixed by weights that depend on the row."""

    def __init__(self) -> None:
        super().__init__()
        perceptron = lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.experts, self.gate = nn.ModuleList(perceptron() for _ in range(4)), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return (each * self.gate(x).softmax(-1)[:, None]).sum(-1)


def convolutional(size: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, 10)),
    )


def separable() -> nn.Module:
    """A convolution, a depthwise one, and one of single points."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def normalised() -> nn.Module:
    """Convolutions with group normalisation."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def of_signals() -> nn.Module:
    """Convolutions over time."""
    return nn.Sequential(
        *(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.LazyLinear(10)),
    )


def layers(*widths: int) -> nn.Module:
    """A perceptron with layer normalisation."""
    hidden = [(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(part for parts in hidden for part in parts), nn.Linear(widths[-1], 10))


def recurrent(layer: type[nn.RNNBase], **settings: int) -> Callable[[], nn.Module]:
    """A recurrent layer over lines."""
    return lambda: Recurrent(layer(8, 32, batch_first=True, **settings))  # type: ignore[arg-type]


KINDS = {
    "linear, 64-10": Kind(lambda: nn.Linear(64, 10), (64,)),
    "perceptron, 64-128-10": Kind(lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), (64,)),
    "perceptron, 64-512-512-10, layer normalisation": Kind(lambda: layers(64, 512, 512), (64,)),
    "mixture of four experts": Kind(Experts, (64,)),
    "embedding bag": Kind(lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 32), nn.Linear(32, 10)), (12,), True),
    "embedding": Kind(
        lambda: nn.Sequential(nn.Embedding(WORDS, 16), nn.Flatten(), nn.Linear(12 * 16, 10)), (12,), True
    ),
    "attention with a mask": Kind(Masked, (12,), True),
    "Transformer layer": Kind(Attention, (8, 8)),
    "GRU": Kind(recurrent(nn.GRU), (8, 8)),
    "GRU of two layers": Kind(recurrent(nn.GRU, num_layers=2), (8, 8)),
    "LSTM": Kind(recurrent(nn.LSTM), (8, 8)),
    "bidirectional LSTM": Kind(recurrent(nn.LSTM, bidirectional=True), (8, 8)),
    "LSTM of 256 units": Kind(lambda: Recurrent(nn.LSTM(8, 256, batch_first=True)), (8, 8)),
    "loop of a cell": Kind(Cells, (8, 8)),
    "convolutions over time": Kind(of_signals, (8, 8)),
    "two convolutions, 8 × 8": Kind(lambda: convolutional(8), (1, 8, 8)),
    "two convolutions, 28 × 28": Kind(lambda: convolutional(28), (1, 28, 28)),
    "depthwise convolution": Kind(separable, (1, 8, 8)),
    "convolutions with group normalisation": Kind(normalised, (1, 8, 8)),
    "residual block": Kind(Residual, (1, 8, 8)),
}


TARGETED = {  # besides, in what was aimed at
    "linear, 8-1, 20 full batches": Kind(
        lambda: nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)),
        (8,),
        loss=F.mse_loss,
        optimizer=sgd,
        steps=20,
        batch=None,
    ),
    "perceptron, 64-128-10, dropout": Kind(
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)), (64,)
    ),
}


def clients_of(kind: Kind, clients: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of a kind, drawn."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, *kind.shape)
    rows = []
    for _ in range(clients):
        words = torch.randint(WORDS, shape, generator=generator)
        x = words if kind.words else torch.randn(shape, generator=generator)
        classes = torch.randint(10, (ROWS,), generator=generator)
        rows.append((x, classes if kind.loss is F.cross_entropy else classes.to(x.dtype)))
    return rows


def loop_of(kind: Kind, module: nn.Module, clients: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Return a round of FedAvg as one writes it by hand."""
    model, generator = copy.deepcopy(module), torch.Generator().manual_seed(0)
    server = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}

    def step() -> None:
        total = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
        for x, y in clients:
            model.load_state_dict(server, strict=False)
            optimizer = kind.optimizer(model.parameters())
            order = None if kind.batch is None else torch.randperm(len(x), generator=generator)
            for start in range(kind.steps):
                batch = x, y
                if order is not None:
                    rows = order[torch.arange(start * BATCH, (start + 1) * BATCH) % len(x)]
                    batch = x[rows], y[rows]
                optimizer.zero_grad()
                kind.loss(model(batch[0]), batch[1]).backward()
                optimizer.step()
            for name, leaf in model.named_parameters():
                total[name] += leaf.detach() / len(clients)
        server.update(total)

    return step


def ours(kind: Kind, module: nn.Module, clients: Sequence[tuple[Tensor, Tensor]], settings: dict[str, Any]) -> ft.Run:
    """Return the rounds of one way."""
    how = {"steps": kind.steps, "batch_size": kind.batch, "loss": kind.loss, "optimizer": kind.optimizer, **settings}
    return ft.Run(ft.fedavg(ft.gradient_descent(module, **how)), ft.InProcess(ft.data.from_tensors(clients)), seed=0)


class Ways(NamedTuple):
    """A loop over the clients of a kind, and rounds of ours."""

    loop: Callable[[], None]
    runs: dict[str, ft.Run]


def ways_of(kind: Kind, clients: int, settings: Mapping[str, dict[str, Any]]) -> Ways:
    """Return rounds of the same rows and first parameters."""
    torch.manual_seed(0)
    rows, module = clients_of(kind, clients), kind.make()
    module(rows[0][0])  # lazy layers
    return Ways(loop_of(kind, module, rows), {way: ours(kind, module, rows, each) for way, each in settings.items()})
