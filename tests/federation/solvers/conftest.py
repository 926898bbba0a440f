"""What the tests of local solvers share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def nothing_outside_changes():
    """Training leaves torch's global generator, default dtype and gradient mode as they were."""
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[1:]
