"""A loss that depends on parameters which training does not change is refused, whatever they are kept in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedtorch._untrained import refuse_untrained

COPIES = [torch.zeros(1, 2, requires_grad=True), torch.zeros(1, requires_grad=True)]


def loss(*others: Tensor) -> Tensor:
    """A loss of the copies that are trained, and of what is read beside them."""
    return sum((other.square().sum() for other in others), (COPIES[0] @ torch.ones(2)).sum() + COPIES[1].sum())


class Holder(nn.Module):
    """A module that keeps a tensor in a list, in an object's dict, and in a child's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.layer.scale = [torch.ones(1, requires_grad=True)]
        self.kept = [torch.ones(1, requires_grad=True)]
        self.inside = SimpleNamespace(table={"shift": torch.ones(1, requires_grad=True)})
        self.register_buffer("constant", torch.ones(1))


def test_a_loss_of_what_is_trained_passes() -> None:
    net, teacher = Holder(), nn.Linear(2, 1)
    refuse_untrained(loss(), COPIES, net)
    refuse_untrained(loss(net.constant, net.layer.weight.detach(), teacher.weight), COPIES, net)
    refuse_untrained(torch.zeros(()), COPIES, net)  # without a gradient there is nothing to read
    refuse_untrained(loss(net.layer.weight), [*COPIES, net.layer.weight], net)


def test_registered_parameters_are_named() -> None:
    net = Holder()
    with pytest.raises(ValueError, match=r"depends on 'layer.weight' of the Holder itself.*would have no effect"):
        refuse_untrained(loss(net.layer.weight), COPIES, net)
    with pytest.raises(ValueError, match=r"'layer.\w+' and 1 more of the Holder"):
        refuse_untrained(loss(net.layer.weight, net.layer.bias), COPIES, net)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        (r"kept\[0\]", lambda net: net.kept[0]),
        (r"inside\.table\['shift'\]", lambda net: net.inside.table["shift"]),
        (r"layer\.scale\[0\]", lambda net: net.layer.scale[0]),
    ],
)
def test_what_is_not_registered_is_found_and_named(name: str, of) -> None:
    net = Holder()
    with pytest.raises(ValueError, match=f"depends on .{name}. of Holder, which .* not registered as a parameter"):
        refuse_untrained(loss(of(net)), COPIES, net)
