"""A GRU of one client by the program in C is torch's, and so are its derivatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.programs import reference
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import stacked_layers
from fedtorch.dispatch import choice, compiled
from fedtorch.stacked_layers import _alone

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"num_layers": 2, "bias": False},
    {"bidirectional": True, "batch_first": True},
    {"num_layers": 3, "bidirectional": True, "dropout": 0.5},  # in evaluation
]


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def pair(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[nn.GRU, nn.GRU]:
    torch.manual_seed(0)
    usual = nn.GRU(3, 5, dtype=dtype, **settings).eval()
    ours = copy.deepcopy(usual)
    stacked_layers.adapt_alone(ours)
    assert type(ours) is _alone.CellGRU
    return usual, ours


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every layer and direction that the program computes."""
    seen: list[int] = []
    original = _alone._cells_program.gru
    monkeypatch.setattr(_alone._cells_program, "gru", lambda *a: seen.append(1) or original(*a))
    return seen


def gradients(module: nn.GRU, x: Tensor, hx: Tensor | None) -> list[Tensor]:
    inputs = [x, *([] if hx is None else [hx]), *module.parameters()]
    outputs, last = module(x, hx)
    loss = (
        outputs * torch.linspace(-1, 1, outputs.numel(), dtype=x.dtype).view_as(outputs)
    ).sum() + last.square().sum()
    return [outputs, last, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_outputs_and_gradients(
    dtype: torch.dtype, close: float, begun: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, ours = pair(dtype, **settings)
    count = usual.num_layers * (2 if usual.bidirectional else 1)
    hx = torch.randn(count, 4, 5, dtype=dtype).requires_grad_() if begun else None
    x = torch.randn(4, 6, 3, dtype=dtype) if usual.batch_first else torch.randn(3, 4, 6, dtype=dtype).transpose(0, 2)
    x.requires_grad_()
    seen = calls(monkeypatch)
    for one, other in zip(gradients(ours, x, hx), gradients(usual, x, hx), strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    assert len(seen) == count


def test_second_derivatives_are_torch_s() -> None:
    _, ours = pair()
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    hx = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in ours.named_parameters()]

    def run(x: Tensor, hx: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(ours, dict(zip(names, values)), (x, hx))[0]

    inputs = x, hx, *(value.detach().requires_grad_() for value in ours.parameters())
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)
    frozen = [value.detach() for value in inputs[1:]]  # only the rows
    assert torch.autograd.gradgradcheck(lambda x: run(x, *frozen), (x,))


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, ours = pair()
    x, seen = torch.randn(4, 2, 3, dtype=torch.float64), calls(monkeypatch)
    packed = nn.utils.rnn.pack_padded_sequence(x, [4, 3])
    assert torch.equal(ours(packed)[0].data, usual(packed)[0].data)
    for rows in (x[:, 0], x[:1], x[:, :0]):
        assert torch.equal(ours(rows)[0], usual(rows)[0])
    together = torch.vmap(lambda rows: ours(rows)[0])(torch.stack([x, 2 * x]))
    torch.testing.assert_close(together[1], usual(2 * x)[0], rtol=1e-12, atol=1e-12)
    with reference():
        assert torch.equal(ours(x)[0], usual(x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.float()(x.float())[0].dtype == usual.float()(x.float())[0].dtype
    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        ours.double()(torch.ones(4, 2, 7).double())
    with pytest.raises(RuntimeError, match="hidden"):
        ours(x, torch.ones(1, 3, 5).double())
    drawing, ours = pair(num_layers=2, dropout=0.5)
    drawing.train(), ours.train()
    drawn = []
    for each in (drawing, ours):
        torch.manual_seed(1)
        drawn.append(each(x)[0])
    assert torch.equal(*drawn)
    assert not seen
    assert len(ours.eval()(x)) == 2
    assert len(seen) == 2


@pytest.mark.parametrize("batched", [False, "auto", True])
def test_rounds_one_by_one_are_those_of_torch_s_layer(batched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(3, 5, batch_first=True, dtype=torch.float64), nn.Linear(5, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[1][0])[:, 0]

    torch.manual_seed(0)
    data = ft.data.from_tensors([(torch.randn(n, 4, 3).double(), torch.randn(n).double()) for n in (5, 3, 6)])
    module, settings = Recurrent(), {"epochs": 2, "batch_size": 2, "loss": nn.functional.mse_loss}
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

    def trained() -> dict[str, Tensor]:
        local = ft.gradient_descent(module, batched=batched, optimizer=optimizer, **settings)
        return ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2, seed=0).server

    seen = calls(monkeypatch)
    found = trained()
    assert seen
    assert type(module.layer) is nn.GRU  # the user's stays as it is
    with reference():
        wanted = trained()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-12)
