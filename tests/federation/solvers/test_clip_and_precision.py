"""Clipped gradients and half precision, held against a Trainer that is told the same."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from support.small_fits import Adam, Momentum, Net, assert_same, clients, pull, solve
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree


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
    rows = clients(torch.float32).select([1]).stack([0])
    data = tree.map(lambda leaf: leaf.expand(3, *leaf.shape[1:]), rows)
    make = lambda **options: ft.gradient_descent(Half(), steps=3, precision="bf16", **options)
    one, two = (solve(make(compile=compile), data=data) for compile in (True, False))
    torch.testing.assert_close(one.parameters, two.parameters, rtol=1e-5, atol=1e-6)
    full = solve(ft.gradient_descent(Half(), steps=3), data=data)
    assert not torch.allclose(one.parameters["net.0.weight"], full.parameters["net.0.weight"], rtol=1e-5, atol=1e-6)


def test_wrong_settings_are_refused() -> None:
    for clip in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"Expected a positive clip, but got {clip}"):
            ft.gradient_descent(Net(), epochs=1, clip=clip)
    with pytest.raises(ValueError, match="Expected precision='32', 'bf16' or 'tf32', but got '16'"):
        ft.gradient_descent(Net(), epochs=1, precision="16")  # type: ignore[arg-type]


class Watched(nn.Linear):
    """Notes how products are made on a CUDA device."""

    seen: list[tuple[str, str]]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision))
        return super().forward(x)


@pytest.mark.parametrize("batched", [True, False])
def test_short_products_last_for_the_losses_of_steps(batched: bool) -> None:
    now = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    Watched.seen, before = [], now()
    data, module = clients(torch.float32), Watched(2, 1)
    made = lambda precision: ft.gradient_descent(
        module, steps=2, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        precision=precision, batched=batched,
    )  # fmt: skip
    short, long = (solve(made(precision), data=data.stack(range(len(data)))) for precision in ("tf32", "32"))
    assert ("tf32", "tf32") in Watched.seen
    assert Watched.seen[-1] == before == now()
    if not torch.cuda.is_available():
        assert_same(short.parameters, long.parameters)


def rounding_of(precision: str, device: str) -> float:
    """How far a round's change is from that of float64, relative, its products rounded so."""
    x = ft.random.normal(ft.random.key(1), (6, 40, 20), torch.float64)
    y = ft.random.randint(ft.random.key(2), 4, (6, 40))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4))

    def change(dtype: torch.dtype, precision: str) -> Tensor:
        data = ft.data.from_tensors([(rows.to(device, dtype), labels.to(device)) for rows, labels in zip(x, y)])
        local = ft.gradient_descent(
            module.to(dtype), steps=20, loss=nn.functional.cross_entropy, precision=precision,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        )  # fmt: skip
        run = ft.run(ft.fedavg(local), ft.InProcess(data, device=device), rounds=1)
        return torch.cat([(run.server[n].cpu().double() - p.double()).flatten() for n, p in local.parameters.items()])

    wanted = change(torch.float64, "32")
    return float((change(torch.float32, precision) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("precision", ["32", "bf16", "tf32"])
def test_what_short_numbers_cost(precision: str) -> None:
    """A round of 20 steps is off by up to 20 roundings of the factors: 2⁻²⁴, 2⁻⁹ or, on a device, 2⁻¹¹."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unit = {"32": 2.0**-24, "bf16": 2.0**-9, "tf32": 2.0**-11 if device == "cuda" else 2.0**-24}[precision]
    found = rounding_of(precision, device)
    print(f"relative error of a round with {precision} on {device}: {found:.1e}")  # noqa: T201 (a measurement)
    assert unit / 10 < found < 20 * unit


@pytest.mark.parametrize("setting", ["clip", "project", "precision"])
def test_settings_that_no_program_of_linear_steps_has_act_on_linear_layers(setting: str) -> None:
    """Held against a loop over each client alone, and unlike the steps without the setting."""
    module, size = nn.Linear(2, 1), 0.1
    options: dict[str, Any] = {
        "clip": {"clip": 0.3},
        "project": {"project": lambda parameters: tree.map(lambda leaf: leaf.clamp(-size, size), parameters)},
        "precision": {"precision": "bf16"},
    }[setting]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.4)
    data = clients(torch.float32)
    make = lambda given: ft.gradient_descent(module, steps=5, loss=nn.functional.mse_loss, optimizer=sgd, **given)
    fits = [solve(make(given), data=data.stack(range(len(data)))).parameters for given in (options, {})]
    for client in range(len(data)):
        (x, y), one = data[client], copy.deepcopy(module)
        optimizer = sgd(one.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=setting == "precision"):
                nn.functional.mse_loss(one(x), y).backward()
            if setting == "clip":
                nn.utils.clip_grad_norm_(one.parameters(), 0.3)
            optimizer.step()
            if setting == "project":
                one.load_state_dict({name: leaf.clamp(-size, size) for name, leaf in one.state_dict().items()})
        own = {name: leaf[client] for name, leaf in fits[0].items()}
        for name, leaf in one.state_dict().items():
            torch.testing.assert_close(own[name], leaf, rtol=0, atol=1e-2 if setting == "precision" else 1e-6)
    assert not torch.allclose(fits[0]["weight"], fits[1]["weight"], rtol=0, atol=1e-5)
