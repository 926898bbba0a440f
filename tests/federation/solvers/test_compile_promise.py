"""compile=True is a promise of the user: the third step of a shape is held against the module's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import block_of, linear, stacked
from torch import Tensor

from fedtorch import functional, random
from fedtorch.federation.solvers.batches import Batch
from fedtorch.module_randomness.step_draws import StepKeys

KEYS = StepKeys(random.fold_in(random.key(4), torch.arange(3)))
COUNTS = (2, 2, 2)


class Switching:
    """Cross-entropy, or another loss from when `other` is said."""

    other = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        return 2 * loss if self.other else loss


def step(found: Any, index: int) -> Any:
    tensors = {name: p.expand(3, *p.shape).clone() for name, p in functional.parameters(linear()).items()}
    block = block_of(COUNTS)
    return found.gradients(tensors, {}, Batch(block.batch, torch.tensor(COUNTS)), index, KEYS)


def test_a_third_step_that_does_other_operations_is_refused() -> None:
    loss = Switching()
    found = stacked(loss, compile=True, block=block_of(COUNTS))
    step(found, 0)
    step(found, 1)  # captured
    loss.other = True
    with pytest.raises(RuntimeError, match=r"Linear that do the same operations.*'weight' at step 2.*compile=False"):
        step(found, 2)


def test_steps_that_keep_the_promise_are_those_of_a_loop() -> None:
    found, block, net = stacked(compile=True, block=block_of(COUNTS)), block_of(COUNTS), linear()
    for index in range(4):
        result = step(found, index)
        for k in range(3):
            own = torch.autograd.grad(
                F.cross_entropy(net(block.batch[0][k]), block.batch[1][k]), list(net.parameters())
            )
            for one, other in zip(result.gradients, own, strict=True):
                torch.testing.assert_close(one[k], other)
