"""`buffers="average"` averages values of buffers, whatever they began with, as a plain loop of torch does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from support.forked import over_ranks
from support.sites import joined, offers
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F

import fedtorch as ft
from fedtorch import functional
from fedtorch.trust import fairness, privacy, robust

SIZES, RATE, ROUNDS, STEPS = (5, 9, 3), 0.1, 2, 2


class Kinds(nn.Module):
    """A buffer of every kind, from every start; training overwrites or updates them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.linear = nn.Linear(2, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        starts: dict[str, Tensor] = {
            "highest": torch.tensor([-math.inf, -math.inf]),
            "lowest": torch.tensor([math.inf, math.inf]).double(),
            "unknown": torch.tensor(math.nan),
            "rare": torch.tensor([-math.inf, 2.0]),
            "never": torch.full((2, 2), -math.inf).triu(1),
            "far": torch.tensor(-1e30),
            "narrow": torch.tensor(math.inf, dtype=torch.float16),
            "short": torch.tensor(1.5, dtype=torch.bfloat16),
            "count": torch.tensor(0),
            "small": torch.tensor(7, dtype=torch.uint8),
            "flag": torch.tensor(False),
            "wave": torch.tensor([1 + 2j, 3j]),
            "noise": torch.tensor(complex(math.inf, math.nan), dtype=torch.complex128),
        }
        for name, start in starts.items():
            self.register_buffer(name, start)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = x.detach()
            mean = seen.mean()
            self.highest.copy_(torch.maximum(self.highest, seen.amax(0).float()))
            self.lowest.copy_(torch.minimum(self.lowest, seen.amin(0)))
            self.unknown.copy_(torch.where(self.unknown.isnan(), mean.float(), (self.unknown + mean.float()) / 2))
            self.rare.copy_(torch.where(seen.amax(0) > 1.5, seen.amax(0).float(), self.rare))
            self.far.copy_(mean.float())
            self.narrow.copy_(mean.half())
            self.short.copy_((self.short.float() + mean.float()).bfloat16())
            self.count.add_(1)
            self.small.copy_((seen.amax() * 10).abs().to(torch.uint8))
            self.flag.copy_(self.flag | (mean > 0))
            self.wave.copy_(self.wave * 1j + mean)
            self.noise.copy_(torch.complex(mean, seen.amax()))
        return self.linear(x)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Kinds()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.inner(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    return [(draw(n, 2), draw(n, 1)) for n in SIZES]


def mean_of(each: list[Tensor], share: list[float]) -> Tensor:
    """The weighted mean by the rules of floating point; of counts the next whole number, of flags whether any is."""
    first = each[0]
    if first.is_complex():
        return torch.complex(*(mean_of([p(one) for one in each], share) for p in (torch.real, torch.imag))).to(first)
    mean = torch.stack([s * one.double() for s, one in zip(share, each)]).sum(0)
    return mean.to(first.dtype) if first.is_floating_point() else (mean - 1e-3).ceil().to(first.dtype)


def loop(weights: tuple[int, ...] = SIZES) -> nn.Module:
    """The buffers of federated averaging; what the parameters do does not change them."""
    server, share = Kinds(), [weight / sum(weights) for weight in weights]
    for _ in range(ROUNDS):
        clients = []
        for x, _ in rows():
            client = copy.deepcopy(server)
            for _ in range(STEPS):
                client(x)
            clients.append(dict(client.named_buffers()))
        for name, buffer in server.named_buffers():
            buffer.copy_(mean_of([client[name] for client in clients], share))
    return server


def solver(**settings: Any) -> ft.LocalSolver:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=RATE)
    return ft.gradient_descent(Kinds(), steps=STEPS, loss=F.mse_loss, optimizer=sgd, buffers="average", **settings)


def run(algorithm: ft.Algorithm, **population: Any) -> ft.Run:
    return ft.run(algorithm, ft.InProcess(ft.data.from_tensors(rows()), **population), rounds=ROUNDS, progress=False)


def check(found: Any, wanted: nn.Module) -> None:
    held = found if isinstance(found, dict) else dict(found.named_buffers())
    for name, value in wanted.named_buffers():
        assert held[name].dtype == value.dtype, name
        close = torch.allclose(held[name], value, rtol=torch.finfo(value.dtype).eps * 2 if value.dtype.is_floating_point
                               else 1e-6, atol=1e-7, equal_nan=True)  # fmt: skip
        assert close, f"{name}: {held[name]} is not {value}"


squared = lambda output, y: (output - y).square()[..., 0]
WITH_A_SERVER: dict[str, Callable[[ft.LocalSolver], ft.Algorithm]] = {
    "fedavg": ft.fedavg,
    "a small step": lambda one: ft.fedavg(one, lr=0.2),
    "fedprox": lambda one: ft.fedprox(one, 0.5),
    "fedavgm": lambda one: ft.fedopt(one, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.1)),
    "fedadam": ft.fedadam,
    "fedyogi": ft.fedyogi,
    "scaffold": ft.scaffold,
    "feddyn": lambda one: ft.feddyn(one, 2.0),
    "ditto": lambda one: ft.ditto(one, 0.5),
    "agnostic": lambda one: fairness.agnostic(one, squared, gamma=0.0, lr=0.3),
}


@pytest.mark.parametrize("name", WITH_A_SERVER)
def test_the_server_has_the_mean_of_the_clients_values(name: str) -> None:
    check(run(WITH_A_SERVER[name](solver())).global_module(), loop())


def test_clients_one_by_one_and_trainers_average_the_same_values() -> None:
    check(run(ft.fedavg(solver(batched=False))).global_module(), loop())
    lit = ft.lightning_fit(Lit(), max_steps=STEPS, buffers="average")
    check(run(ft.fedavg(lit)).global_module().inner, loop())


def test_clients_predict_with_the_mean_and_keep_personal_buffers() -> None:
    found = run(ft.personal_layers(solver(), "linear.*"))
    for client in range(len(SIZES)):
        check(found.client_module(client), loop())
    check({name: leaf[1] for name, leaf in found.tensors().items()}, loop())
    x, _ = rows()[2]
    own = Kinds()
    for _ in range(ROUNDS * STEPS):
        own(x)
    for algorithm in (ft.separate(solver()), ft.ditto(solver(), 0.5)):
        check(run(algorithm).client_module(2), own)


def test_equal_weights_average_buffers_equally() -> None:
    check(run(fairness.q_ffl(solver(), squared, 1.0, lr=RATE)).global_module(), loop((1, 1, 1)))


def test_only_parameters_have_controls_and_moments() -> None:
    found = run(ft.scaffold(solver()))
    assert set(found.server.total.weighted) == {"linear.weight", "linear.bias"}
    assert set(run(ft.fedadam(solver())).server.optimizer) == {"linear.weight", "linear.bias"}


def test_ranks_and_organisations_average_the_same_values(tmp_path: Any) -> None:
    def one(rank: int) -> str:
        population = ft.Distributed(ft.data.from_tensors(rows()))
        check(ft.run(ft.fedavg(solver()), population, rounds=ROUNDS, progress=False).global_module(), loop())
        return "equal"

    assert over_ranks(tmp_path / "ranks", 2, one) == ["equal", "equal"]
    with joined(offers(ft.data.from_tensors(rows()), lambda **settings: ft.fedavg(solver()))) as (population, _):
        check(ft.run(ft.fedavg(solver()), population, rounds=ROUNDS, progress=False).global_module(), loop())


def test_a_saved_run_goes_on_with_infinite_buffers(tmp_path: Any) -> None:
    data = ft.InProcess(ft.data.from_tensors(rows()))
    first = ft.Run(ft.fedavg(solver()), data)
    first.save(tmp_path / "start.safetensors")
    again = ft.Run(ft.fedavg(solver()), data)
    again.load(tmp_path / "start.safetensors")
    check(again.global_module(), Kinds())
    for _ in range(ROUNDS):
        again.step()
    check(again.global_module(), loop())
    again.save(tmp_path / "end.safetensors")
    check(ft.load_module(tmp_path / "end.safetensors", Kinds()), loop())


def test_a_run_starts_from_a_modules_own_parameters_and_buffers() -> None:
    trained = loop()
    start = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
    made = ft.Run(ft.fedavg(solver()), ft.InProcess(ft.data.from_tensors(rows())), start)
    check(made.global_module(), trained)
    check(ft.Run(ft.fedavg(solver()), made.population, made.server).global_module(), trained)
    with pytest.raises(ValueError, match=r"'highest' .* with the module's buffers where they are averaged"):
        ft.Run(ft.fedavg(solver()), made.population, dict(trained.named_parameters()))


class Quantised(nn.Module):
    """Linear with a fake quantisation of its inputs, whose observer begins at (inf, −inf)."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
        self.linear = nn.Linear(2, 1)
        nn.init.ones_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.fake(x))


def test_ranges_of_quantisation_are_averaged() -> None:
    server, share = Quantised(), [size / sum(SIZES) for size in SIZES]
    data = [(x.float(), y.float()) for x, y in rows()]
    for _ in range(ROUNDS):
        clients = []
        for x, _ in data:
            client = copy.deepcopy(server)
            for _ in range(STEPS):
                client(x)
            clients.append(dict(client.named_buffers()))
        for name, buffer in server.named_buffers():
            buffer.copy_(mean_of([client[name] for client in clients], share))
    assert bool(server.fake.activation_post_process.min_val.isfinite())
    local = ft.gradient_descent(
        Quantised(), steps=STEPS, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), buffers="average",
        batched=False,
    )  # fmt: skip
    found = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(data)), rounds=ROUNDS).global_module()
    check(found, server)


def test_robust_rules_average_values_apart_from_changes() -> None:
    module, data = nn.BatchNorm1d(2, momentum=1.0, dtype=torch.float64), rows()
    local = ft.gradient_descent(
        module, steps=1, loss=lambda out, y: (out - y).square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        buffers="average",
    )  # fmt: skip
    server = run(ft.fedavg(local) | robust.rule(robust.median())).server
    assert torch.allclose(server["running_mean"], torch.stack([x.mean(0) for x, _ in data]).median(0).values)
    assert torch.allclose(server["running_var"], torch.stack([x.var(0) for x, _ in data]).median(0).values)


def test_a_bound_on_changes_refuses_values_of_buffers() -> None:
    for mechanism in (privacy.client_level, privacy.local_level):
        with pytest.raises(ValueError, match=r"Expected no averaged buffers under a bound .* use buffers='local'"):
            ft.fedavg(solver()) | mechanism(1.0, noise=1.0, delta=1e-2)


def test_an_overflow_in_half_precision_names_the_buffer_and_advises_no_smaller_steps() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1, dtype=torch.float64)
            self.register_buffer("total", torch.tensor(6e4, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(self.total)
            return self.linear(x)

    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    for make in (ft.fedavg, ft.scaffold):
        local = ft.gradient_descent(Sum(), steps=1, loss=F.mse_loss, optimizer=sgd, buffers="average")
        with pytest.raises(ValueError, match=r"client '0' sent NaN.*buffers.value.total.*float32 or float64") as said:
            run(make(local))
        assert "smaller steps" not in str(said.value)


def test_means_of_finite_parts_are_those_of_floating_point() -> None:
    values = torch.tensor([[1.0, math.inf, math.inf, math.nan, -math.inf], [3.0, 2.0, -math.inf, 1.0, -math.inf]])
    found = functional.from_finite_parts(functional.finite_parts(values).mean(0))
    assert torch.equal(found.nan_to_num(99.0, 50.0, -50.0), values.mean(0).nan_to_num(99.0, 50.0, -50.0))
    tiny = functional.finite_parts(torch.tensor([math.inf, 1.0], dtype=torch.float16))
    assert functional.from_finite_parts(tiny[0] * 1e-9 + tiny[1] * (1 - 1e-9)) == math.inf
