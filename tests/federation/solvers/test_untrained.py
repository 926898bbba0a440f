"""A loss that reads parameters which no client trains is refused, and nothing else that looks like it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fedtorch as ft
from fedtorch.trust import privacy

SGD = partial(torch.optim.SGD, lr=0.1)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 9, 3, generator=GENERATOR)
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]])
DATA = ft.data.from_tensors(list(zip(X, Y)))
ITSELF = "Expected a loss of what is trained, but it depends on {} of the {} itself"
UNREGISTERED = "Expected a loss of what is trained, but it depends on ['\"]{}['\"] of {}, which .* not registered"

Begin = Callable[..., ft.Run]


def descent(module: nn.Module, **settings: Any) -> ft.Run:
    plain = {} if isinstance(module, L.LightningModule) else {"optimizer": SGD}
    return ft.Run(ft.fedavg(ft.gradient_descent(module, steps=1, **plain, **settings)), ft.InProcess(DATA))


def one_by_one(module: nn.Module, **settings: Any) -> ft.Run:
    return descent(module, batched=False, **settings)


def compiled(module: nn.Module, **settings: Any) -> ft.Run:
    return descent(module, compile=True, **settings)


def private(module: nn.Module, **settings: Any) -> ft.Run:
    plain = {} if isinstance(module, L.LightningModule) else {"optimizer": SGD}
    local = privacy.example_level(
        module,
        clip=1.0,
        noise=1.0,
        sampling_rate=0.5,
        steps=1,
        delta=1e-3,
        entropy=privacy.from_seed(0),
        **plain,
        **settings,
    )
    return ft.Run(ft.fedavg(local), ft.InProcess(DATA))


def fit(module: L.LightningModule) -> ft.Run:
    run = ft.Run(ft.fedavg(ft.lightning_fit(module, max_epochs=1, batch_size=5)), ft.InProcess(DATA))
    run.step()
    return run


def manual_fit(module: L.LightningModule) -> ft.Run:
    module.automatic_optimization = False
    step = type(module).training_step

    def by_hand(self: Any, batch: Any) -> None:
        self.manual_backward(step(self, batch))
        self.optimizers().step()

    module.__class__ = type("Manual", (type(module),), {"training_step": by_hand})
    return fit(module)


STACKED = [descent, one_by_one, compiled, private]
FITS = [fit, manual_fit]


def zeros() -> nn.Linear:
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    return net


@pytest.mark.parametrize("begin", STACKED)
def test_a_loss_that_closes_over_the_module(begin: Begin) -> None:
    net = zeros()
    penalised = lambda output, y: F.mse_loss(output, y) + net.weight.square().sum()  # flat at the start
    with pytest.raises(ValueError, match=ITSELF.format("'weight'", "Linear")):
        begin(net, loss=penalised)


@pytest.mark.parametrize(
    "read",
    [
        lambda net, output: functional_call(net, {"0.weight": torch.ones(2, 3)}, X[0]).square().mean(),
        lambda net, output: output.mean() * net(X[0]).mean(),
        lambda net, output: 0.0 * sum(p.norm() for p in net.parameters()),
    ],
    ids=["functional_call", "a call", "norms"],
)
def test_other_ways_to_read_it(read: Callable[[nn.Module, Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with pytest.raises(ValueError, match=ITSELF.format(r"'[01]\.\w+' and [23] more", "Sequential") + ".*detach"):
        descent(net, loss=lambda output, y: F.mse_loss(output, y) + read(net, output))


class Lit(L.LightningModule):
    """A linear layer and a penalty that is made in different ways."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.net = zeros()
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1]) + self.more()

    def more(self) -> Tensor:
        return torch.zeros(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


class Closing(Lit):
    """A function that has been made in the constructor closes over the module; that of a copy is the copy's."""

    def __init__(self) -> None:
        super().__init__()
        self.more = lambda: self.net.weight.square().sum()


class Penalised(Lit):
    def more(self) -> Tensor:
        return self.net.weight.square().sum()


@pytest.mark.parametrize("begin", [*STACKED, *FITS])
def test_a_module_that_closes_over_itself_trains_as_one_that_does_not(begin: Begin) -> None:
    closing, plain = (begin(module()) for module in (Closing, Penalised))
    for run in (closing, plain):
        run.step()
    torch.testing.assert_close(closing.server, plain.server)


class Holding(Lit):
    def more(self) -> Tensor:
        return sum((t.square().sum() for t in self.read()), torch.zeros(()))


def leaf(grad: bool = True) -> Tensor:
    return torch.zeros(2, requires_grad=grad)


HOLDERS: dict[str, tuple[Any, Callable[[Any], list[Tensor]], str]] = {
    "list": ([leaf(), nn.Parameter(leaf())], lambda held: held[1:], r"held\[1\]"),
    "dict": ({"a": [leaf()]}, lambda held: held["a"], r"held\['a'\]\[0\]"),
    "tensor": (leaf(), lambda held: [held], "held"),
    "object": (SimpleNamespace(a=leaf()), lambda held: [held.a], r"held\.a"),
    "layers": ([zeros()], lambda held: list(held[0].parameters()), r"held\[0\]\.weight"),
}


@pytest.mark.parametrize("begin", [descent, one_by_one, private, *FITS])
@pytest.mark.parametrize("kind", HOLDERS)
def test_parameters_that_are_not_registered(begin: Begin, kind: str) -> None:
    held, read, name = HOLDERS[kind]
    module = Holding(held=copy.deepcopy(held))
    type(module).read = lambda self: read(self.held)
    with pytest.raises(ValueError, match=UNREGISTERED.format(name, "(Holding|Manual)")):
        begin(module)


def test_they_are_looked_for_in_submodules_and_after_the_module_is_gone() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.plain = zeros(), nn.Identity()
            self.plain.scales = [leaf()]

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.plain.scales[0].sum().exp()

    outer = Outer()
    gone = weakref.ref(outer)
    local = ft.gradient_descent(outer, steps=1, optimizer=SGD, loss=F.mse_loss)
    del outer
    assert gone() is None
    with pytest.raises(ValueError, match=UNREGISTERED.format(r"plain\.scales\[0\]", "Outer")):
        ft.Run(ft.fedavg(local), ft.InProcess(DATA))


def test_registered_parameters_by_a_list_of_them() -> None:
    """A fit puts values into them, where they stay; stacked clients have others."""

    class Listing(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.decayed = [self.net.weight]

        def more(self) -> Tensor:
            return self.decayed[0].square().sum()

    with pytest.raises(ValueError, match=ITSELF.format(r"'net\.weight'", "Listing")):
        descent(Listing())

    class Plain(Lit):
        def more(self) -> Tensor:
            return self.net.weight.square().sum()

    first, second = fit(Listing()).server, fit(Plain()).server
    torch.testing.assert_close(first["net.weight"], second["net.weight"])


TEACHER = nn.Linear(3, 1)  # nobody has frozen it
HELD = zeros()
CONSTANTS: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    "another module": (zeros(), lambda net, output, y: F.mse_loss(output, y) * TEACHER(X[0]).square().mean()),
    "the module's value": (HELD, lambda net, output, y: output.mean() + net.weight.detach().square().sum()),
    "without gradients": (HELD, lambda net, output, y: output.mean() + torch.no_grad()(net)(X[0]).mean()),
    "nothing": (zeros(), lambda net, output, y: F.mse_loss(output, y)),
    "a frozen part": (
        nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)),
        lambda net, output, y: F.mse_loss(output, y) + net[0].weight.square().sum(),
    ),
}


@pytest.mark.parametrize("begin", STACKED)
@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_are_taken(begin: Begin, kind: str) -> None:
    net, loss = CONSTANTS[kind]
    begin(net, loss=partial(loss, net))


class Taught(Lit):
    """A frozen network in a list, and one that belongs to nobody."""

    def more(self) -> Tensor:
        return sum((t.square().sum() for t in (*self.held[0].parameters(), TEACHER.weight)), self.net.weight.sum())


class Tied(Lit):
    """One parameter at two places, and one with a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.normed = self.net, nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))

    def more(self) -> Tensor:
        return self.tied.weight.square().sum() + (1 + self.normed.weight).square().sum()


class Recurrent(Lit):
    """It keeps its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2)

    def more(self) -> Tensor:
        return self.lstm(X)[0].sum()


@pytest.mark.parametrize("begin", [one_by_one, *FITS])
@pytest.mark.parametrize("make", [Lit, lambda: Taught(held=[zeros().requires_grad_(False)]), Tied, Recurrent])
def test_modules_as_they_should_be(begin: Begin, make: Callable[[], L.LightningModule]) -> None:
    begin(make())
