"""Steps that are captured because a module's code shows that they are alike: the same bits, and no other steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import captured

DTYPES = [torch.float64, torch.float32]
SIZES = {"alike": [60] * 3, "ragged": [61, 23, 38]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Logging(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("entropy", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Counted(Logging):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(F.leaky_relu(self.net(x), batch_idx), y)


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) if self.training else self.first(x)


class Storing(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return super().forward(x)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(1, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 4)
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *layers)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)),
    "of a user's class": Net,
    "convolutions": convolutions,
}


def clients(sizes: list[int], dtype: torch.dtype) -> ft.data.FederatedData:
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(len(sizes)))
    draw = lambda key, n: (ft.random.normal(key, (n, 16), dtype), ft.random.randint(key, 4, (n,)))
    return ft.data.from_tensors([draw(key, n) for key, n in zip(keys, sizes)])


def trained(
    module: nn.Module, data: ft.data.FederatedData, compile: Any, *, rounds: int = 2, **settings: Any
) -> tuple[ft.Run, Any]:
    """Return (a run, what has been found out about its steps)."""
    torch.manual_seed(0)
    if not isinstance(module, L.LightningModule):
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        settings = {"loss": F.cross_entropy, "optimizer": sgd, **settings}
    local = ft.gradient_descent(module, epochs=4, batch_size=5, compile=compile, **settings)
    run = ft.run(ft.fedprox(local, mu=0.1), ft.InProcess(data), rounds=rounds)
    return run, local.solve.__self__.loss  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "_PAYS", 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_bits_are_those_of_steps_that_are_not_captured(
    make: Callable[[], nn.Module], sizes: list[int], dtype: torch.dtype
) -> None:
    module, data = make().to(dtype), clients(sizes, dtype)
    (one, automatic), (two, plain) = (trained(module, data, compile) for compile in ("auto", False))
    assert automatic._captured.graphs
    assert not plain._captured.graphs
    for name, leaf in two.server.items():
        torch.testing.assert_close(one.server[name], leaf, rtol=0, atol=0)
    assert list(one.history["train_loss"]) == list(two.history["train_loss"])


def test_a_lightning_module_s_steps_and_what_it_logs() -> None:
    torch.manual_seed(1)
    module, data = Logging().double(), clients(SIZES["ragged"], torch.float64)
    (one, automatic), (two, _) = (trained(module, data, compile) for compile in ("auto", False))
    assert automatic._captured.graphs
    assert list(one.history["entropy"]) == list(two.history["entropy"])


def test_partial_work_and_clipping() -> None:
    data, slow = clients(SIZES["ragged"], torch.float64), ft.partial_work(1.0, shares=torch.tensor([0.5, 1.0, 0.25]))
    servers = []
    for compile in ("auto", False):
        torch.manual_seed(0)
        local = ft.gradient_descent(
            Net().double(),
            epochs=4,
            batch_size=5,
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.05),
            clip=0.5,
            compile=compile,  # type: ignore[arg-type]
        )
        servers.append(ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2, faults=slow).server)
    torch.testing.assert_close(servers[0], servers[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "module",
    [Branching(), Storing(), nn.Sequential(Net(), nn.Dropout())],
    ids=lambda module: type(module).__name__,
)
def test_what_the_code_does_not_show_is_not_captured(module: nn.Module) -> None:
    _, loss = trained(module, clients(SIZES["alike"], torch.float32), "auto", rounds=1)
    assert loss._line is None
    assert not loss._captured.graphs


def test_a_loss_of_a_user_is_not_captured() -> None:
    mine = lambda output, target: F.cross_entropy(output, target)
    assert trained(Net(), clients(SIZES["alike"], torch.float32), "auto", rounds=1, loss=mine)[1]._line is None


def test_a_step_that_depends_on_its_number_is_not_replayed() -> None:
    torch.manual_seed(1)
    module, data = Counted().double(), clients(SIZES["alike"], torch.float64)
    (one, automatic), (two, _) = (trained(module, data, compile) for compile in ("auto", False))
    assert automatic._line is None
    assert not automatic._captured.graphs
    torch.testing.assert_close(one.server, two.server, rtol=0, atol=0)


def test_a_class_that_is_changed_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clients(SIZES["alike"], torch.float32)
    sgd = partial(torch.optim.SGD, lr=0.05)
    make = lambda compile: ft.fedavg(
        ft.gradient_descent(Net(), epochs=4, batch_size=5, loss=F.cross_entropy, optimizer=sgd, compile=compile)
    )
    servers = []
    for compile in ("auto", False):
        torch.manual_seed(0)
        run = ft.Run(make(compile), ft.InProcess(data))
        run.step()
        with monkeypatch.context() as change:
            change.setattr(Net, "forward", lambda self, x: self.last(self.first(x)))
            run.step()
        servers.append(run.server)
    torch.testing.assert_close(servers[0], servers[1], rtol=0, atol=0)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="compile=True, False or 'auto', but got 'yes'"):
        ft.gradient_descent(Net(), epochs=1, loss=F.cross_entropy, optimizer=torch.optim.Adam, compile="yes")  # type: ignore[arg-type]
