"""A client's training does not depend on who trains beside it, nor on how steps are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.oracles.plain_training import (
    CLOSE,
    FORMS,
    OPTIMISERS,
    Noisy,
    NoMetrics,
    Odd,
    check,
    keys,
    lit,
    net,
    quadratic_of,
    seeded,
    solve,
    stacked_data,
    with_norm,
)
from torch import nn

from fedtorch import tree
from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.federation.turn import Turn

pytestmark = pytest.mark.usefixtures("nothing_outside_changes")


class SharedNoise(NoMetrics):
    """One draw for all examples of a batch: they cannot be computed one by one."""

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x + 0.1 * torch.randn(3, dtype=x.dtype)), y)


class Layers(nn.Module):
    """Two recurrent layers, whose masks between them have time in front."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(1, 4, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64)
        self.out = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        return self.out(self.rnn(x.unsqueeze(-1))[0][:, -1])


class Recurrent(NoMetrics):
    """A recurrent network on a row's features as a sequence."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.net = seeded(Layers)


@pytest.mark.parametrize("kind", [NoMetrics, Noisy, SharedNoise, Recurrent])
@pytest.mark.parametrize("batched", [True, False])
def test_company_does_not_matter(kind, batched):
    """Draws are the same bits; sums over padded rows and stacked products are in another order, hence rounding."""
    data, key = stacked_data(), keys(7)
    local = gradient_descent(lit(kind=kind), epochs=2, batch_size=4, batched=batched)
    together = solve(gradient_descent(lit(kind=kind), epochs=2, batch_size=4), data, key)
    for cohort in ([5], [6, 3, 0], [0, 1, 2, 3, 4, 5, 6]):
        at = torch.tensor(cohort)
        part = solve(local, tree.take(data, at), key[at])
        torch.testing.assert_close(part, tree.take(together, at), **CLOSE)


def test_permuting_the_clients():
    data, key = stacked_data(), keys(7)
    local = gradient_descent(lit(), epochs=2, batch_size=4)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    permuted = solve(local, tree.take(data, order), key[order])
    torch.testing.assert_close(permuted, tree.take(solve(local, data, key), order), **CLOSE)


def test_draws_differ_between_steps_and_clients():
    data = stacked_data((8, 8))
    same = tree.map(lambda leaf: leaf[:1].expand(2, *leaf.shape[1:]).clone(), data)
    result = solve(gradient_descent(lit(kind=Noisy), epochs=1), same, keys(2))
    assert not torch.equal(result.parameters["net.0.weight"][0], result.parameters["net.0.weight"][1])


@pytest.mark.parametrize("reset", ["round", "never"])
@pytest.mark.parametrize("buffers", ["local", "average"])
@pytest.mark.parametrize("batched", [True, False])
def test_no_clients(reset, buffers, batched):
    local = gradient_descent(
        with_norm(),
        loss=F.cross_entropy,
        optimizer=OPTIMISERS["adam"],
        epochs=1,
        reset=reset,
        buffers=buffers,
        batched=batched,
    )
    result = solve(local, tree.take(stacked_data(), slice(0, 0)), keys(0))
    some = solve(local, stacked_data((4, 5)), keys(2))
    shapes = lambda found: tree.map(lambda leaf: leaf[:0], (found.parameters, found.state, found.lr_sum))
    torch.testing.assert_close(shapes(result), shapes(some), rtol=0, atol=0)


class Recurrent(nn.Module):
    """What vmap cannot do: an LSTM, `.item()`, boolean masks."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        state = self.cell(x[:, None])[0][:, 0]
        keep = state[:, 0] > state.mean().item()
        return self.head(torch.cat([state[keep], state[~keep]]))


def test_modules_that_vmap_cannot_run():
    module = seeded(Recurrent)
    check(
        module,
        None,
        F.cross_entropy,
        OPTIMISERS["adam"],
        quadratic_of(module, 7),
        epochs=2,
        batch_size=4,
        batched=False,
    )
    alone, automatic = (
        solve(
            gradient_descent(module, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"], epochs=1, batched=batched),
            stacked_data(),
            keys(7),
        )
        for batched in (False, "auto")
    )
    torch.testing.assert_close(automatic, alone, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"Recurrent cannot run on stacked clients.*\n.*batched=False"):
        solve(
            gradient_descent(module, loss=F.cross_entropy, optimizer=OPTIMISERS["sgd"], epochs=1, batched=True),
            stacked_data(),
            keys(7),
        )


@pytest.mark.parametrize("module", [net(), seeded(Odd)], ids=["net", "odd"])
def test_compiled_steps(module):
    check(
        module, None, F.cross_entropy, OPTIMISERS["adam"], quadratic_of(module, 7), epochs=3, batch_size=4, compile=True
    )


def test_compiled_steps_of_a_lightning_module():
    check(lit(FORMS["warm_up"], kind=NoMetrics), epochs=3, batch_size=4, compile=True)
    solve(gradient_descent(lit(), epochs=1, batch_size=4, compile=True), stacked_data(), keys(7))


def test_compile_leaves_random_and_buffered_modules_untraced():
    data, key = stacked_data(), keys(7)
    plainly, compiled = (
        solve(gradient_descent(lit(kind=Noisy), epochs=2, batch_size=4, compile=c), data, key) for c in (False, True)
    )
    torch.testing.assert_close(compiled, plainly, rtol=0, atol=0)
    check(
        with_norm(),
        stacked_data((4, 6)),
        F.cross_entropy,
        OPTIMISERS["sgd"],
        buffers="local",
        epochs=2,
        batch_size=4,
        compile=True,
    )


def test_grad_and_inference_modes_outside():
    local, data, key = gradient_descent(lit(), epochs=1, batch_size=4), stacked_data(), keys(7)
    expected = solve(local, data, key)
    with torch.no_grad():
        torch.testing.assert_close(solve(local, data, key), expected, rtol=0, atol=0)
    with torch.inference_mode():
        start = tree.map(torch.clone, tree.expand(local.parameters, 7))
        inputs = tree.map(torch.clone, data)
        with torch.inference_mode(False):
            torch.testing.assert_close(solve(local, data, key, start=start), expected, rtol=0, atol=0)
            fresh = gradient_descent(lit(), epochs=1, batch_size=4)
            torch.testing.assert_close(solve(fresh, inputs, key.clone(), start=start), expected, rtol=0, atol=0)
    assert not any(leaf.requires_grad for leaf in tree.leaves(expected))


def test_clients_share_the_steps_in_which_their_batches_have_the_same_shapes():
    """A step is one call of the loss for every size of a batch, or for each of one or two clients."""
    calls = []

    def loss(output, target):
        calls.append(len(output))
        return F.cross_entropy(output, target)

    local = gradient_descent(net(), loss=loss, optimizer=OPTIMISERS["adam"], epochs=1, batch_size=4)
    data = stacked_data((8, 8, 8, 8, 6, 6, 6, 5))
    key = keys(8)
    start, state = tree.expand((local.parameters, local.init(local.parameters)), 8)
    prepared = local.prepare(data)
    for _ in range(2):
        calls.clear()
        local.solve(start, state, prepared, None, Turn(key, 0))
    assert sorted(calls) == [1, 2, 4, 4]


@pytest.mark.parametrize("kind", [NoMetrics, Noisy])
def test_one_by_one_gives_the_same_bits_in_any_company(kind):
    """The same operations on the same shapes, client by client; the optimiser's are elementwise."""
    data, key = stacked_data(), keys(7)
    local = gradient_descent(lit(kind=kind), epochs=2, batch_size=4, batched=False)
    together = solve(local, data, key)
    for cohort in ([0], [5], [6, 3, 0]):
        at = torch.tensor(cohort)
        part = solve(local, tree.take(data, at), key[at])
        torch.testing.assert_close(part.parameters, tree.take(together.parameters, at), rtol=0, atol=0)
