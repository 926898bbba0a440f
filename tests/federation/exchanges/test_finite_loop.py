"""Messages are looked through by the program in C as by operations of torch."""

from __future__ import annotations

import pytest
import torch
from support.programs import reference
from torch import Tensor

import fedtorch as ft
from fedtorch.dispatch import choice, compiled
from fedtorch.federation.exchanges import _finite_loop as program
from fedtorch.federation.exchanges.exchange import is_finite

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def message(values: Tensor, weight: Tensor) -> tuple[ft.Mean, ft.Sum]:
    return ft.Mean({"w": values, "count": torch.arange(3)}, weight), ft.Sum((torch.ones(3, 2, 2), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 5, 69])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 0.0, -1.0, "a weight", "NaN", "largest", "none"])
def test_every_number_is_looked_at(bad: float | str, place: int, dtype: torch.dtype) -> None:
    values, weight = torch.linspace(-1, 1, 70, dtype=dtype).reshape(7, 10), torch.ones(7, dtype=dtype)
    if isinstance(bad, float):
        values.view(-1)[place] = bad
    elif bad in ("a weight", "NaN"):
        weight[place // 10] = -1e-30 if bad == "a weight" else torch.nan
    elif bad == "largest":
        values.view(-1)[place], weight[0] = torch.finfo(dtype).max / 4, 0.0
    found = message(values, weight)
    wanted = bad in (0.0, -1.0, "largest", "none")
    assert program.finite([values, weight], [weight]) is wanted
    assert is_finite(found, found) is wanted
    with reference():
        assert program.finite([values, weight], [weight]) is None
        assert is_finite(found, found) is wanted


def test_what_the_program_leaves_to_torch() -> None:
    strided, half = torch.ones(4, 3).mT, torch.ones(4, dtype=torch.float16)
    for numbers in ([strided], [half], [torch.ones(program._MOST + 1)], [torch.ones(2, requires_grad=True)]):
        assert program.finite(numbers, []) is None
    assert is_finite(ft.Sum(strided))
    assert not is_finite(ft.Sum(half / 0))
    assert is_finite(ft.Sum(torch.ones(0, 3)))
    assert is_finite(ft.Sum(torch.arange(3)))  # nothing that could be infinite
    assert program.finite([], []) is True
