"""Messages between parties give the numbers of one graph, and what they cost."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance
from support.verticals import (
    APART,
    DRAWS,
    GUIDES,
    KEY,
    MODELS,
    ROWS,
    STEPS,
    gathered,
    nodes,
    noises,
    some_model,
    some_parameters,
)

from fedtorch import random, tree, vfl, wire
from fedtorch.protocol.halves import Half, Receive, Send, Traffic, together
from fedtorch.vfl.fit.bound import bound
from fedtorch.vfl.fit.guide import Noise, draw_noise
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.nodes.iteration import bounded_delay, exchange, server_half
from fedtorch.vfl.nodes.node import Gradient, Iteration, Share, Value


def in_one_graph(
    model: vfl.VerticalModel,
    guide: vfl.Guide,
    q: vfl.Parameters,
    data: vfl.VerticalData,
    given: list[Noise],
    minibatches: list[torch.Tensor] | None = None,
) -> vfl.Parameters:
    """What `sfvi` does, with the noise given."""
    leaf = lambda value: value.detach().clone().requires_grad_()
    q = tree.map(leaf, q)
    optimizer = torch.optim.Adam(tree.leaves(q), lr=0.05)
    batch = prepared(model, data)
    for t, noise in enumerate(given):
        here = batch if minibatches is None else batch.take(minibatches[t])
        value = bound(model, guide, q, here, noise).sum() / DRAWS
        gradients = torch.autograd.grad(value, tree.leaves(q), allow_unused=True)
        for parameter, gradient in zip(tree.leaves(q), gradients):
            parameter.grad = None if gradient is None else -gradient
        optimizer.step()
    return tree.map(torch.detach, q)


@pytest.mark.parametrize("sticking", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["y shared", "y at the server"])
@pytest.mark.parametrize("guide", APART)
@pytest.mark.parametrize("name", MODELS)
def test_messages_give_the_numbers_of_one_graph(name: str, guide: str, shared: bool, sticking: bool) -> None:
    family = dataclasses.replace(GUIDES[guide](), sticking=sticking)
    model, data = some_model(name, "negative binomial")
    data = data._replace(weight=0.5 + random.uniform(KEY, (2, ROWS), torch.float64))
    if name == "power":
        model = dataclasses.replace(model, concentration=0.3)
    q = some_parameters(model, family, data)
    needs = family.auxiliary.sees_response or (name == "power" and family.auxiliary.party is not None)
    if needs and not shared:
        with pytest.raises(ValueError, match="Expected the response at the party"):
            nodes(model, family, q, data, shared)
        return
    for minibatches in (None, [torch.tensor([t, 11 - t, 4]) for t in range(STEPS)]):
        given = noises(model, family, ROWS if minibatches is None else 3)
        server, parties = nodes(model, family, q, data, shared)
        for t, noise in enumerate(given):
            exchange(server, parties, Iteration(noise, 0.05, None if minibatches is None else minibatches[t]))
        expected = in_one_graph(model, family, q, data, given, minibatches)
        # Adam's first steps divide a gradient by its own size, which magnifies rounding where it is small.
        found = gathered(server, parties)
        assert distance(found, expected) < 1e3 * ROUNDING


def test_power_model_messages_are_sums_over_other_parties() -> None:
    """Each hears the sum of the others' gradients, of 1 and of 2 in every row."""
    model, data = some_model("power", "bernoulli", [2, 3])
    family = GUIDES["mean field"]()
    server, _ = nodes(model, family, some_parameters(model, family, data), data, True)
    rows = torch.ones(2, DRAWS, 1, ROWS, dtype=torch.float64)

    def party(answer: float) -> Half:
        yield Send(0, Value(rows))
        share = yield Receive(0, Share(rows, rows.new_zeros(2, DRAWS, 0), None))
        yield Send(0, share._replace(predictor=answer * rows))
        return (yield Receive(0, Gradient(rows))).gradient

    halves = {0: server_half(server, [Iteration(noises(model, family, ROWS)[0])]), 1: party(1.0), 2: party(2.0)}
    found = together(halves)[0]
    assert torch.equal(found[1], 2 * rows)
    assert torch.equal(found[2], rows)


def test_bytes_of_an_iteration() -> None:
    """Every message is B·M·C·n numbers and a header of safetensors."""
    numbers = 8 * 2 * DRAWS * ROWS  # float64, B = 2

    def traffic(name: str, guide: str, shared: bool) -> Traffic:
        model, data = some_model(name, "bernoulli")
        family = GUIDES[guide]()
        server, parties = nodes(model, family, some_parameters(model, family, data), data, shared)
        return exchange(server, parties, Iteration(noises(model, family, ROWS)[0], 0.1))

    value = Value(torch.zeros(2, DRAWS, 1, ROWS, dtype=torch.float64))
    gradient = Gradient(*value)
    share = Share(value.value, torch.zeros(2, DRAWS, 0, dtype=torch.float64), None)
    up, down, both = (len(wire.encode(message)) for message in (value, gradient, share))
    assert traffic("augmented", "amortised", False) == (3 * up, 3 * down)
    assert traffic("augmented", "sums", False) == (3 * up, 3 * down)
    assert traffic("augmented", "amortised", True) == (3 * up, 3 * both)
    assert traffic("power", "mean field", True) == (3 * (up + both), 3 * (both + down))
    assert traffic("power", "sums", False) == (3 * up, 3 * down)
    assert max(up, down, both) < numbers + 300


@pytest.mark.parametrize(("name", "guide", "shared"), [
    ("augmented", "amortised", False), ("augmented", "amortised", True), ("augmented", "sums", False),
    ("power", "amortised, y seen", True),
])  # fmt: skip
def test_local_steps_save_exchanges(name: str, guide: str, shared: bool) -> None:
    """Three local steps reach a higher bound than one, in as many exchanges, and use the same draws."""
    model, data = some_model(name, "bernoulli")
    family = GUIDES[guide]()
    q = tree.map(lambda leaf: 0.3 * leaf, some_parameters(model, family, data))
    reached = []
    for local_steps in (1, 3):
        server, parties = nodes(model, family, q, data, shared)
        for noise in noises(model, family, ROWS, 15):
            exchange(server, parties, Iteration(noise, 0.01), local_steps=local_steps)
        end, fresh = (
            gathered(server, parties),
            draw_noise(model, family, KEY.reshape(1), ROWS, 200, torch.float64),
        )
        reached.append(bound(model, family, end, prepared(model, data), fresh).mean(1))
    assert (reached[1] > reached[0] + 0.2).all()


def test_with_the_response_shared_a_local_step_is_exact() -> None:
    """The second step's gradient is that of the bound with the others' z held at what they told."""
    model, data = some_model("augmented", "bernoulli")
    family = GUIDES["amortised"]()
    q = some_parameters(model, family, data)
    noise = noises(model, family, ROWS)[0]
    server, parties = nodes(model, family, q, data, True)
    exchange(server, parties, Iteration(noise, 0.05), local_steps=2)
    leaf = lambda value: value.detach().clone().requires_grad_()
    mixed, held = tree.map(leaf, q), tree.map(leaf, q)
    optimizer = torch.optim.Adam(tree.leaves(mixed.parties[0]), lr=0.05)
    for _ in range(2):  # party 0 moves twice, the others and the server stay
        here = mixed._replace(server=held.server, parties=(mixed.parties[0], *held.parties[1:]))
        value = bound(model, family, here, prepared(model, data), noise).sum() / DRAWS
        for parameter, gradient in zip(
            tree.leaves(mixed.parties[0]), torch.autograd.grad(value, tree.leaves(mixed.parties[0]))
        ):
            parameter.grad = -gradient
        optimizer.step()
    assert distance(tree.map(torch.detach, parties[0].q), tree.map(torch.detach, mixed.parties[0])) < 1e3 * ROUNDING


@pytest.mark.parametrize(("name", "guide", "shared"), [
    ("augmented", "sums", False), pytest.param("augmented", "mean field", True, marks=pytest.mark.slow),
    ("power", "amortised, y seen", True),
])  # fmt: skip
def test_server_uses_last_values_of_idle_parties(name: str, guide: str, shared: bool) -> None:
    """Nobody is away for longer than the delay, idle ones send nothing, and the bound still rises to where it was."""
    model, data = some_model(name, "bernoulli")
    family = GUIDES[guide]()
    q = tree.map(lambda leaf: 0.3 * leaf, some_parameters(model, family, data))
    fresh = draw_noise(model, family, KEY.reshape(1), ROWS, 200, torch.float64)
    reached = []
    for delay in (0, 2):
        server, parties = nodes(model, family, q, data, shared)
        schedule = itertools.islice(bounded_delay(3, delay, 0.5, KEY), 40)
        for noise, active in zip(noises(model, family, ROWS, 40), schedule):
            before = [tree.map(torch.clone, tree.map(torch.detach, party.q)) for party in parties]
            traffic = exchange(server, parties, Iteration(noise, 0.03, active=active))
            assert (traffic.up == 0) == (not any(active))
            assert all(
                here or distance(old, tree.map(torch.detach, p.q)) == 0 for old, p, here in zip(before, parties, active)
            )
        end = gathered(server, parties)
        reached.append(bound(model, family, end, prepared(model, data), fresh).mean(1))
    start = bound(model, family, q, prepared(model, data), fresh).mean(1)
    assert ((reached[1] - start) > 0.8 * (reached[0] - start)).all()


def test_bounded_delay_limits_idle_iterations() -> None:
    present = torch.tensor(list(itertools.islice(bounded_delay(4, 3, 0.2, KEY), 200)))
    assert present[0].all()
    runs = [max((len(list(run)) for here, run in itertools.groupby(row) if not here), default=0) for row in present.T]
    assert runs == [3, 3, 3, 3]
    assert 0.25 < present.double().mean() < 0.5


def test_refusals() -> None:
    model, data = some_model("augmented", "bernoulli")
    for guide in GUIDES.keys() - APART.keys():
        family = GUIDES[guide]()
        with pytest.raises(ValueError, match=r"got a joint one; fit it in one graph by fedtorch\.vfl\.sfvi"):
            nodes(model, family, some_parameters(model, family, data), data, False)
    family = GUIDES["amortised"]()
    server, parties = nodes(model, family, some_parameters(model, family, data), data, False)
    with pytest.raises(ValueError, match="all parties in the first iteration"):
        exchange(server, parties, Iteration(noises(model, family, ROWS)[0], 0.1, active=[True, True, False]))
    for arguments in ((-1, 0.5), (1, 1.5)):
        with pytest.raises(ValueError, match="delay ≥ 0 and a probability"):
            next(bounded_delay(2, *arguments, KEY))


@pytest.mark.parametrize("guide", ["mean field", "sums"])
def test_each_node_saves_and_loads_its_own_part(guide: str, tmp_path: Path) -> None:
    model, data = some_model("power", "negative binomial")
    family = GUIDES[guide]()
    ours, others = (parts(model, family, some_parameters(model, family, data)) for _ in range(2))
    for part in others:
        for value in part.parameters():
            value.data.zero_()
    for one, other in zip(ours, others):
        one.save(tmp_path / f"{one.name}.safetensors")
        other.load(tmp_path / f"{one.name}.safetensors")
        assert distance(tree.map(torch.detach, one.q), tree.map(torch.detach, other.q)) == 0
    with pytest.raises(ValueError, match="Expected parameters of party 'party 1', but got those of 'server'"):
        others[2].load(tmp_path / "server.safetensors")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_part_keeps_its_old_file_until_the_new_one_is_whole(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = some_model("power", "negative binomial")
    family = GUIDES["mean field"]()
    server, file = parts(model, family, some_parameters(model, family, data))[0], tmp_path / "server.safetensors"
    server.save(file)
    good = file.read_bytes()

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, step, stop)
        with pytest.raises(KeyboardInterrupt):
            server.save(file)
    assert file.read_bytes() == good
    assert list(tmp_path.iterdir()) == [file]
    for damaged in (b"", good[:40], good[:-3], b"x" * 100):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Expected a safetensors file in .*server\.safetensors"):
            server.load(file)


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 2])])
def test_non_finite_values_are_named_before_any_step(rows: torch.Tensor | None) -> None:
    """A bottom network that divides by a feature: the party and the row, as everybody numbers it."""

    class Inverse(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(1 / x)

    x = torch.ones(6, 2).double()
    x[2, 1] = 0.0
    data = vfl.VerticalData((x[:, :1], x[:, 1:]), x[:, 1])
    bottoms = [torch.nn.Linear(1, 1, dtype=torch.float64), Inverse(1, 1, dtype=torch.float64)]
    network = vfl.SplitNetwork(bottoms, vfl.likelihoods.bernoulli())
    server, holders = network.nodes(data)
    before = [leaf.clone() for leaf in network.parameters()]
    with pytest.raises(ValueError, match="values of party 'number 2', but got NaN or Inf for aligned row 2 in step 0"):
        exchange(server, holders, Iteration(rows=rows))
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters()))


def test_halves_that_do_not_fit_are_named() -> None:
    def waiting(other: int) -> Half:
        yield Receive(other, torch.zeros(1))

    with pytest.raises(RuntimeError, match=r"Expected messages for \[0, 1\], but got none"):
        together({0: waiting(1), 1: waiting(0)})
