"""Keys and numbers that are made together are those that are made one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch import random
from fedtorch.module_randomness import step_draws
from fedtorch.module_randomness.interception import AHEAD, KeyedRandomness
from fedtorch.module_randomness.step_draws import StepKeys

KEYS = random.fold_in(random.key(3), torch.arange(5))


def test_keys_of_steps_and_calls_are_folded(monkeypatch):
    monkeypatch.setattr(step_draws, "_KEYS", 3 * AHEAD * len(KEYS))
    keys = StepKeys(KEYS)
    for step in (0, 1, 2, 3, 7, 2):
        draws, expected = keys[step], random.fold_in(KEYS, step)
        assert torch.equal(draws.keys, expected)
        assert torch.equal(draws.calls, random.fold_in(expected[:, None], torch.arange(AHEAD)))
        part, at = keys.some(torch.tensor([4, 1]), step), torch.tensor([4, 1])
        for later in (step, step + 5):
            assert torch.equal(part[later].calls, StepKeys(KEYS)[later].calls[at])
            assert torch.equal(part[later].keys, random.fold_in(KEYS[at], later))
    assert StepKeys(KEYS[:0])[4].calls.shape == (0, AHEAD)


def several(k: int, rows: int) -> Tensor:
    """Draws of every kind, more calls than have keys made before; client 2 has another probability than the others."""
    x = torch.ones(rows, 3, dtype=torch.float64)
    parts = [F.dropout(x, 0.3), torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 5), x.bernoulli(0.2)]
    parts += [torch.empty_like(x).exponential_(2.0), torch.empty_like(x).uniform_(1, 2), F.dropout(x, 0.1 * k)]
    return torch.stack([*parts, *(torch.rand_like(x) for _ in range(AHEAD))])


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4, 4), (1, 2, 5, 3, 9), (9, 5, 3, 2, 1)])
@pytest.mark.parametrize("numbers", [2**17, 16])
def test_clients_one_after_the_other_draw_their_own(sizes, numbers, monkeypatch):
    monkeypatch.setattr(step_draws, "_NUMBERS", numbers)
    draws, before = StepKeys(KEYS)[6], torch.get_rng_state()
    for k in (0, 1, 2, 2, 3, 4, 1):  # once more, too, after numbers may have been changed in place
        with KeyedRandomness(random.fold_in(KEYS[k], 6)):
            expected = several(k, sizes[k])
        with draws.alone(k) as alone:
            assert torch.equal(several(k, sizes[k]), expected)
        with alone.anew():
            assert torch.equal(several(k, sizes[k]), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_some_of_the_clients_draw_the_same():
    draws, dropout = StepKeys(KEYS)[2], torch.func.vmap(lambda x: F.dropout(x, 0.3), randomness="different")
    with draws.together():
        expected = dropout(torch.ones(5, 4))
    with draws.some(torch.tensor([3, 0])).together():
        assert torch.equal(dropout(torch.ones(2, 4)), expected[[3, 0]])


def test_clients_draw_together_in_one_call_of_the_generator(monkeypatch):
    calls, draw = [], random.bernoulli
    monkeypatch.setattr(random, "bernoulli", lambda key, *rest: calls.append(len(key)) or draw(key, *rest))
    draws = StepKeys(KEYS)[0]
    for k in range(len(KEYS)):
        with draws.alone(k):
            F.dropout(torch.ones(4, 3), 0.3)
    assert calls == [len(KEYS)]
