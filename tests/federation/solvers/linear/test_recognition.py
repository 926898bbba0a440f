"""Which modules are linear models, however they are written; others keep the steps of any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.solvers.linear.steps import LinearSteps

SCALE = 1.0


class Squeezed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 1), 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Logging(Squeezed):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[..., 0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("train_mse", loss, prog_bar=True)
        return {"loss": loss}


class Criterion(Squeezed):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.MSELoss()

    def training_step(self, batch: Any) -> Tensor:
        return self.criterion(self.layer(batch[0]).view(-1), batch[1])


class Stored(Squeezed):
    def __init__(self) -> None:
        super().__init__()
        self.loss = F.mse_loss

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self.layer(batch[0]).flatten(), batch[1])


class Counting(Squeezed):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls = self.calls + 1
        return super().training_step(batch, batch_idx)


class Branching(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        eta = self.layer(batch[0]).squeeze(-1) if self.training else batch[1]
        return F.mse_loss(eta, batch[1])


class Scaled(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1]) * self.scale


class ScaledByGlobal(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1]) * SCALE


class Clamped(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1).clamp(-1e6, 1e6), batch[1])


class Huber(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 2 * F.huber_loss(self.layer(batch[0]).squeeze(-1), batch[1], delta=1e6)


class Summed(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1], reduction="sum")


class LoggingMore(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        eta = self.layer(batch[0]).squeeze(-1)
        self.log("mean", eta[0])
        return F.mse_loss(eta, batch[1])


class OfEpochs(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])
        self.log("loss_of_rows", loss, on_epoch=True)
        return loss


class Twice(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])


class Deep(Squeezed):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))  # type: ignore[assignment]


class Sorting(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sorted(batch, key=len)
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])


class Numbered(Squeezed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1] * self.current_epoch)


class CalledOtherwise(Squeezed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(*args, **kwargs)


class Hooked(Squeezed):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda module, inputs, output: 2 * output)


LINEAR: list[type[Squeezed]] = [Squeezed, Logging, Criterion, Stored]
OTHERS: list[type[Squeezed]] = [
    *(Counting, Branching, Scaled, ScaledByGlobal, Clamped, Huber, Summed, LoggingMore, OfEpochs, Twice, Deep),
    *(Sorting, Numbered, CalledOtherwise, Hooked),
]


def steps_of(module: nn.Module, **settings: Any) -> LinearSteps | None:
    return ft.gradient_descent(module, epochs=2, batch_size=4, **settings).solve.__self__.linear  # type: ignore[attr-defined]


def data() -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (6, 9, 5)]
    return ft.data.from_tensors([(x, x.sum(1) + 0.5) for x in rows])


@pytest.mark.parametrize("kind", LINEAR)
def test_the_same_as_the_steps_of_any_module(kind: type[Squeezed], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = kind().double()
    assert steps_of(module) is not None
    knows, asked = LinearSteps.knows, []
    runs = []
    for way in (lambda *a: asked.append(knows(*a)) or asked[-1], lambda *a: False):
        monkeypatch.setattr(LinearSteps, "knows", way)
        local = ft.gradient_descent(module, epochs=2, batch_size=4)
        runs.append(ft.run(ft.fedavg(local), ft.InProcess(data()), rounds=2))
    assert asked == [True, True]
    for one, other in zip(*(tree.leaves(run.server) for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert list(runs[0].history.columns) == list(runs[1].history.columns)
    for name in ("train_loss", *(["train_mse"] if kind is Logging else [])):
        torch.testing.assert_close(*(torch.tensor(list(run.history[name])) for run in runs), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", OTHERS)
def test_what_its_code_does_not_show(kind: type[Squeezed]) -> None:
    assert steps_of(kind()) is None


def plain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Own(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "loss", "dims"),
    [
        (lambda: plain(nn.Linear(3, 1)), F.mse_loss, {3}),
        (lambda: plain(nn.Linear(3, 1), nn.Flatten(0)), F.mse_loss, {2}),
        (lambda: plain(nn.Identity(), nn.Linear(3, 4)), nn.CrossEntropyLoss(), {2}),
        (lambda: Own(ft.LinearHead(3)), nn.BCEWithLogitsLoss(), {2}),
        (lambda: Own(nn.Linear(3, 1, bias=False)), F.poisson_nll_loss, {3}),
        (lambda: plain(nn.Linear(3, 4)), nn.CrossEntropyLoss(label_smoothing=0.1), None),
        (lambda: plain(nn.Linear(3, 4)), nn.CrossEntropyLoss(ignore_index=1), None),
        (lambda: plain(nn.Linear(3, 4)), F.mse_loss, None),
        (lambda: plain(nn.Linear(3, 1), nn.ReLU()), F.mse_loss, None),
        (lambda: plain(nn.Linear(3, 1).requires_grad_(False), nn.Linear(1, 1)), F.mse_loss, None),
        (lambda: nn.Linear(3, 1), lambda output, target: F.mse_loss(output, target), None),
    ],
)
def test_modules_with_a_loss(make: Callable[[], nn.Module], loss: Any, dims: set[int] | None) -> None:
    found = steps_of(make(), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert (None if found is None else found.model.dims) == dims


class Flattening(Squeezed):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])


class SqueezedImages(Flattening):
    """Flattens no images but those of one line."""

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.layer(batch[0].squeeze()), batch[1])


@pytest.mark.parametrize(
    ("make", "shape", "known"),
    [
        (Flattening, (2, 3), True),
        (Flattening, (1, 2, 3), True),
        (Flattening, (6,), True),
        (SqueezedImages, (1, 6), True),
        (SqueezedImages, (2, 3), False),
        (lambda: Own(nn.Sequential(nn.Flatten(), nn.Linear(6, 4))), (1, 2, 3), True),
    ],
)
def test_rows_that_are_flattened(
    make: Callable[[], nn.Module], shape: tuple[int, ...], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = make().double()
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(n, *shape, generator=generator).double(), torch.arange(n) % 4) for n in (6, 8, 3)]
    settings: dict[str, Any] = {"loss": F.cross_entropy} if isinstance(module, Own) else {}
    optimizer = lambda p: torch.optim.SGD(p, lr=0.05)
    local = lambda: ft.gradient_descent(module, epochs=2, batch_size=4, optimizer=optimizer, **settings)
    linear = local().solve.__self__.linear  # type: ignore[attr-defined]
    stacked = ft.data.from_tensors(clients).stack(range(3))
    start = {name: leaf.detach().expand(3, *leaf.shape) for name, leaf in module.named_parameters()}
    assert linear.knows(start, stacked.batch, None) == known
    if known:
        runs = [ft.run(ft.fedavg(local()), ft.InProcess(ft.data.from_tensors(clients)), rounds=2)]
        monkeypatch.setattr(LinearSteps, "knows", lambda *a: False)
        runs.append(ft.run(ft.fedavg(local()), ft.InProcess(ft.data.from_tensors(clients)), rounds=2))
        for one, other in zip(*(tree.leaves(run.server) for run in runs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("clients", [2, 3])
def test_rows_of_another_structure_have_the_steps_of_any_module(clients: int) -> None:
    """Three fields, a dict, or one tensor, of as many clients as a pair has parts too."""
    linear = steps_of(Squeezed())
    assert linear is not None
    start = {"layer.weight": torch.zeros(clients, 1, 3), "layer.bias": torch.zeros(clients, 1)}
    x, y = torch.zeros(clients, 5, 3), torch.zeros(clients, 5)
    assert linear.knows(start, (x, y), None)
    for rows in (
        (x, y, y),
        {"x": x, "y": y},
        x,
        (x,),
        (x, {"y": y}),
        (x[..., :2], y),
        (x, y[..., None]),
        (x, y.long()),
    ):
        assert not linear.knows(start, rows, None)


def test_three_fields_of_which_two_are_read() -> None:
    """They train as they did before linear models were recognised."""
    rows = [(x, y, y) for x, y in (data()[k] for k in range(3))]
    local = ft.gradient_descent(Squeezed().double(), epochs=1, batch_size=4)
    assert ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1).number == 1


def test_code_that_is_replaced_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps_of(Squeezed())
    assert found is not None
    assert found.model.code.holds()
    with monkeypatch.context() as patched:
        patched.setattr(Squeezed, "training_step", Huber.training_step)
        assert not found.model.code.holds()
    with monkeypatch.context() as patched:
        patched.setitem(Squeezed.training_step.__globals__, "F", None)
        assert not found.model.code.holds()
    assert found.model.code.holds()
