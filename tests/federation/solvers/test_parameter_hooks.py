"""Hooks of parameters on the gradients of stacked clients, and hooks of modules that stacks refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

from fedtorch.federation.solvers.stacked_loss import ParameterHooks, backward_hooks

NAMES = ["weight", "bias"]


def normalised(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def hooked() -> nn.Module:
    module = nn.Linear(3, 2).double()
    module.weight.register_hook(normalised)
    module.weight.register_hook(lambda gradient: None)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def test_hooks_see_the_gradient_of_one_client_in_their_order() -> None:
    gradients = [torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)]
    weight, bias = ParameterHooks(hooked(), NAMES).stacked(gradients)
    expected = torch.stack([2 * each / each.norm() for each in gradients[0]])
    torch.testing.assert_close(weight, expected, rtol=1e-14, atol=0)
    assert bias is gradients[1]


def test_one_clients_gradients_pass_through_the_same_hooks() -> None:
    gradient = torch.randn(2, 3, dtype=torch.float64)
    weight, bias = ParameterHooks(hooked(), NAMES).alone([gradient, None])
    torch.testing.assert_close(weight, 2 * gradient / gradient.norm(), rtol=1e-14, atol=0)
    assert bias is None


def test_no_gradient_calls_no_hook() -> None:
    hooks = ParameterHooks(hooked(), NAMES)
    assert list(hooks.stacked([None, None])) == list(hooks.alone([None, None])) == [None, None]


def test_hooks_after_accumulation_are_refused_by_name() -> None:
    module = nn.Linear(3, 2)
    module.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(TypeError, match=r"but bias of Linear have one.*register_hook, or ft\.lightning_fit"):
        ParameterHooks(module, NAMES)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_parts_with_hooks_on_their_backward_pass_are_named(register: str) -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    getattr(net[1], register)(lambda *args: None)
    net[0].register_forward_hook(lambda *args: None)
    assert backward_hooks(net) == ["1 (ReLU)"]


def test_global_hooks_on_backward_passes_are_of_every_part() -> None:
    handle = register_module_full_backward_hook(lambda *args: None)
    try:
        assert backward_hooks(nn.Linear(1, 1)) == ["itself (Linear)"]
    finally:
        handle.remove()
    assert backward_hooks(nn.Linear(1, 1)) == []
