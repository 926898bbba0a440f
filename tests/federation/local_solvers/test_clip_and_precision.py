"""Clipped gradients and half precision, held against a Trainer that is told the same."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.small_fits import Adam, Momentum, Net, assert_same, clients, pull, solve
from torch import Tensor, nn

import fedtorch as ft


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("module", [Net, Momentum, Adam])
def test_clipping_is_that_of_a_trainer(module: type[L.LightningModule], drawn: bool) -> None:
    fits = []
    for clip in (0.3, None):
        own = ft.gradient_descent(module(), epochs=2, batch_size=8, clip=clip)
        theirs = ft.lightning_fit(module(), max_epochs=2, batch_size=8, gradient_clip_val=clip)
        fits.append(solve(own, pull(own) if drawn else None))
        assert_same(fits[-1].parameters, solve(theirs, pull(theirs) if drawn else None).parameters)
    assert not torch.allclose(fits[0].parameters["net.0.weight"], fits[1].parameters["net.0.weight"])


class Half(L.LightningModule):
    """A network that logs whether it is computed in half precision."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        self.log("half", float(output.dtype == torch.bfloat16))
        return nn.functional.mse_loss(output, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("batched", [True, False])
def test_half_precision_is_that_of_a_trainer(batched: bool) -> None:
    data = clients(torch.float32)
    block = data.stack(range(len(data)))
    made = lambda **options: ft.gradient_descent(Half(), epochs=3, batch_size=8, batched=batched, **options)
    own, full = made(precision="bf16"), made()
    theirs = ft.lightning_fit(Half(), max_epochs=3, batch_size=8, precision="bf16-mixed")
    half, whole, expected = (solve(local, data=block) for local in (own, full, theirs))
    assert batched or bool((half.info["half"] == 1).all())  # stacked, the bias is added in 32 bits
    assert not bool(whole.info["half"].any())
    for name, value in half.parameters.items():
        assert value.dtype == torch.float32
        assert not torch.equal(value, whole.parameters[name])
        # Products of 8 bits: the same ones one by one; stacked, sums are rounded elsewhere.
        tolerance = 2**-7 if batched else 1e-6
        torch.testing.assert_close(value, expected.parameters[name], rtol=tolerance, atol=tolerance)


def test_compiled_steps_are_in_half_precision_too() -> None:
    data = clients(torch.float32).select([1])
    make = lambda **options: ft.gradient_descent(Half(), steps=3, precision="bf16", **options)
    one, two = (solve(make(compile=compile), data=data.stack([0])) for compile in (True, False))
    torch.testing.assert_close(one.parameters, two.parameters, rtol=1e-5, atol=1e-6)
    full = solve(ft.gradient_descent(Half(), steps=3), data=data.stack([0]))
    assert not torch.allclose(one.parameters["net.0.weight"], full.parameters["net.0.weight"], rtol=1e-5, atol=1e-6)


def test_wrong_settings_are_refused() -> None:
    for clip in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"Expected a positive clip, but got {clip}"):
            ft.gradient_descent(Net(), epochs=1, clip=clip)
    with pytest.raises(ValueError, match="Expected precision='32' or 'bf16', but got '16'"):
        ft.gradient_descent(Net(), epochs=1, precision="16")  # type: ignore[arg-type]
