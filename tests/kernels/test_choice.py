"""Programs run where they can, references everywhere else, and what is wrong is said."""

from __future__ import annotations

import pytest
import torch
from support.programs import launches

from fedtorch.programs import choice, launch as _launch
from fedtorch.programs.glm_steps import CATEGORICAL, GAUSSIAN, glm_steps

ARGS = torch.eye(2, dtype=torch.float64)[None], torch.ones(1, 2, dtype=torch.float64)


def stepped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step of a linear client of two rows."""
    start = torch.zeros(1, 2, dtype=x.dtype, device=x.device)
    return glm_steps(GAUSSIAN, x, y, torch.full((1,), 2, device=x.device), start, steps=1, lr=0.1)[0]


def test_off_turns_all_off(device, monkeypatch) -> None:
    args = [part.to(device) for part in ARGS]
    with launches(monkeypatch):
        stepped(*args)
    monkeypatch.setenv(choice.VARIABLE, "off")
    with launches(monkeypatch, at_least=0) as seen:
        stepped(*args)
    assert seen == []


def test_the_default_leaves_the_cpu_alone(monkeypatch) -> None:
    monkeypatch.delenv(choice.VARIABLE)
    with launches(monkeypatch, at_least=0) as seen:
        stepped(*ARGS)
    assert seen == []


def test_another_setting_is_refused(device, monkeypatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "fast")
    with pytest.raises(ValueError, match="Expected FEDTORCH_PROGRAMS to be one of on, off, interpret, but got 'fast'"):
        stepped(*(part.to(device) for part in ARGS))


def test_tensors_on_two_devices_are_refused(device) -> None:
    with pytest.raises(ValueError, match="Expected tensors on one device for glm_steps, but got"):
        stepped(ARGS[0].to(device), ARGS[1].to("meta"))


def test_without_triton_references_run(device, monkeypatch) -> None:
    monkeypatch.setattr(choice, "installed", lambda: False)
    with launches(monkeypatch, at_least=0) as seen:
        stepped(*(part.to(device) for part in ARGS))
    assert seen == []


def test_mapped_and_traced_tensors_go_to_the_reference(device, monkeypatch) -> None:
    x, y = (part.to(device) for part in ARGS)
    with launches(monkeypatch, at_least=0) as seen:
        mapped = torch.func.vmap(lambda scale: stepped(scale * x, y))(torch.ones(3, device=device))
        traced = torch.fx.experimental.proxy_tensor.make_fx(stepped)(x, y)
    assert seen == []
    assert torch.equal(mapped[0], traced(x, y))


def test_interpreting_after_compiling_is_refused(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(_launch.sys.modules, "triton", choice)
    with pytest.raises(RuntimeError, match="Expected TRITON_INTERPRET=1 before Triton's first import"):
        _launch.loaded.__wrapped__("glm_steps", interpreted=True)


def test_tiles_cover_rows_of_any_width() -> None:
    assert _launch.tile(1, 1024) == (1024, 1)
    assert _launch.tile(33, 1024) == (16, 64)
    assert _launch.tile(5000, 1024) == (1, 1024)
    assert [_launch.power_of_two(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]


def linear_models(features: int, classes: int, dtype: torch.dtype, device: str):
    """A step of a linear model, or of one per class."""
    x = torch.ones(1, 2, features, dtype=dtype, device=device)
    y = torch.zeros(1, 2, dtype=torch.int64 if classes else dtype, device=device)
    start = x.new_zeros(1, features, *[classes] * bool(classes))
    return glm_steps(CATEGORICAL if classes else GAUSSIAN, x, y, y.new_full((1,), 2).long(), start, steps=1, lr=0.1)


BEYOND = {  # shapes and dtypes that a program does not know
    "129 features": lambda device: linear_models(129, 0, torch.float64, device),
    "17 classes": lambda device: linear_models(2, 17, torch.float32, device),
    "classes in float64": lambda device: linear_models(2, 3, torch.float64, device),
    "bfloat16": lambda device: linear_models(2, 0, torch.bfloat16, device),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_a_program_does_not_know_goes_to_the_reference(name, device, monkeypatch) -> None:
    with launches(monkeypatch, at_least=0) as seen:
        BEYOND[name](device)
    assert seen == []
