"""Attention over short sequences by the program in C is the CPU's fused kernel's, and so are its derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.programs import reference
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import stacked_layers
from fedtorch.dispatch import choice, compiled
from fedtorch.stacked_layers import _attention_program as program

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")
SHAPES = [(3, 2, 8, 8, 8), (2, 4, 12, 12, 8), (1, 1, 1, 1, 1), (2, 3, 5, 9, 7), (4, 1, 16, 2, 16), (2, 2, 3, 16, 3)]
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def masks(kind: str, batch: int, heads: int, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    looks = torch.arange(columns) <= torch.arange(rows)[:, None]
    ahead = torch.zeros(rows, columns, dtype=dtype).masked_fill(~looks, -torch.inf)
    padded = draw(batch, heads, rows, columns, dtype=dtype, seed=9)
    padded[0, 0, 0] = -torch.inf  # a row that sees nothing
    padded[..., -1:] -= 300
    return {
        "none": {},
        "causal": {"is_causal": True},
        "shared": {"attn_mask": ahead.expand(batch, 1, rows, columns)},
        "each": {"attn_mask": padded, "scale": 0.7},
    }[kind]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "causal", "shared", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_program_is_the_fused_kernel(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    batch, heads, rows, columns, size = shape
    q = (8 * draw(batch, rows, 3, heads, size, dtype=dtype)).unbind(2)[1].transpose(1, 2)  # strided
    k, v = draw(2, batch, heads, columns, size, dtype=dtype, seed=1)
    tensors = [each.detach().requires_grad_() for each in (q, k, v)]
    rest = masks(kind, batch, heads, rows, columns, dtype)
    slope = draw(batch, heads, rows, size, dtype=dtype, seed=3)
    found = program.attention(*tensors, **rest)
    assert found is not None
    outputs, sums = found
    wanted, wanted_sums = program.FUSED(*tensors, **rest)
    close = CLOSE[dtype]
    torch.testing.assert_close(outputs, wanted, rtol=close, atol=close)
    torch.testing.assert_close(sums, wanted_sums, rtol=close, atol=10 * close)
    assert outputs.transpose(1, 2).is_contiguous()
    for one, other in zip(*(torch.autograd.grad(made, tensors, slope) for made in (outputs, wanted))):
        torch.testing.assert_close(one, other, rtol=close, atol=10 * close)


@pytest.mark.parametrize("kind", ["none", "causal", "each"])
def test_derivatives_and_those_of_derivatives(kind: str) -> None:
    tensors = [draw(2, 2, 3, 4, seed=seed).requires_grad_() for seed in range(3)]
    rest = masks(kind, 2, 2, 3, 3, torch.float64)
    attend = lambda *each: program.attention(*each, **rest)[0]  # type: ignore[index]
    assert torch.autograd.gradcheck(attend, tensors)
    if kind != "each":  # torch's formula has no derivative where a row sees nothing
        assert torch.autograd.gradgradcheck(attend, tensors)
        frozen = tensors[1].detach(), tensors[2].detach()
        assert torch.autograd.gradgradcheck(lambda q: attend(q, *frozen), tensors[:1])


def test_clients_do_not_see_each_other_nor_threads() -> None:
    q, k, v = draw(3, 64, 2, 16, 16)
    whole = program.attention(q, k, v)
    assert whole is not None
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both = program.attention(*(each.repeat(16, 1, 1, 1) for each in (q, k, v)))
    finally:
        torch.set_num_threads(before)
    assert both is not None
    assert torch.equal(both[0], whole[0].repeat(16, 1, 1, 1))
    alone = program.attention(q[5:6], k[5:6], v[5:6])
    assert alone is not None
    assert torch.equal(alone[0][0], whole[0][5])
    none = program.attention(q[:0], k[:0], v[:0])
    assert none is not None
    assert none[0].shape == (0, 2, 16, 16)


def test_what_is_left_to_the_fused_kernel() -> None:
    short, long, half = draw(2, 1, 4, 4), draw(2, 1, 17, 4), draw(2, 1, 4, 4).half()
    assert program.attention(long, short, short) is None
    assert program.attention(short, long, long) is None
    assert program.attention(half, half, half) is None
    assert program.attention(short, short, short, dropout_p=0.1) is None
    assert program.attention(short, short.float(), short.float()) is None
    with reference():
        assert program.attention(short, short, short) is None
        kept = torch.ops.fedtorch.attention.default(
            short, short, short, None, False, 0.5
        )  # of a step that was captured
    torch.testing.assert_close(kept[0], program.FUSED(short, short, short, scale=0.5)[0])


@pytest.mark.parametrize("masked", [False, True])
def test_stacked_attention_takes_it(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = program._run
    monkeypatch.setattr(program, "_run", lambda *a: seen.append(1) or original(*a))
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    stacked_layers.adapt(layer)
    weights = {name: draw(3, *value.shape, seed=i) for i, (name, value) in enumerate(layer.named_parameters())}
    x = draw(3, 4, 5, 8, seed=20).requires_grad_()
    mask = torch.ones(5, 5).triu(1).bool() if masked else None

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        made = torch.func.functional_call(layer, weights, (x, x, x), {"need_weights": False, "attn_mask": mask})
        return made[0]

    found = torch.vmap(run)(weights, x)
    slope = torch.autograd.grad(found.square().sum(), x)[0]
    assert len(seen) == 2
    with reference():
        wanted = torch.stack([run({n: value[k] for n, value in weights.items()}, x[k]) for k in range(3)])
        slow = torch.autograd.grad(wanted.square().sum(), x)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, slow, rtol=1e-11, atol=1e-11)
    inside = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos()).square().sum())
    heads = draw(3, 2, 2, 4, 6, seed=30)
    torch.testing.assert_close(torch.vmap(inside)(heads), torch.stack([inside(each) for each in heads]))


@pytest.mark.parametrize("compile", [False, True])
def test_rounds_are_those_of_the_reference(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean((1, 2))

    torch.manual_seed(0)
    data = ft.data.from_tensors([(draw(6, 5, 8, seed=k), draw(6, seed=50 + k)) for k in range(3)])
    module, settings = Heads(), {"epochs": 2, "batch_size": 3, "loss": F.mse_loss, "compile": compile}
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    seen: list[int] = []
    original = program._run
    monkeypatch.setattr(program, "_run", lambda *a: seen.append(1) or original(*a))

    def trained() -> dict[str, Tensor]:
        local = ft.gradient_descent(module, optimizer=optimizer, **settings)
        return ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2, seed=0).server

    found = trained()
    assert len(seen) >= 16  # of two rounds of four steps, there and back
    with reference():
        wanted = trained()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-11)
