"""The cross-entropy of clients under `torch.vmap`: losses and gradients are those of each alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedtorch import random
from fedtorch.captured import capture
from fedtorch.dispatch import compiled


def rows(dtype=torch.float64, shape=(3, 5, 4)):
    logits = 3 * random.normal(random.key(0), shape, dtype)
    return logits.requires_grad_(), random.randint(random.key(1), shape[-1], shape[:-1])


def compared(loss, logits, labels, **tolerance):
    together, alone = vmap(loss)(logits, labels), torch.stack(list(map(loss, logits, labels)))
    weights = random.normal(random.key(2), alone.shape, torch.float64).to(alone.dtype)
    gradients = [torch.autograd.grad((losses * weights).sum(), logits)[0] for losses in (together, alone)]
    torch.testing.assert_close((together, gradients[0]), (alone, gradients[1]), **tolerance)
    return together


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 1, 1), (2, 7, 130), (3, 40, 10)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_and_gradients(reduction, shape, dtype, programs):
    loss = lambda logits, labels: F.cross_entropy(logits, labels, reduction=reduction)
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-6}
    compared(loss, *rows(dtype, shape), **tolerance)


def test_rows_that_do_not_count(programs):
    logits, labels = rows()
    labels[0, :2], labels[1] = -100, -100
    compared(F.cross_entropy, logits, labels, equal_nan=True)
    compared(lambda x, y: F.cross_entropy(x, y, reduction="sum"), logits, labels)
    compared(lambda x, y: F.cross_entropy(x, y, ignore_index=2), *rows())


def test_large_logits_and_infinite_ones(programs):
    logits, labels = rows(torch.float32)
    with torch.no_grad():
        logits[0] *= 1e4
        logits[1, 0, (labels[1, 0] + 1) % 4] = -torch.inf
    compared(F.cross_entropy, logits, labels)
    with torch.no_grad():
        logits[2, 1, 0] = torch.nan
    assert vmap(F.cross_entropy)(logits, labels).isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x, y, weight=torch.arange(1.0, 5.0, dtype=torch.float64)),
        lambda x, y: F.cross_entropy(x[0], y[0]),
        lambda x, y: F.cross_entropy(x.T[None], y[None]),
        lambda x, y: F.cross_entropy(x, F.one_hot(y, 4).double()),
        lambda x, y: vmap(lambda row, label: F.cross_entropy(row[None], label[None]))(x, y),
    ],
)
def test_other_losses_are_evaluated_by_their_parts(loss, programs):
    compared(loss, *rows())


def test_labels_of_all_clients_and_labels_that_are_no_classes(programs):
    logits, labels = rows()
    shared = vmap(F.cross_entropy, in_dims=(0, None))(logits, labels[0])
    torch.testing.assert_close(shared, torch.stack([F.cross_entropy(each, labels[0]) for each in logits]))
    labels[2, 3] = 4
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        vmap(F.cross_entropy)(logits, labels)


def test_second_gradients_functional_ones_and_captured_steps(programs):
    logits, labels = rows()
    labels[0, 0] = -100
    for loss in (F.cross_entropy, lambda x, y: F.cross_entropy(x, y, reduction="sum")):
        assert torch.autograd.gradgradcheck(lambda x, loss=loss: vmap(loss)(x, labels), logits)
    expected = torch.autograd.grad(vmap(F.cross_entropy)(logits, labels).sum(), logits)[0]
    torch.testing.assert_close(vmap(grad(F.cross_entropy))(logits, labels), expected)
    step = lambda index, x, y: torch.autograd.grad(vmap(F.cross_entropy)(x.requires_grad_(), y).sum(), x)[0]
    torch.testing.assert_close(capture(step, 2 * logits.detach(), labels)(logits.detach(), labels), expected)


def test_threads_share_the_clients(monkeypatch):
    logits, labels = rows(torch.float32)
    alone = vmap(F.cross_entropy)(logits, labels)
    monkeypatch.setattr(compiled, "ENOUGH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(vmap(F.cross_entropy)(logits, labels), alone)
