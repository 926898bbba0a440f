"""Modules trained on stacked clients, beside a plain loop of torch over copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.stacked_layers import WithoutReading

Rows = list[tuple[Tensor, Tensor]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def looped(module: nn.Module, rows: Rows, loss: Callable[[nn.Module, Any], Tensor], optimizer: Any = None) -> Any:
    """Three steps of each client on all of its rows, and the mean of its parameters by rows."""
    results = []
    for client in rows:
        own = copy.deepcopy(module)
        steps = optimizer(own) if optimizer else sgd(own.parameters())
        for _ in range(3):
            steps.zero_grad()
            loss(own, client).backward()
            steps.step()
        results.append({name: value.detach() for name, value in own.named_parameters()})
    counts = [len(client[0]) for client in rows]
    return {
        name: sum(n * each[name] for n, each in zip(counts, results)) / sum(counts)
        for name, _ in module.named_parameters()
    }


def compared(module: nn.Module, rows: Rows, loss: Any, *, batched: Any = True, optimizer: Any = None) -> nn.Module:
    """Train by FedAvg and compare with `looped`; a LightningModule has a loss and an optimiser of its own."""
    own = isinstance(module, L.LightningModule)
    settings: dict[str, Any] = {} if own else {"loss": loss, "optimizer": sgd}
    local = ft.gradient_descent(module, epochs=3, batched=batched, **settings)
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1)
    step = (lambda m, batch: m.training_step(batch)) if own else (lambda m, batch: loss(m(batch[0]), batch[1]))
    trained: nn.Module = run.global_module()
    for name, value in looped(module, rows, step, optimizer).items():
        torch.testing.assert_close(dict(trained.named_parameters())[name], value, rtol=1e-10, atol=1e-12)
    return trained


def words(high: int = 6, columns: int = 4) -> Rows:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(high, (n, columns), generator=generator)
    return [(draw(n), torch.randn(n, 1, generator=generator, dtype=torch.float64)) for n in (4, 4, 4)]


class OwnEmbedding(nn.Embedding):
    """A subclass, of which nobody knows the name."""


class Functional(nn.Module):
    """Weights of its own, and a functional call."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table, self.bag = nn.Parameter(torch.randn(6, 3, dtype=torch.float64)), bag

    def forward(self, tokens: Tensor) -> Tensor:
        if self.bag:
            return F.embedding_bag(tokens, self.table, padding_idx=2, mode="mean")
        return F.embedding(tokens, self.table, padding_idx=2).flatten(1)


@pytest.mark.parametrize(
    ("embedding", "width"),
    [
        (lambda: nn.Embedding(6, 3, padding_idx=2), 12),
        (lambda: OwnEmbedding(6, 3, padding_idx=2), 12),
        (lambda: Functional(bag=False), 12),
        (lambda: Functional(bag=True), 3),
        (lambda: nn.EmbeddingBag(6, 3, padding_idx=2, mode="max"), 3),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_rows_of_padding_never_train(batched: bool, embedding: Callable[[], nn.Module], width: int) -> None:
    torch.manual_seed(0)
    first = embedding()
    module = nn.Sequential(first, nn.Flatten(), nn.Linear(width, 1)).double()
    trained = compared(module, words(), F.mse_loss, batched=batched)
    before, after = next(first.parameters())[2], next(trained.parameters())[2]
    assert torch.equal(before, after)


class Penalised(L.LightningModule):
    """Its penalty, and its groups of the optimiser, are those of layers by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def training_step(self, batch: Any) -> Tensor:
        penalty = sum(part.weight.square().sum() for part in self.modules() if type(part) is nn.Linear)
        return F.mse_loss(self.net(batch[0]), batch[1]) + 0.5 * penalty

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [part.weight for part in self.modules() if type(part) is nn.Linear]
        others = [p for p in self.parameters() if all(p is not each for each in decayed)]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others}], lr=0.1)


@pytest.mark.parametrize("batched", [True, False])
def test_a_module_finds_its_layers_by_their_types(batched: bool) -> None:
    torch.manual_seed(0)
    rows = [(torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)) for _ in range(3)]
    compared(Penalised(), rows, None, batched=batched, optimizer=lambda module: module.configure_optimizers())


class Reader(nn.Module):
    """A subclass of a recurrent layer, and a direct call."""

    class Own(nn.GRU):
        """A subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = self.Own(3, 4, 2, batch_first=True), nn.LSTM(4, 2, bidirectional=True, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        states = x.new_zeros(2, len(x), 2), x.new_ones(2, len(x), 2)
        flat = [getattr(self.lstm, name) for name in self.lstm._flat_weights_names]
        return torch.lstm(self.gru(x)[0], states, flat, True, 1, 0.0, True, True, True)[0][:, -1]


def test_subclasses_and_functional_calls_of_recurrent_layers_train() -> None:
    torch.manual_seed(0)
    rows = [(torch.randn(4, 5, 3, dtype=torch.float64), torch.randint(4, (4,))) for _ in range(3)]
    for batched in (True, False):
        compared(Reader(), rows, F.cross_entropy, batched=batched)


@pytest.mark.parametrize("mask", [None, "wrong"])
def test_attention_takes_is_causal_as_torch_does(mask: str | None) -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = None if mask is None else torch.zeros(5, 5, dtype=torch.float64)
    run = lambda x: layer(x, x, x, attn_mask=given, need_weights=False, is_causal=True)[0]
    if mask is None:
        for call in (lambda: run(x[0]), lambda: torch.vmap(run)(x)):
            with WithoutReading(), pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
                call()
        return
    with WithoutReading():
        together = torch.vmap(run)(x)
    torch.testing.assert_close(together, torch.stack([run(each) for each in x]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_other_integers_are_taken_as_torch_takes_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = [(torch.randn(4, 2, dtype=torch.float64), torch.randint(3, (4,)).to(dtype)) for _ in range(3)]
    module = nn.Linear(2, 3, dtype=torch.float64)
    net = nn.Sequential(module, nn.Identity())
    if dtype == torch.uint8:
        compared(net, rows, F.cross_entropy)
        return
    with pytest.raises(RuntimeError), WithoutReading():
        torch.vmap(lambda x, y: F.cross_entropy(module(x), y))(*map(torch.stack, zip(*rows)))
    with pytest.raises(RuntimeError):
        F.cross_entropy(module(rows[0][0]), rows[0][1])


@pytest.mark.parametrize("grouped", [False, True])
def test_dropout_of_attention_is_drawn_from_each_client_s_key(grouped: bool) -> None:
    keys = random.fold_in(random.key(1), torch.arange(3))
    q, k = torch.randn(3, 2, 4, 5, 3, dtype=torch.float64), torch.randn(3, 2, 2 if grouped else 4, 6, 3).double()
    run = lambda q, k: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5, enable_gqa=grouped)
    with KeyedRandomness(keys), WithoutReading():
        together = torch.vmap(run, randomness="different")(q, k)
    for client in range(3):
        with KeyedRandomness(keys[client]):
            alone = run(q[client], k[client])
        torch.testing.assert_close(together[client], alone, rtol=1e-12, atol=1e-13)
    with KeyedRandomness(keys[:2]), WithoutReading():
        chunk = torch.vmap(run, randomness="different")(q[:2], k[:2])
    torch.testing.assert_close(together[:2], chunk, rtol=1e-12, atol=1e-13)


def test_gradients_of_wide_layers_lie_in_memory_as_weights_do() -> None:
    weight, x = torch.randn(3, 6, 5, requires_grad=True), torch.randn(3, 4, 2, 5)
    with WithoutReading():
        outputs = torch.vmap(lambda x, w: F.linear(x.transpose(0, 1), w))(x, weight)
    (slope,) = torch.autograd.grad(outputs.square().sum(), weight)
    assert slope.is_contiguous()
    assert outputs.is_contiguous()


def test_the_mode_leaves_calls_outside_of_vmap_to_torch() -> None:
    x, layer = torch.randn(2, 4, 5, 3), nn.GRU(3, 4, dropout=0.5, num_layers=2)
    calls = [
        lambda: F.scaled_dot_product_attention(x, x, x),
        lambda: F.max_pool2d(x, 2),
        lambda: F.linear(x, x[0, 0]),
        lambda: F.cross_entropy(x[0, 0], torch.tensor([0, 1, 2, 0, 1])),
        lambda: layer(x[0])[0],
    ]
    for call in calls:
        torch.manual_seed(0)
        with WithoutReading():
            inside = call()
        torch.manual_seed(0)
        assert torch.equal(inside, call())
