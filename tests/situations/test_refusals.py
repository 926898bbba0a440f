"""What no way of stacking can train is refused by name, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.trust import privacy
from situations.case import Step, labelled, mlp, regression, sgd, tokens
from situations.loop import seeded


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


class Manual(Step):
    """Optimisation by hand."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)
        self.automatic_optimization = False


class TwoOptimisers(Step):
    """An optimiser for each layer."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)]


class Plateau(Step):
    """A schedule that waits for a metric."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}


class Hooks(Step):
    """A hook of Lightning's that training depends on."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.clamp_(-0.1, 0.1)


def lightning(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: ft.gradient_descent(make(), epochs=1)


def plain(make: Callable[[], nn.Module], loss: Any = F.mse_loss, optimizer: Any = None) -> Callable[[], Any]:
    return lambda: ft.gradient_descent(make(), epochs=1, loss=loss, optimizer=optimizer or sgd())


def outside() -> Any:
    """Return a solver whose loss reads the user's own module, of which copies train."""
    module = mlp()
    loss = lambda p, t: F.mse_loss(p, t) + module[0].weight.square().sum()
    return ft.gradient_descent(module, epochs=1, loss=loss, optimizer=sgd())


def all_frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters)


def one_row(n: int) -> tuple[Tensor, Tensor]:
    return regression()(1 if n == 3 else n)


def far_labels(n: int) -> tuple[Tensor, Tensor]:
    x, y = labelled()(n)
    return x, y + (5 if n == 3 else 0)


def far_words(n: int) -> tuple[Tensor, Tensor]:
    words, y = tokens()(n)
    return words + (9 if n == 3 else 0), y


def floats_as_labels(n: int) -> tuple[Tensor, Tensor]:
    x, y = labelled()(n)
    return x, y.double()


def short_labels(n: int) -> tuple[Tensor, Tensor]:
    x, y = labelled()(n)
    return x, y.short()


def words_as_floats(n: int) -> tuple[Tensor, Tensor]:
    words, y = tokens()(n)
    return words.double(), y


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 2), nn.Flatten(), nn.Linear(6, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "optimisation by hand lightning#17958": (lightning(Manual), regression(), "lightning_fit"),
    "two optimisers lightning#375": (lightning(TwoOptimisers), regression(), "lightning_fit"),
    "a schedule that waits for a metric openfl#305": (lightning(Plateau), regression(), "lightning_fit"),
    "a hook before the optimiser's step": (lightning(Hooks), regression(), "on_before_optimizer_step"),
    "an optimiser with a closure": (plain(mlp, optimizer=lbfgs), regression(), "lightning_fit|closure"),
    "a lazy module never called": (
        plain(lambda: nn.Sequential(nn.LazyLinear(1))),
        regression(),
        "wait for a first batch; call the module once",
    ),
    "a lazy module of single layer never called": (
        plain(lambda: nn.LazyLinear(1)), regression(), "wait for a first batch; call the module once"
    ),
    "a lazy module under privacy never called": (
        lambda: privacy.example_level(
            nn.LazyLinear(1), clip=1.0, noise=1.0, sampling_rate=0.5, steps=1, delta=1e-3, loss=F.mse_loss,
            optimizer=sgd(),
        ),
        regression(),
        "wait for a first batch; call the module once",
    ),
    "a lazy layer solved in closed form": (
        lambda: ft.least_squares(nn.LazyLinear(1)), regression(), "wait for a first batch; call the module once"
    ),
    "nothing trains opacus#687": (plain(all_frozen), regression(), "requires_grad|train"),
    "a loss that reads the module itself": (outside, regression(), "depends on"),
    "BatchNorm without a choice of buffers FedScale#57": (plain(normed), regression(), "buffers="),
    "labels out of range at one client PFLlib#254": (
        plain(lambda: nn.Linear(4, 3), F.cross_entropy), far_labels, "'2'"
    ),
    "words out of range at one client": (plain(table), far_words, "'2'"),
    "labels as floats": (plain(lambda: nn.Linear(4, 3), F.cross_entropy), floats_as_labels, r"long\(\)|int64"),
    "labels as 16-bit integers": (plain(lambda: nn.Linear(4, 3), F.cross_entropy), short_labels, r"long\(\)|int64"),
    "words as floats": (plain(table), words_as_floats, r"long\(\)|int64|integer"),
    "outputs of another shape than the targets pytorch#4938": (
        plain(mlp), lambda n: (torch.randn(n, 4), torch.randn(n)), "(?i)shape|broadcast"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_by_name(name: str) -> None:
    make, rows, expected = REFUSED[name]
    with seeded(3):
        data = ft.data.from_tensors([rows(n) for n in (4, 7, 3)], names=["0", "1", "2"])
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError), match=expected) as error:
            ft.run(ft.fedavg(make()), ft.InProcess(data), rounds=1, progress=False)
    assert "please report a bug" not in str(error.value)
