"""Stacked training equals a plain loop per client, in float64 and up to rounding; what cannot is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.oracles.plain_training import (
    CLOSE,
    OPTIMISERS,
    RAGGED,
    Odd,
    Session,
    check,
    keys,
    net,
    own_rows,
    plain,
    quadratic_of,
    seeded,
    solve,
    stacked_data,
)
from torch import nn
from torch.optim import SGD

from fedtorch import functional, random, tree
from fedtorch.data import BadClients
from fedtorch.federation.solvers.gradient_descent import gradient_descent

pytestmark = pytest.mark.usefixtures("nothing_outside_changes")


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name):
    check(net(), loss=F.cross_entropy, optimizer=OPTIMISERS[name], epochs=3, batch_size=4)


@pytest.mark.parametrize(
    ("optimizer", "options"), [("momentum", {"epochs": 3}), ("adam", {"steps": 7})], ids=["momentum", "adam"]
)
@pytest.mark.parametrize("counts", [(3,), (4,), (3, 4, 5, 8), RAGGED], ids=str)
@pytest.mark.parametrize("batch_size", [4, None])
def test_batches_of_a_data_loader(optimizer, options, counts, batch_size):
    options = {**options, "batch_size": batch_size}
    check(net(), stacked_data(counts), F.cross_entropy, OPTIMISERS[optimizer], **options)


def test_groups_of_parameters_with_their_own_options():
    def optimizer(parameters):
        first, second, *rest = parameters
        return SGD([{"params": [second, first], "lr": 0.3}, {"params": rest, "momentum": 0.8}], lr=0.05)

    check(net(), loss=F.cross_entropy, optimizer=optimizer, epochs=2, batch_size=4)


class Weighted(nn.Module):
    """Class weights: the loss of a batch is not the mean of its examples' losses."""

    def forward(self, output, target):
        return F.cross_entropy(output, target, weight=torch.tensor([1.0, 3.0], dtype=torch.float64))


def summed(output, target):
    return F.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize("loss", [Weighted(), summed], ids=["class_weights", "sum"])
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("zero", [False, True])
def test_losses_that_are_not_means_of_examples(loss, batch_size, zero):
    module = net()
    if zero:  # every example has the same loss at the start
        for p in module.parameters():
            p.data.zero_()
    check(module, loss=loss, optimizer=OPTIMISERS["adam"], epochs=2, batch_size=batch_size)


def test_blocks_seen_later_may_not_split():
    """A first block of one class cannot show that a loss weights classes."""
    local = gradient_descent(net(), loss=Weighted(), optimizer=OPTIMISERS["sgd"], epochs=1, batch_size=4)
    data = stacked_data()
    local.prepare(data._replace(batch=(data.batch[0], torch.zeros_like(data.batch[1]))))
    result = solve(local, data, keys(len(data.count)))
    for k in range(len(data.count)):
        session = Session(net(), OPTIMISERS["sgd"], Weighted())
        parameters, *_ = plain(session, own_rows(data, k), keys(len(data.count))[k], epochs=1, batch_size=4)
        torch.testing.assert_close(tree.map(lambda leaf, k=k: leaf[k], result.parameters), parameters, **CLOSE)


def test_a_loss_that_is_infinite_on_rows_of_zeros():
    """Padding must not reach the gradient, not even as 0 · ∞."""

    def loss(output, target):
        return (output.sum(1) * target.log()).mean()

    x, y = stacked_data().batch
    count = torch.tensor(RAGGED)
    mask = torch.arange(40) < count[:, None]
    data = stacked_data()._replace(batch=(x, torch.where(mask, y + 1.0, 0.0)))
    for batch_size in (4, None):
        result = check(net(), data, loss, OPTIMISERS["sgd"], epochs=1, batch_size=batch_size)
        assert all(leaf.isfinite().all() for leaf in tree.leaves(result.parameters))


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_quadratic_of_the_others(optimizer):
    check(net(), None, F.cross_entropy, OPTIMISERS[optimizer], quadratic_of(net(), 7), epochs=2, batch_size=4)


def test_projection():
    def project(tensors):
        return {name: value.clamp(-0.2, 0.2) for name, value in tensors.items()}

    result = check(net(), None, F.cross_entropy, OPTIMISERS["momentum"], epochs=2, batch_size=4, project=project)
    assert max(float(leaf.abs().max()) for leaf in tree.leaves(result.parameters)) == 0.2


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_tied_frozen_unused_and_scalar_parameters(optimizer, pulled, batched):
    module = seeded(Odd)
    quadratic = quadratic_of(module, 7) if pulled else None
    result = check(
        module, None, F.cross_entropy, OPTIMISERS[optimizer], quadratic, epochs=2, batch_size=4, batched=batched
    )
    assert result.parameters.keys() == {"first.weight", "first.bias", "second.bias", "unused", "scale"}


def test_gradients_by_finite_differences():
    """One step of SGD with rate 1 is the gradient; central differences of the loss have an error O(h²)."""
    module, data = net(), stacked_data((3, 6))
    unit = lambda p: SGD(p, lr=1.0)
    local = gradient_descent(module, steps=1, loss=F.cross_entropy, optimizer=unit)
    slope = {n: p - q for (n, p), q in zip(local.parameters.items(), solve(local, data, keys(2)).parameters.values())}
    direction = {n: random.normal(random.key(8), p.shape, p.dtype) for n, p in local.parameters.items()}
    value = lambda h, k: F.cross_entropy(
        functional.load(module, tree.add_scaled(local.parameters, direction, h))(own_rows(data, k)[0]),
        own_rows(data, k)[1],
    )
    for k in range(2):
        inner = sum((slope[n][k] * direction[n]).sum() for n in direction)
        errors = [float(abs((value(h, k) - value(-h, k)).detach() / (2 * h) - inner)) for h in (2e-2, 1e-2)]
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_gradient_flow_is_reached_at_first_order():
    """Twice the steps of half the rate halve the distance to the gradient flow."""
    data, key = stacked_data((6, 9)), keys(2)
    end = lambda steps: solve(
        gradient_descent(net(), steps=steps, loss=F.cross_entropy, optimizer=lambda p: SGD(p, lr=1.0 / steps)),
        data,
        key,
    ).parameters["0.weight"]
    coarse, middle, fine = end(20), end(40), end(80)
    assert float((coarse - middle).norm() / (middle - fine).norm()) == pytest.approx(2, rel=0.05)


def test_float32_agrees_to_its_rounding():
    module, data = (
        net().float(),
        tree.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, stacked_data()),
    )
    quadratic = quadratic_of(module, 7)
    local = gradient_descent(module, epochs=1, batch_size=4, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"])
    result = solve(local, data, keys(7), quadratic)
    double = solve(
        gradient_descent(net(), epochs=1, batch_size=4, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"]),
        stacked_data(),
        keys(7),
        quadratic,
    )
    assert result.parameters["0.weight"].dtype == torch.float32
    torch.testing.assert_close(tree.to(result.parameters, torch.float64), double.parameters, rtol=1e-4, atol=1e-5)


def plain_solver(**options):
    return gradient_descent(net(), **{"loss": F.cross_entropy, "optimizer": OPTIMISERS["sgd"], "epochs": 1, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "either epochs= or steps=, but got epochs=1 and steps=3"),
        ({"epochs": None}, "either epochs= or steps="),
        ({"epochs": 0}, "epochs to be a whole number of at least 1, but got 0"),
        ({"epochs": 1.5}, "epochs to be a whole number"),
        ({"epochs": None, "steps": -1}, "steps to be a whole number of at least 1, but got -1"),
        ({"batch_size": 0}, "batch_size to be a whole number of at least 1, but got 0"),
        ({"reset": "always"}, "reset='round' or reset='never', but got 'always'"),
        ({"buffers": "ignore"}, "buffers='refuse', 'local' or 'average', but got 'ignore'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        plain_solver(**options)


def test_no_trainable_parameters():
    with pytest.raises(ValueError, match="Sequential to have trainable parameters, but it has none"):
        gradient_descent(net().requires_grad_(False), epochs=1, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"])


def test_clients_without_rows():
    data = stacked_data((3, 2))._replace(count=torch.tensor([3, 0]))
    with pytest.raises(BadClients, match="at least one row") as caught:
        plain_solver().prepare(data)
    assert caught.value.rows == [1]
