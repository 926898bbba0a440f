"""Where the package uses an operation, programs give what the CPU's path gives, up to rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.oracles.plain_training import CLOSE, net
from support.programs import launches, reference
from torch.optim import SGD, Adam, AdamW

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.solvers._fused import FusedSteps
from fedtorch.trust import privacy

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


@pytest.mark.parametrize(
    "name", ["momentum", "adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adamw"))]
)
def test_gradient_descent(name, device, monkeypatch) -> None:
    settings = {"clip": 0.2, "reset": "never"} if name != "sgd" else {}
    with reference():
        wanted, _ = trained(OPTIMIZERS[name], "cpu", **settings)
    with launches(monkeypatch) as seen:
        found, _ = trained(OPTIMIZERS[name], device, **settings)
    assert {"stacked_step", "philox"} <= set(seen)
    for one, other in zip(tree.leaves(found), tree.leaves(wanted)):
        torch.testing.assert_close(one, other, **CLOSE)


class Other(torch.nn.Linear):
    """A head of its own class, which may do anything."""


HEADS = {  # module, loss, classes of y or None for real numbers, shape of a row's y
    "gaussian": (lambda: torch.nn.Linear(3, 1), F.mse_loss, None, (1,)),
    "head": (lambda: ft.LinearHead(3), F.mse_loss, None, ()),
    "bernoulli": (lambda: torch.nn.Linear(3, 1, bias=False), F.binary_cross_entropy_with_logits, 2, (1,)),
    "poisson": (lambda: ft.LinearHead(3, intercept=False), F.poisson_nll_loss, 4, ()),
    "categorical": (lambda: torch.nn.Linear(3, 4), F.cross_entropy, 4, ()),
}
WORK = {
    "epochs": {"epochs": 1, "batch_size": 4},
    "steps": {"steps": 2, "reset": "never"},
    "all rows": {"epochs": 3, "batch_size": 50},
}


def linear_problem(name: str, device: str):
    make, loss, classes, shape = HEADS[name]
    dtype = torch.float32 if name == "categorical" else torch.float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = make().to(dtype)
    x = ft.random.normal(ft.random.key(1), (14, 3), dtype)
    y = ft.random.randint(ft.random.key(2), classes or 9, (14,)) - (0.0 if classes is None else 0)
    y = (y if name == "categorical" else y.to(dtype)).reshape(14, *shape)
    sizes = [1, 4, 6, 3]
    data = ft.data.from_tensors([(a.to(device), b.to(device)) for a, b in zip(x.split(sizes), y.split(sizes))])
    return module, loss, data


def linear_server(name: str, device: str, work, wrap=ft.fedavg, weight_decay=0.0):
    module, loss, data = linear_problem(name, device)
    sgd = lambda parameters: SGD(parameters, lr=0.1, weight_decay=weight_decay)
    local = ft.gradient_descent(module, loss=loss, optimizer=sgd, **work)
    run = ft.run(wrap(local), ft.InProcess(data, device=device), rounds=2)
    told = torch.tensor(list(run.history["train_loss"]))
    return tree.to((run.server, run.clients.state_dict()), "cpu"), told


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("bernoulli", "steps"),
        ("head", "all rows"),
        ("categorical", "epochs"),
        *(pytest.param(name, "steps", marks=pytest.mark.slow) for name in HEADS if name != "bernoulli"),
    ],
)
def test_linear_heads(name, work, device, monkeypatch) -> None:
    options = {"weight_decay": 0.2} if work == "steps" else {}
    with reference():
        wanted, loss = linear_server(name, "cpu", WORK[work], **options)
    with launches(monkeypatch) as seen:
        found, told = linear_server(name, device, WORK[work], **options)
    assert "glm_steps" in seen
    assert "stacked_step" not in seen
    # Rounding over some steps; of single precision, 2⁻²⁴ times the numbers of a sum.
    close = {"rtol": 1e-5, "atol": 1e-6} if name == "categorical" else CLOSE
    for one, other in zip(tree.leaves((found, told)), tree.leaves((wanted, loss))):
        torch.testing.assert_close(one, other, **close)


WRAPPED = {
    "fedprox": lambda local: ft.fedprox(local, 0.3),
    "gtv": lambda local: ft.gtv(local, ft.Network.ring(4), 0.5),
    "matrix_normal": ft.matrix_normal,
    "scaffold": ft.scaffold,
}


@pytest.mark.parametrize(
    "name", ["gtv", "matrix_normal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedprox", "scaffold"))]
)
def test_linear_heads_with_what_the_others_think(name, device, monkeypatch) -> None:
    work = {"epochs": 1, "batch_size": 2}
    with reference():
        wanted, loss = linear_server("head", "cpu", work, WRAPPED[name])
    with launches(monkeypatch) as seen:
        found, told = linear_server("head", device, work, WRAPPED[name])
    assert "glm_steps" in seen
    for one, other in zip(tree.leaves((found, told)), tree.leaves((wanted, loss))):
        torch.testing.assert_close(one, other, **CLOSE)


def watched(parameters):
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


OTHERS = {
    "momentum": {"optimizer": lambda p: SGD(p, lr=0.1, momentum=0.5)},
    "adam": {"optimizer": lambda p: Adam(p, lr=0.1)},
    "rates": {"optimizer": lambda p: SGD([{"params": [q]} for q in p], lr=0.1)},
    "watched": {"optimizer": watched},
    "clip": {"clip": 1.0},
    "half": {"precision": "bf16"},
    "project": {"project": lambda parameters: parameters},
    "loss": {"loss": lambda output, target: F.mse_loss(output, target)},
    "class": {"module": Other(3, 1)},
    "frozen": {},
}


def test_rows_of_another_form_take_the_stacked_steps(device, monkeypatch) -> None:
    x, y = torch.ones(2, 4, 3, device=device), torch.ones(2, 4, 1, device=device)
    sgd = lambda parameters: SGD(parameters, lr=0.1)
    inputs = ft.data.from_tensors([({"input": rows}, labels) for rows, labels in zip(x, y)])
    images = ft.data.from_tensors([(rows[:, None], labels[:, None]) for rows, labels in zip(x, y)])
    with launches(monkeypatch, at_least=0) as seen:
        for data in (inputs, images):
            local = ft.gradient_descent(torch.nn.Linear(3, 1), steps=1, loss=F.mse_loss, optimizer=sgd)
            ft.run(ft.fedavg(local), ft.InProcess(data, device=device), rounds=1)
        local = ft.gradient_descent(torch.nn.Linear(3, 1), steps=1, loss=F.mse_loss, optimizer=sgd)
        coupled = ft.gtv(local, ft.Network.ring(2), {"weight": 0.5, "bias": 0.1})  # λ of its own for each
        ft.run(coupled, ft.InProcess(ft.data.from_tensors([*zip(x, y)]), device=device), rounds=1)
    assert "glm_steps" not in seen
    assert "stacked_step" in seen


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_plain_linear_head_takes_the_stacked_steps(other, device, monkeypatch) -> None:
    module, loss, data = linear_problem("gaussian", device)
    dtype = torch.float32 if other == "half" else torch.float64
    if other == "frozen":
        module.bias.requires_grad_(False)
    plain = {"module": module, "loss": loss, "optimizer": lambda p: SGD(p, lr=0.1), "steps": 1}
    options = {**plain, **OTHERS[other]}
    options["module"] = options["module"].to(dtype)
    data = data.to(dtype=dtype)
    with launches(monkeypatch, at_least=0) as seen:
        ft.run(ft.fedavg(ft.gradient_descent(**options)), ft.InProcess(data, device=device), rounds=1)
    assert "glm_steps" not in seen


def test_noise_and_clipping_of_examples_take_the_stacked_steps(device, monkeypatch) -> None:
    module, loss, data = linear_problem("gaussian", device)
    local = privacy.example_level(
        module,
        clip=1.0,
        noise=1.0,
        sampling_rate=0.5,
        steps=2,
        delta=1e-3,
        loss=loss,
        optimizer=lambda p: SGD(p, lr=0.1),
    )
    with launches(monkeypatch, at_least=0) as seen:
        ft.run(ft.fedavg(local), ft.InProcess(data, device=device), rounds=1)
    assert "glm_steps" not in seen


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
