"""Modules and losses that are known by type to treat every row by itself, and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import weight_norm

from fedtorch.federation.solvers.plain_layers import RowwiseLoss, predicts_by_rows, works_by_rows


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


class MyLinear(nn.Linear): ...


class MySequential(nn.Sequential): ...


def hooked(register: str) -> nn.Module:
    layer = nn.Linear(3, 2)
    getattr(layer, register)(lambda *args: None)
    return layer


def hook_on_the_weight() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def replaced() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: x - x.mean(0)  # type: ignore[method-assign]
    return layer


def pooling_with_indices() -> nn.Module:
    return nn.MaxPool1d(2, return_indices=True)


TABLE: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], int | None]] = [
    ("perceptron", lambda: chain(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,), 1),
    ("perceptron of series", lambda: chain(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2)), (5, 3), 2),
    ("nested", lambda: chain(chain(nn.Linear(3, 4), nn.GELU()), nn.Identity()), (3,), 1),
    ("convolutions", lambda: chain(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 1)), (1, 8, 8), 1),
    ("embedding", lambda: chain(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1)), (2,), 1),
    ("layer norm", lambda: nn.LayerNorm(3), (3,), 1),
    ("group norm", lambda: nn.GroupNorm(2, 4), (4,), 1),
    ("instance norm", lambda: nn.InstanceNorm1d(2), (2, 5), 2),
    ("softmax of the last", lambda: nn.Softmax(-1), (3,), 1),
    ("softmax of features", lambda: nn.LogSoftmax(1), (3,), 1),
    ("unflatten", lambda: nn.Unflatten(1, (2, 2)), (4,), 2),
    ("linear of numbers", lambda: nn.Linear(3, 1), (), None),
    ("flatten of rows", lambda: nn.Flatten(0), (3,), None),
    ("flatten from the second", lambda: nn.Flatten(2), (3, 2, 2), None),
    ("softmax of rows", lambda: nn.Softmax(0), (3,), None),
    ("softmax of rows from behind", lambda: nn.Softmax(-2), (3,), None),
    ("softmax of no dimension", lambda: nn.Softmax(), (3,), None),
    ("unflatten of rows", lambda: nn.Unflatten(0, (2, 2)), (4,), None),
    ("layer norm over rows", lambda: nn.LayerNorm((4, 3)), (3,), None),
    ("convolution of rows as time", lambda: nn.Conv1d(3, 3, 1), (4,), None),
    ("convolution of rows as channels", lambda: nn.Conv2d(4, 1, 1), (3, 3), None),
    ("pooling of rows", lambda: nn.MaxPool1d(2), (4,), None),
    ("pooling with indices", pooling_with_indices, (2, 4), None),
    ("GRU", lambda: nn.GRU(3, 2, batch_first=True), (4, 3), None),
    ("LSTM", lambda: nn.LSTM(3, 2), (4, 3), None),
    ("attention", lambda: nn.TransformerEncoderLayer(4, 2), (4,), None),
    ("max_norm", lambda: nn.Embedding(5, 3, max_norm=1.0), (2,), None),
    ("scale_grad_by_freq", lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), (2,), None),
    ("bag of words", lambda: nn.EmbeddingBag(5, 3), (2,), None),
    ("batch norm", lambda: chain(nn.Linear(3, 4), nn.BatchNorm1d(4)), (3,), None),
    ("tracked instance norm", lambda: nn.InstanceNorm1d(2, track_running_stats=True), (2, 5), None),
    ("subclass", lambda: MyLinear(3, 2), (3,), None),
    ("subclass of a chain", lambda: MySequential(nn.Linear(3, 2)), (3,), None),
    ("forward hook", lambda: hooked("register_forward_hook"), (3,), None),
    ("forward pre-hook", lambda: chain(hooked("register_forward_pre_hook")), (3,), None),
    ("backward hook", lambda: hooked("register_full_backward_hook"), (3,), None),
    ("hook on a parameter", hook_on_the_weight, (3,), None),
    ("replaced forward", replaced, (3,), None),
    ("parametrised", lambda: weight_norm(nn.Linear(3, 2)), (3,), None),
]


@pytest.mark.parametrize(("make", "shape", "rank"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_chains_by_type_and_rank(make: Any, shape: tuple[int, ...], rank: int | None) -> None:
    module = make().double()
    assert works_by_rows(module, len(shape)) == rank
    if rank is None:
        return
    words = any(isinstance(part, nn.Embedding) for part in module.modules())
    x = torch.randint(5, (4, *shape)) if words else torch.randn(4, *shape, dtype=torch.float64)
    whole = module(x)
    assert whole.ndim - 1 == rank
    torch.testing.assert_close(whole, torch.cat([module(row[None]) for row in x]), rtol=1e-12, atol=1e-13)


def test_a_global_hook_makes_all_layers_unknown() -> None:
    layer = nn.Linear(3, 2)
    handle = register_module_forward_hook(lambda *args: None)
    try:
        assert works_by_rows(layer, 1) is None
    finally:
        handle.remove()
    assert works_by_rows(layer, 1) == 1


def test_a_class_whose_forward_was_replaced_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x - x.mean(0))
    assert works_by_rows(nn.Linear(3, 3), 1) is None


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (chain(nn.Linear(3, 2), nn.Tanh()), True),
        (nn.Flatten(), True),
        (nn.BatchNorm1d(3), False),
        (nn.Conv1d(1, 1, 1), False),
    ],
)
def test_prediction_is_by_rows_where_it_is_for_all_ranks(module: nn.Module, known: bool) -> None:
    assert predicts_by_rows(module) == known


def hooked_loss() -> nn.Module:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *args: None)
    return loss


class MyLoss(nn.MSELoss): ...


REGRESSION: list[tuple[str, Any, bool]] = [
    ("mse", F.mse_loss, True), ("MSE", nn.MSELoss(), True), ("L1", nn.L1Loss(), True), ("l1", F.l1_loss, True),
    ("Huber", nn.HuberLoss(delta=0.3), True), ("SmoothL1", nn.SmoothL1Loss(beta=0.2), True),
    ("BCE with logits", nn.BCEWithLogitsLoss(), True),
    ("sum", nn.MSELoss(reduction="sum"), False), ("none", nn.MSELoss(reduction="none"), False),
    ("weight", nn.BCEWithLogitsLoss(weight=torch.ones(1)), False),
    ("pos_weight", nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), False),
    ("hook", hooked_loss(), False), ("subclass", MyLoss(), False), ("lambda", lambda p, y: F.mse_loss(p, y), False),
    ("Poisson", F.poisson_nll_loss, False),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "known"), [row[1:] for row in REGRESSION], ids=[row[0] for row in REGRESSION])
def test_losses_of_numbers_by_type(loss: Any, known: bool) -> None:
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.rand(2, 4, 1, dtype=torch.float64)
    found = RowwiseLoss(nn.Linear(3, 1).double(), loss)
    assert found.holds((x, y), torch.tensor([4, 2])) == known
    if known:
        output = torch.randn(4, 1, dtype=torch.float64)
        expected = torch.stack([loss(output[i : i + 1], y[0, i : i + 1]) for i in range(4)])
        torch.testing.assert_close(found.of_rows(output, y[0]), expected, rtol=1e-12, atol=0)


CLASSES: list[tuple[str, Any, bool]] = [
    ("cross-entropy", F.cross_entropy, True), ("smoothed", nn.CrossEntropyLoss(label_smoothing=0.2), True),
    ("NLL", nn.NLLLoss(), True), ("weights", nn.CrossEntropyLoss(weight=torch.ones(3)), False),
    ("sum", nn.CrossEntropyLoss(reduction="sum"), False), ("ignored class", nn.CrossEntropyLoss(ignore_index=1), False),
    ("ignored class that is nobody's", nn.CrossEntropyLoss(ignore_index=7), True),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "known"), [row[1:] for row in CLASSES], ids=[row[0] for row in CLASSES])
def test_losses_of_classes_by_type(loss: Any, known: bool) -> None:
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([[0, 2, 2, 0], [2, 1, 0, 0]])
    found = RowwiseLoss(nn.Linear(3, 3).double(), loss)
    assert found.holds((x, y), torch.tensor([4, 3])) == known
    if known:
        output = torch.randn(4, 3, dtype=torch.float64)
        expected = torch.stack([loss(output[i : i + 1], y[1, i : i + 1]) for i in range(4)])
        torch.testing.assert_close(found.of_rows(output, y[1]), expected, rtol=1e-12, atol=0)


def test_an_ignored_label_counts_among_a_clients_rows_alone() -> None:
    x, y = torch.randn(2, 4, 3), torch.tensor([[0, 2, 2, 0], [2, 1, -100, 0]])
    found = RowwiseLoss(nn.Linear(3, 3), F.cross_entropy)
    assert found.holds((x, y), torch.tensor([4, 2]))  # the label is padding
    assert not found.holds((x, y), torch.tensor([4, 3]))


@pytest.mark.parametrize("shape", [(), (2,), (1, 1)])
def test_targets_that_broadcast_are_unknown_by_rank(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, *shape)
    assert RowwiseLoss(nn.Linear(3, 2), F.mse_loss).holds((x, y), torch.tensor([4, 2])) == (len(shape) == 1)


def test_settings_of_a_loss_are_read_in_every_round() -> None:
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, 1)
    loss = nn.MSELoss()
    found = RowwiseLoss(nn.Linear(3, 1), loss)
    assert found.holds((x, y), torch.tensor([4, 2]))
    loss.reduction = "sum"
    assert not found.holds((x, y), torch.tensor([4, 2]))


def test_a_replaced_function_of_torch_makes_its_module_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "mse_loss", lambda p, y, **settings: (p - y).norm())
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, 1)
    assert not RowwiseLoss(nn.Linear(3, 1), nn.MSELoss()).holds((x, y), torch.tensor([4, 2]))
    assert not RowwiseLoss(nn.Linear(3, 1), F.mse_loss).holds((x, y), torch.tensor([4, 2]))


def test_rows_that_are_no_pair_are_unknown() -> None:
    found, x = RowwiseLoss(nn.Linear(3, 1), F.mse_loss), torch.randn(2, 4, 3)
    assert not found.holds({"x": x}, torch.tensor([4, 2]))
    assert not found.holds((x, x, x), torch.tensor([4, 2]))
    assert not found.holds((x, {"y": x}), torch.tensor([4, 2]))
