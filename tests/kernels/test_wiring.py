"""Where the package uses an operation, programs give what the CPU's path gives, up to rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.plain_training import CLOSE, net
from support.programs import launches, reference
from torch.optim import SGD, Adam, AdamW

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.local_solvers.fused import FusedSteps
from fedtorch.trust import robust

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.05),
    "adamw": partial(AdamW, lr=0.05, weight_decay=0.2),
}


def rows(device: str) -> ft.data.FederatedData:
    x = ft.random.normal(ft.random.key(1), (11, 3), torch.float64)
    y = ft.random.randint(ft.random.key(2), 2, (11,))
    clients = [(part.to(device), label.to(device)) for part, label in zip(x.split([1, 4, 6]), y.split([1, 4, 6]))]
    return ft.data.from_tensors(clients)


def trained(make, device: str, **settings):
    local = ft.gradient_descent(net(), epochs=1, batch_size=4, loss=F.cross_entropy, optimizer=make, **settings)
    run = ft.run(ft.fedprox(local, 0.3), ft.InProcess(rows(device), device=device), rounds=2)
    return tree.to(run.server, "cpu"), run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradient_descent(name, device, monkeypatch) -> None:
    settings = {"clip": 0.2, "reset": "never"} if name != "sgd" else {}
    with reference():
        wanted, _ = trained(OPTIMIZERS[name], "cpu", **settings)
    with launches(monkeypatch) as seen:
        found, _ = trained(OPTIMIZERS[name], device, **settings)
    assert {"stacked_step", "philox"} <= set(seen)
    for one, other in zip(tree.leaves(found), tree.leaves(wanted)):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("active", [None, 5])
def test_graph(active, device, monkeypatch) -> None:
    network = ft.Network.erdos_renyi(12, 0.4, ft.random.key(1))
    x = ft.random.normal(ft.random.key(2), (12, 6, 3), torch.float64)
    local = ft.least_squares(torch.nn.Linear(3, 1, bias=False, dtype=torch.float64))

    def server(device: str):
        data = ft.data.from_tensors([(rows.to(device), rows.sum(1).to(device)) for rows in x])
        run = ft.run(ft.gtv(local, network, 0.5), ft.InProcess(data, device=device), rounds=3, cohort=active)
        return tree.to(run.server, "cpu")

    with reference():
        wanted = server("cpu")
    with launches(monkeypatch) as seen:
        found = server(device)
    assert "neighbours" in seen
    for one, other in zip(tree.leaves(found), tree.leaves(wanted)):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("rule", [robust.median(), robust.trimmed_mean(0.2)], ids=["median", "trimmed mean"])
def test_robust_exchanges(rule, device, monkeypatch) -> None:
    exchange = robust.star(rule, spread=10.0)  # with equal weights a processor sorts
    message = {"a": ft.Mean(ft.random.normal(ft.random.key(3), (5, 2, 3)), torch.arange(1.0, 6.0))}
    ids = torch.arange(5)
    with reference():
        wanted = exchange.finish(exchange.gather(message, ids))
    with launches(monkeypatch) as seen:
        found = exchange.finish(exchange.gather(tree.to(message, device), ids))
    assert set(seen) == {"order_statistics"}
    torch.testing.assert_close(found["a"].value.cpu(), wanted["a"].value, rtol=1e-14, atol=1e-15)


def test_what_a_program_does_not_know_takes_the_optimiser(device, monkeypatch) -> None:
    tensors = [torch.ones(3, 4, device=device)]
    assert FusedSteps.knows(SGD(tensors, lr=0.1))
    for other in (
        Adam(tensors, amsgrad=True),
        SGD(tensors, lr=0.1, maximize=True),
        torch.optim.RMSprop(tensors),
        SGD([torch.ones(4, 3, device=device).mT], lr=0.1),
        SGD([torch.ones(4, 3, device=device).half()], lr=0.1),
    ):
        assert not FusedSteps.knows(other)
    watched = SGD(tensors, lr=0.1)
    watched.register_step_post_hook(lambda *arguments: None)
    assert not FusedSteps.knows(watched)
    with reference():
        assert not FusedSteps.knows(SGD(tensors, lr=0.1))
