"""Modules with complex parameters are trained, averaged, carried and saved as plain loops of torch train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from support.forked import over_ranks
from support.sites import joined, offers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import fedtorch as ft
from fedtorch import checkpoint, sites, tree
from fedtorch.federation.exchanges.robust.exchange import star as robust_star
from fedtorch.trust import attacks, fairness, privacy, robust

SIZES, RATE, ROUNDS, STEPS = (5, 9, 3), 0.1, 3, 4
NETWORK = ft.Network.from_edges([(0, 1), (1, 2)])
Values = dict[str, Tensor]
Pull = Callable[[str, Tensor], Tensor]  # what is added to a gradient


class Spectral(nn.Module):
    """A complex matrix, as spectral layers have, beside a real bias."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128, generator=generator))
        self.b = nn.Parameter(torch.randn(2, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(self.w.dtype) @ self.w).square().sum(-1).sqrt() + self.b


def rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    return [(draw(n, 4), draw(n, 2)) for n in SIZES]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=RATE)


def start() -> Values:
    return {name: value.detach().clone() for name, value in Spectral().named_parameters()}


def trained(
    values: Values,
    client: tuple[Tensor, Tensor],
    pull: Pull = lambda name, value: torch.zeros_like(value),
    make: Callable[..., Optimizer] = sgd,
) -> Values:
    """Return the parameters after full-batch steps of torch's own optimiser."""
    module = Spectral()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name])
    optimizer = make(module.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(module(client[0]), client[1]).backward()
        for name, parameter in module.named_parameters():
            parameter.grad += pull(name, parameter.detach())
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def mean(each: Sequence[Values]) -> Values:
    share = [size / sum(SIZES) for size in SIZES]
    return {name: sum(s * one[name] for s, one in zip(share, each)) for name in each[0]}  # type: ignore[misc]


def fedavg(make: Callable[..., Optimizer] = sgd, mu: float = 0.0) -> Values:
    values = start()
    for _ in range(ROUNDS):
        near = lambda name, value, centre=values: mu * (value - centre[name])
        values = mean([trained(values, client, near, make) for client in rows()])
    return values


def equal_fedavg() -> Values:
    values = start()
    for _ in range(ROUNDS):
        new = [trained(values, client) for client in rows()]
        values = {name: torch.stack([one[name] for one in new]).mean(0) for name in values}
    return values


def fedopt(make: Callable[..., Optimizer]) -> Values:
    server = Spectral()
    optimizer = make(server.parameters())
    for _ in range(ROUNDS):
        values = {name: value.detach().clone() for name, value in server.named_parameters()}
        new = mean([trained(values, client) for client in rows()])
        for name, parameter in server.named_parameters():
            parameter.grad = values[name] - new[name]
        optimizer.step()
    return {name: value.detach() for name, value in server.named_parameters()}


def reddi(kind: str, lr: float = 0.01, eps: float = 1e-3) -> Values:
    """Algorithm 2 of Reddi et al. on real and imaginary parts as numbers of their own."""
    values = start()
    pairs = lambda value: torch.view_as_real(value) if value.is_complex() else value
    first = {name: torch.zeros_like(pairs(value)) for name, value in values.items()}
    second = {name: torch.full_like(pairs(value), eps**2) for name, value in values.items()}
    for _ in range(ROUNDS):
        new = mean([trained(values, client) for client in rows()])
        for name, old in values.items():
            change = pairs(new[name] - old)
            if kind == "adagrad":
                first[name], second[name] = change, second[name] + change.square()
            else:
                first[name] = 0.9 * first[name] + 0.1 * change
                square = change.square()
                second[name] = (
                    second[name] - 0.01 * square * (second[name] - square).sign()
                    if kind == "yogi"
                    else 0.99 * second[name] + 0.01 * square
                )
            moved = pairs(old) + lr * first[name] / (second[name].sqrt() + eps)
            values[name] = torch.view_as_complex(moved) if old.is_complex() else moved
    return values


def scaffold() -> Values:
    values, clients = start(), rows()
    controls = [{name: torch.zeros_like(value) for name, value in values.items()} for _ in clients]
    for _ in range(ROUNDS):
        common = mean(controls)
        new = []
        for client, own in zip(clients, controls):
            correct = lambda name, value, own=own: common[name] - own[name]  # noqa: B023
            new.append(trained(values, client, correct))
        controls = [
            {n: own[n] - common[n] + (values[n] - one[n]) / (STEPS * RATE) for n in values}
            for own, one in zip(controls, new)
        ]
        values = mean(new)
    return values


def feddyn(alpha: float) -> Values:
    values, clients = start(), rows()
    gradients = [{name: torch.zeros_like(value) for name, value in values.items()} for _ in clients]
    for _ in range(ROUNDS):
        new = []
        for client, own in zip(clients, gradients):
            pull = lambda n, value, own=own: alpha * (value - values[n]) - own[n]  # noqa: B023
            new.append(trained(values, client, pull))
        gradients = [{n: own[n] - alpha * (one[n] - values[n]) for n in values} for own, one in zip(gradients, new)]
        level, control = mean(new), mean(gradients)
        values = {n: level[n] - control[n] / alpha for n in values}
    return values


def run(algorithm: ft.Algorithm, **population: Any) -> ft.Run:
    data = ft.data.from_tensors(rows())
    return ft.run(algorithm, ft.InProcess(data, **population), rounds=ROUNDS, progress=False)


def local(make: Callable[..., Optimizer] = sgd, **settings: Any) -> ft.LocalSolver:
    return ft.gradient_descent(Spectral(), steps=STEPS, loss=F.mse_loss, optimizer=make, **settings)


def check(found: nn.Module | Values, wanted: Values, most: float = 1e-12) -> None:
    values = dict(found.named_parameters()) if isinstance(found, nn.Module) else found
    for name, value in wanted.items():
        assert values[name].dtype == value.dtype
        assert float((values[name].detach() - value).abs().max()) < most, name
    assert float((wanted["w"] - start()["w"]).imag.abs().max()) > 1e-4  # where imaginary parts stay, all agree


SERVERS: dict[str, tuple[Callable[..., ft.Algorithm], Callable[[], Values]]] = {
    "fedavg": (ft.fedavg, fedavg),
    "fedprox": (lambda one: ft.fedprox(one, 0.7), lambda: fedavg(mu=0.7)),
    "fedavgm": (
        lambda one: ft.fedopt(one, lambda p: SGD(p, lr=1.0, momentum=0.9)),
        lambda: fedopt(lambda p: SGD(p, lr=1.0, momentum=0.9)),
    ),
    "fedadam": (ft.fedadam, lambda: fedopt(lambda p: Adam(p, lr=0.01, betas=(0.9, 0.99), eps=1e-3))),
    "fedadam of the paper": (lambda one: ft.fedadam(one, bias_correction=False), lambda: reddi("adam")),
    "fedyogi": (ft.fedyogi, lambda: reddi("yogi")),
    "fedadagrad": (ft.fedadagrad, lambda: reddi("adagrad", eps=1e-3)),
    "scaffold": (ft.scaffold, scaffold),
    "feddyn": (lambda one: ft.feddyn(one, 2.0), lambda: feddyn(2.0)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_servers_complex_parameters_are_those_of_a_loop(name: str) -> None:
    make, loop = SERVERS[name]
    check(run(make(local())).global_module(), loop())


def test_fedadagrad_begins_sums_of_both_parts_alike() -> None:
    make = lambda p: Adagrad(p, lr=0.01, eps=1e-3, initial_accumulator_value=1e-6)
    check(run(ft.fedadagrad(local())).global_module(), fedopt(make))


OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.05, weight_decay=0.1),
    "amsgrad": lambda p: Adam(p, lr=0.05, amsgrad=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05, initial_accumulator_value=0.2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_clients_optimisers_step_complex_parameters_as_torch_does(name: str, batched: bool) -> None:
    make = OPTIMISERS[name]
    check(run(ft.fedavg(local(make, batched=batched))).global_module(), fedavg(make), 1e-9)


def test_moments_of_complex_parameters_go_on_from_round_to_round() -> None:
    found = run(ft.separate(local(OPTIMISERS["adam"], reset="never")))
    for client, each in enumerate(rows()):
        module = Spectral()
        optimizer = OPTIMISERS["adam"](module.parameters())
        for _ in range(ROUNDS * STEPS):
            optimizer.zero_grad()
            F.mse_loss(module(each[0]), each[1]).backward()
            optimizer.step()
        check(found.client_module(client), {n: p.detach() for n, p in module.named_parameters()})


def test_clipping_counts_both_parts_of_a_complex_gradient() -> None:
    def clipped(values: Values, client: tuple[Tensor, Tensor]) -> Values:
        module = Spectral()
        module.load_state_dict(values)
        for _ in range(STEPS):
            module.zero_grad()
            F.mse_loss(module(client[0]), client[1]).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= RATE * parameter.grad  # type: ignore[operator]
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    values = start()
    for _ in range(ROUNDS):
        values = mean([clipped(values, client) for client in rows()])
    check(run(ft.fedavg(local(clip=0.5))).global_module(), values)


def test_personal_models_are_those_of_a_loop() -> None:
    values, personal = start(), [start() for _ in SIZES]
    for _ in range(ROUNDS):
        near = lambda name, value, centre=values: 0.5 * (value - centre[name])
        personal = [trained(own, client, near) for own, client in zip(personal, rows())]
        values = mean([trained(values, client) for client in rows()])
    found = run(ft.ditto(local(), 0.5))
    for client, wanted in enumerate(personal):
        check(found.client_module(client), wanted)
    shared, own = start(), [start()["b"] for _ in SIZES]
    for _ in range(ROUNDS):
        new = [trained({**shared, "b": b}, client) for b, client in zip(own, rows())]
        shared, own = {"w": mean(new)["w"]}, [one["b"] for one in new]
    found = run(ft.personal_layers(local(), "b"))
    for client, b in enumerate(own):
        check(found.client_module(client), {"w": shared["w"], "b": b})


@pytest.mark.parametrize("wrapped", [False, True])
def test_nodes_of_a_graph_are_those_of_a_loop(wrapped: bool) -> None:
    near, nodes = {0: [1], 1: [0, 2], 2: [1]}, [start() for _ in SIZES]
    for _ in range(ROUNDS):
        nodes = [
            trained(nodes[i], client, lambda n, value, i=i, old=nodes: sum(value - old[j][n] for j in near[i]))  # type: ignore[misc]
            for i, client in enumerate(rows())
        ]
    algorithm = ft.gtv(local(), NETWORK, alpha=0.5)
    found = run(algorithm | ft.unreliable_edges(NETWORK) if wrapped else algorithm)
    for client, wanted in enumerate(nodes):
        check(found.client_module(client), wanted)


def test_nodes_that_are_tied_by_a_norm_have_equal_complex_parameters() -> None:
    algorithm = ft.gtv(local(), NETWORK, alpha=50.0, penalty=ft.networks.solvers.norm2, rho=5.0)
    found = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(rows())), rounds=60).tensors()
    assert found["w"].is_complex()
    assert torch.equal(found["w"], found["w"][:1].expand_as(found["w"]))


def test_an_average_without_a_server_is_that_of_one() -> None:
    algorithm = ft.without_server(ft.fedavg(local()), NETWORK, tolerance=1e-13)
    check(ft.federation.algorithms.consensus.at_node(run(algorithm).server), fedavg(), 1e-9)


MESSAGES = torch.complex(*torch.randn(2, 11, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
RULES = [
    robust.median(), robust.trimmed_mean(0.2), robust.krum(2), robust.krum(2, 3), robust.bulyan(2),
    robust.geometric_median(), robust.norm_bounding(), robust.centred_clipping(), robust.fltrust(0),
    robust.nearest_neighbour_mixing(2, robust.median()),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_robust_rules_take_complex_numbers_as_pairs(rule: robust.Rule) -> None:
    weight = torch.ones(len(MESSAGES), dtype=torch.float64)
    exchange = robust_star(rule)
    pairs = rule.average(torch.view_as_real(MESSAGES).flatten(1), weight / len(weight))
    found = exchange.finish(exchange.gather(ft.Mean({"w": MESSAGES}, weight), slice(0, len(MESSAGES)))).value["w"]
    assert found.dtype == torch.complex128
    assert torch.equal(found, torch.view_as_complex(pairs.reshape(-1, 2).to(torch.float64)))


def test_robust_averages_of_complex_numbers_are_those_of_the_definitions() -> None:
    weight = torch.ones(len(MESSAGES), dtype=torch.float64)
    average = lambda rule: (
        robust_star(rule).finish(robust_star(rule).gather(ft.Mean(MESSAGES, weight), slice(0, len(MESSAGES)))).value
    )
    middle = torch.complex(MESSAGES.real.median(0).values, MESSAGES.imag.median(0).values)
    assert torch.equal(average(robust.median()), middle)
    lengths = MESSAGES.abs().square().sum(1).sqrt()
    bounded = MESSAGES * (lengths.median() / lengths).clamp(max=1)[:, None]
    assert torch.allclose(average(robust.norm_bounding()), bounded.mean(0), rtol=1e-12)
    apart = (MESSAGES[:, None] - MESSAGES).abs().square().sum(-1).sort(1).values[:, 1 : 11 - 2 - 2 + 1].sum(1)
    assert torch.equal(average(robust.krum(2)), MESSAGES[apart.argmin()])


def test_robust_totals_of_complex_numbers_are_those_of_a_loop() -> None:
    ring = ft.Network.from_matrix(1 - torch.eye(3))
    algorithm = ft.gtv(local(), ring, alpha=0.5) | robust.rule(robust.median(), ring)
    nodes, others = [start() for _ in SIZES], {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    for _ in range(ROUNDS):  # the median of two is their mean
        nodes = [
            trained(nodes[i], client, lambda n, value, i=i, old=nodes: sum(value - old[j][n] for j in others[i]))  # type: ignore[misc]
            for i, client in enumerate(rows())
        ]
    found = run(algorithm)
    for client, wanted in enumerate(nodes):
        check(found.client_module(client), wanted)


def test_masked_sums_of_complex_numbers_are_plain_ones_on_the_grid() -> None:
    check(run(ft.fedavg(local()), carry=sites.masked(dropouts=0.0)).global_module(), fedavg(), 1e-5)


def test_noise_and_bounds_of_privacy_count_both_parts() -> None:
    values = {"w": torch.tensor([[3 + 4j]]), "b": torch.zeros(1, 1)}
    cut, norm = privacy.clipping.clip_rows(values, 1.0, privacy.noise.gaussian)
    assert norm.item() == 5
    assert torch.allclose(cut["w"], torch.tensor([[0.6 + 0.8j]]))
    entropy = privacy.from_seed(0)
    quiet = privacy.client_level(1e6, noise=1e-12, delta=1e-2, entropy=entropy)
    equal = lambda data: torch.ones_like(data.count, dtype=torch.float64)
    wanted = run(ft.fedavg(local(), weight=equal)).global_module()
    found = run(ft.fedavg(local(), weight=equal) | quiet)
    check(found.global_module(), {n: p.detach() for n, p in wanted.named_parameters()}, 1e-5)
    loud = privacy.client_level(1.0, noise=30.0, delta=1e-2, entropy=entropy)
    moved = run(ft.fedavg(local(), weight=equal) | loud).server["w"] - start()["w"]
    assert float(moved.real.std()) > 1
    assert float(moved.imag.std()) > 1
    one_by_one = run(ft.fedavg(local(), weight=equal) | privacy.local_level(1e6, noise=1e-12, delta=1e-2))
    check(one_by_one.global_module(), {n: p.detach() for n, p in wanted.named_parameters()}, 1e-5)
    told = run(ft.scaffold(local(), weight=equal) | privacy.client_level(1e6, noise=1e-12, delta=1e-2, clip_told=1e6))
    plain = run(ft.scaffold(local(), weight=equal)).global_module()
    check(told.global_module(), {n: p.detach() for n, p in plain.named_parameters()}, 1e-4)
    nodes = run(ft.gtv(local(), NETWORK, alpha=0.5) | privacy.node_level(1e6, noise=1e-12, delta=1e-2))
    for client, values in enumerate(zip(*run(ft.gtv(local(), NETWORK, alpha=0.5)).tensors().values())):
        check(nodes.client_module(client), dict(zip(["w", "b"], values)), 1e-4)


def test_gradients_of_single_rows_refuse_complex_parameters_by_name() -> None:
    with pytest.raises(TypeError, match=r"real parameters .* but got torch\.complex128 in 'w'; .*view_as_complex"):
        privacy.example_level(
            Spectral(), clip=1.0, noise=1.0, sampling_rate=0.5, steps=1, delta=1e-2, loss=F.mse_loss, optimizer=sgd
        )


@pytest.mark.parametrize("make", [fairness.q_ffl, fairness.agnostic])
def test_fair_averages_of_complex_parameters_are_plain_ones_without_fairness(make: Any) -> None:
    squared = lambda output, y: (output - y).square().mean(-1)
    found = run(make(local(), squared, 0.0, **({"lr": RATE} if make is fairness.q_ffl else {})))
    check(found.global_module(), fedavg() if make is fairness.agnostic else equal_fedavg())


@pytest.mark.parametrize(
    "attack",
    [attacks.sign_flip([0]), attacks.noise([0], sd=1.0), attacks.free_rider([0]), attacks.a_little_is_enough([0])],
    ids=lambda attack: attack.name,
)
def test_attacks_on_complex_parameters(attack: attacks.Attack) -> None:
    found = run(ft.fedavg(local()) | attack).server["w"]
    assert found.dtype == torch.complex128
    assert float((found - fedavg()["w"]).imag.abs().max()) > 1e-3


def test_a_message_with_a_nan_in_an_imaginary_part_is_refused() -> None:
    class Odd(Spectral):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.w.imag.sum() * (torch.nan if len(x) == SIZES[2] else 1.0)

    solver = ft.gradient_descent(Odd(), steps=1, loss=F.mse_loss, optimizer=sgd, batched=False)
    with pytest.raises(ValueError, match=r"client '2' sent NaN, Inf or a negative weight in 'change\.value"):
        run(ft.fedavg(solver))


def test_checkpoints_keep_complex128(tmp_path: Any) -> None:
    algorithm = ft.scaffold(local())
    whole = run(algorithm)
    first = ft.Run(algorithm, ft.InProcess(ft.data.from_tensors(rows())))
    first.step()
    first.save(tmp_path / "run.safetensors")
    again = ft.Run(algorithm, ft.InProcess(ft.data.from_tensors(rows())))
    again.load(tmp_path / "run.safetensors")
    for _ in range(ROUNDS - 1):
        again.step()
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again.server), tree.leaves(whole.server)))
    flat = {"w": torch.tensor([1 + 2j], dtype=torch.complex128), "pair": torch.ones(3, 2, dtype=torch.float64)}
    checkpoint.write(tmp_path / "some.safetensors", flat)
    read = checkpoint.read(tmp_path / "some.safetensors")
    assert {name: leaf.dtype for name, leaf in read.items()} == {name: leaf.dtype for name, leaf in flat.items()}
    assert all(torch.equal(read[name], leaf) for name, leaf in flat.items())


def test_complex64_is_averaged_as_complex128_to_its_rounding() -> None:
    narrow = Spectral()
    narrow.w, narrow.b = nn.Parameter(narrow.w.detach().to(torch.complex64)), nn.Parameter(narrow.b.detach().float())
    data = ft.data.from_tensors([(x.float(), y.float()) for x, y in rows()])
    solver = ft.gradient_descent(narrow, steps=STEPS, loss=F.mse_loss, optimizer=sgd)
    found = ft.run(ft.fedavg(solver), ft.InProcess(data), rounds=ROUNDS).global_module()
    assert found.w.dtype == torch.complex64
    assert torch.allclose(found.w.detach().to(torch.complex128), fedavg()["w"], atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_two_ranks_have_the_complex_parameters_of_a_loop(name: str, tmp_path: Path) -> None:
    make, loop = SERVERS[name]
    wanted = loop()

    def gap(rank: int) -> float:
        data = ft.data.from_tensors(rows())
        module = ft.run(make(local()), ft.Distributed(data), rounds=ROUNDS, progress=False).global_module()
        return max(float((value.detach() - wanted[n]).abs().max()) for n, value in module.named_parameters())

    for found in over_ranks(tmp_path / "ranks", 2, gap):
        assert isinstance(found, float), found
        assert found < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_organisations_have_the_complex_parameters_of_a_loop(name: str) -> None:
    make, loop = SERVERS[name]
    with joined(offers(ft.data.from_tensors(rows()), lambda **settings: make(local()))) as (population, _):
        check(ft.run(make(local()), population, rounds=ROUNDS, progress=False).global_module(), loop())


def test_a_trainer_a_client_trains_complex_parameters() -> None:
    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Spectral()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.mse_loss(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> Optimizer:
            return SGD(self.parameters(), lr=RATE)

    found = run(ft.fedprox(ft.lightning_fit(Lit(), max_steps=STEPS), 0.7)).global_module().inner
    check(found, fedavg(mu=0.7))
