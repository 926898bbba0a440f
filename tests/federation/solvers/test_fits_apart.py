"""A fit of `lightning_fit` reads nothing that another client's fit has left, wherever that is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.solvers.python_state import StateRead
from fedtorch.federation.solvers.step_check import StateKept

COUNTS = {"steps": 0}
NUMBER = 0
TENSOR = torch.zeros((), dtype=torch.float64)
SEEN: list[float] = []


class Scaled(L.LightningModule):
    """A weight whose loss is multiplied by what a function says."""

    calls = 0

    def __init__(self, scale: Callable[[], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.scale = scale

    def training_step(self, batch: Any) -> Tensor:
        return self.scale() * self.w.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Shared:
    """An object of which copies of a module have one."""

    def __init__(self) -> None:
        self.n = 0

    def __deepcopy__(self, memo: Any) -> Shared:
        return self

    def __call__(self) -> int:
        self.n += 1
        return self.n


def in_a_table() -> int:
    COUNTS["steps"] += 1
    return COUNTS["steps"]


def in_a_global() -> int:
    global NUMBER
    NUMBER += 1
    return NUMBER


def in_a_tensor() -> Tensor:
    TENSOR.add_(1)
    return TENSOR.clone()


def in_a_class() -> int:
    Scaled.calls += 1
    return Scaled.calls


def in_a_list() -> int:
    SEEN.append(1.0)
    return len(SEEN)


def in_a_default(seen: list[int] = [0]) -> int:  # noqa: B006
    seen[0] += 1
    return seen[0]


def in_a_keyword(*, seen: list[int] = [0]) -> int:  # noqa: B006
    seen[0] += 1
    return seen[0]


def in_a_closure() -> Callable[[], int]:
    n = 0

    def scale() -> int:
        nonlocal n
        n += 1
        return n

    return scale


def beyond_a_bound() -> int:
    Scaled.calls += 1
    return 1 if Scaled.calls < 5 else 4


READ: dict[str, tuple[Callable[[], Any], str]] = {
    "a table": (lambda: in_a_table, "COUNTS"),
    "a global": (lambda: in_a_global, "NUMBER"),
    "a tensor": (lambda: in_a_tensor, "TENSOR"),
    "a class": (lambda: in_a_class, r"Scaled\.calls"),
    "a list": (lambda: in_a_list, "SEEN"),
    "a default argument": (lambda: in_a_default, r"in_a_default\.seen"),
    "a keyword's default": (lambda: in_a_keyword, r"in_a_keyword\.seen"),
    "a closure": (in_a_closure, r"scale\.n"),
    "an object": (Shared, r"scale\.n"),
    "a bound that the first clients stay below": (lambda: beyond_a_bound, r"Scaled\.calls"),
}


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    COUNTS["steps"], Scaled.calls = 0, 0
    SEEN.clear()
    TENSOR.zero_()


def fitted(scale: Any, rounds: int = 1) -> list[float]:
    rows = [(torch.ones(2, 1, dtype=torch.float64),)] * 3
    local = ft.lightning_fit(Scaled(scale), max_steps=2)
    run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=rounds, progress=False)
    return [float(run.client_module(k).w.detach()) for k in range(3)]


@pytest.mark.parametrize("where", READ)
def test_a_count_of_all_clients_is_refused_by_name(where: str) -> None:
    make, name = READ[where]
    with pytest.raises(StateRead, match=f"a fit reads {name}, which an earlier fit has changed"):
        fitted(make())


def counting_in(path: Path) -> Callable[[], int]:
    def scale() -> int:
        count = int(path.read_text()) + 1 if path.exists() else 1
        path.write_text(str(count))
        return count

    return scale


@functools.lru_cache(1)
def counter() -> itertools.count[int]:
    return itertools.count(1)


@pytest.mark.parametrize("where", ["a file", "a cache"])
def test_a_count_that_python_cannot_see_is_refused(where: str, tmp_path: Path) -> None:
    with pytest.raises(StateKept, match=r"a fit of Scaled .* taken twice from the same"):
        fitted(counting_in(tmp_path / "count") if where == "a file" else lambda: next(counter()))


def kept_in_lists() -> float:
    SEEN.append(1.0)
    Scaled.calls += 1
    return 1.0


def test_unread_state_equals_sequential_fits() -> None:
    assert fitted(kept_in_lists, rounds=2) == [-4.0] * 3
    assert type(Scaled.calls) is int
    assert Scaled.calls == len(SEEN) > 3 * 2 * 2  # the first fit is taken twice


def test_a_count_of_the_modules_own_is_each_fits() -> None:
    class Counting(Scaled):
        n = 0

        def training_step(self, batch: Any) -> Tensor:
            self.n += 1
            return self.n * self.w.sum()

    rows = [(torch.ones(2, 1, dtype=torch.float64),)] * 3
    local = ft.lightning_fit(Counting(float), max_steps=2)
    run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=2, progress=False)
    assert [float(run.client_module(k).w.detach()) for k in range(3)] == [-6.0] * 3


def test_the_second_look_at_the_first_fit_leaves_no_record(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    class Logging(Scaled):
        def training_step(self, batch: Any) -> Tensor:
            loss = super().training_step(batch)
            self.log("loss", loss)
            self.logger.log_hyperparams({"width": 1})
            return loss

    rows = [(torch.ones(2, 1, dtype=torch.float64),)]
    logger = CSVLogger(tmp_path, version=0)
    local = ft.lightning_fit(Logging(lambda: 1.0), max_steps=2, logger=logger, log_every_n_steps=1)
    ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1, progress=False)
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 2
