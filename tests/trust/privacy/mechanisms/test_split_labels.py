"""Labels of split networks that are private: what one label can change, the size of the noise, and what is refused."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.verticals import logistic_data

from fedtorch import vfl
from fedtorch.protocol.halves import together
from fedtorch.sites import Hub
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Link
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.trust import privacy
from fedtorch.trust.privacy.mechanisms.split_labels import PrivateLabels
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration


def network(**arguments) -> vfl.SplitNetwork:
    bottoms = [mlp(width, [], 1).double() for width in (3, 2)]
    return vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), seed=[0, 1], **arguments).double()


def trained(data: vfl.VerticalData, noise: float, steps: int = 4) -> vfl.SplitNetwork:
    model = network()
    server, parties = model.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    iterations = [Iteration(step=step) for step in range(steps)]
    half = server_half(server, iterations)
    if noise:
        half = private(clip=2.0, noise=noise)(server, half)
    together({0: half, **{p.index: party_half(p, iterations) for p in parties}})
    return model


def private(clip: float = 1.0, noise: float = 1.0, **settings: Any) -> PrivateLabels:
    return privacy.noised_gradients(clip, noise, **{"delta": 1e-5, "entropy": privacy.from_seed(0), **settings})


def test_sensitivity_to_one_label() -> None:
    """Gradients of norm up to C, all elements of the batch together, so 2C; those within stay as they are."""
    gradient = torch.randn(2, 3, 2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient[..., 0] *= 1e-3
    released = private(noise=1e-9).release(gradient)
    assert float(released.flatten(0, 2).norm(dim=0).max()) <= 1 + 1e-6
    assert torch.allclose(released[..., 0], gradient[..., 0], atol=1e-7)
    gradient[0, 0, 0, 1] = math.nan
    assert float(private(noise=1e-9).release(gradient)[..., 1].abs().max()) < 1e-6


def test_the_size_of_the_noise() -> None:
    """σ = 2Cz; an sd of m numbers is known to 1/√(2m)."""
    zeros, labels = torch.zeros(1, 1, 1, 40_000, dtype=torch.float64), private(clip=0.5, noise=3.0)
    released = labels.release(zeros)
    assert float(released.std()) == pytest.approx(2 * 0.5 * 3.0, rel=4 / math.sqrt(80_000))
    assert not bool((labels.release(zeros) == released).any())  # another release has other noise, of the same seed, too
    assert torch.equal(private(clip=0.5, noise=3.0).release(zeros), released)


def test_training_goes_on_with_private_labels() -> None:
    """With hardly any noise the network is that of no noise; with some it still learns."""
    data = logistic_data([3, 2], 4000)
    plain, quiet, noisy = trained(data, 0.0, 30), trained(data, 1e-9, 30), trained(data, 1.0, 30)
    for ours, theirs in zip(quiet.parameters(), plain.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-6)
    scores = [float(model.log_score(data).mean()) for model in (plain, noisy, network())]
    assert scores[1] > 0.5 * (scores[0] + scores[2])


def test_all_parties_receive_the_same_gradients() -> None:
    """Otherwise two of them would know more than one."""
    data = logistic_data([3, 2], 50)
    model = network()
    start = copy.deepcopy(model)
    server, parties = model.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    half = private(noise=5.0)(server, server_half(server, [Iteration()]))
    together({0: half, **{p.index: party_half(p, [Iteration()]) for p in parties}})
    biases = [
        dict(after.named_parameters())[name] - dict(before.named_parameters())[name]
        for after, before in zip(model.parties, start.parties)
        for name in dict(after.named_parameters())
        if name.endswith("weights.1")
    ]
    assert len(biases) == 2
    assert torch.allclose(biases[0], biases[1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bayes": vfl.HierarchicalBayes(rho=1.0)}, "learns nothing"),
        ({"combine": vfl.concatenated, "top": mlp(2, [3], 1).double(), "widths": [1, 1]}, "learns nothing"),
    ],
)
def test_servers_that_learn_are_refused(arguments: dict, said: str) -> None:
    server, _ = network(**arguments).nodes(logistic_data([3, 2], 10))
    with pytest.raises(ValueError, match=said):
        private()(server, server_half(server, []))


def test_settings_out_of_range_and_shared_labels_are_refused() -> None:
    server, _ = network().nodes(logistic_data([3, 2], 10))
    for clip, noise, said in ((0.0, 1.0, "positive finite clip"), (1.0, 0.0, "positive finite noise")):
        with pytest.raises(ValueError, match=said):
            private(clip, noise)
    with pytest.raises(ValueError, match=r"delta below one over the 10 rows, but got 0\.1"):
        private(delta=0.1)(server, server_half(server, []))
    server.response_shared = True
    with pytest.raises(ValueError, match="labels that stay at the server"):
        private()(server, server_half(server, []))


def test_a_minibatch_with_a_row_twice_is_refused() -> None:
    """Its label would change two gradients, each by 2C."""
    for rows in (torch.tensor([3, 1]), torch.tensor([3, 3])):
        server, parties = network().nodes(logistic_data([3, 2], 10))
        steps, labels = [Iteration(rows=rows)], private()
        halves = {0: labels(server, server_half(server, steps)), **{p.index: party_half(p, steps) for p in parties}}
        if len(rows.unique()) == 2:
            together(halves)
        else:
            with pytest.raises(ValueError, match="distinct rows, but got 2 of which 1 differ"):
                together(halves)
        assert labels.ledger.entries == len(rows.unique()) - 1


class Cut(NamedTuple):
    """A link that breaks at a frame that it is about to hand out, the last of as many as `left` says."""

    link: Link
    left: list[int]

    def send(self, frame: bytes) -> None:
        self.link.send(frame)

    def receive(self, seconds: float) -> bytes:
        frame = self.link.receive(seconds)
        self.left[0] -= 1
        if self.left[0] == 0:
            self.link.close()
            raise ConnectionResetError("struck")
        return frame

    def close(self) -> None:
        self.link.close()


def over_streams(labels: PrivateLabels, left: int = 0) -> None:
    """Four steps between organisations, in blocks of two, which can be done again."""
    data, hub, names = logistic_data([3, 2], 10), Hub(), ["clinic", "laboratory"]
    server, parties = network().nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    steps = [Iteration(step=step) for step in range(4)]
    guarded = lambda some: labels(server, server_half(server, some))
    with ThreadPoolExecutor(2) as pool:
        futures = []
        for party, name, frames in zip(parties, names, ([0], [left])):
            half = lambda journal, party=party: journal.through(partial(party_half, party), party, steps, every=2)
            dial = lambda name=name, frames=frames: Cut(memory.link(hub, name), frames)
            futures.append(pool.submit(over_link, half, dial, seconds=20, timeout=20))
        over_hub(lambda journal: journal.through(guarded, server, steps, every=2), hub, names, seconds=20, timeout=20)
        for future in futures:
            future.result(20)


def test_steps_that_are_done_again_and_further_runs_add_up(tmp_path: Path) -> None:
    """A line that breaks at the second gradient, after which both steps are done again; then a run more."""
    ledger = tmp_path / "labels.jsonl"
    labels = private(noise=4.0, ledger=ledger)
    over_streams(labels, left=4)  # of which two frames name the run and the point
    assert labels.ledger.entries == 2 + 4
    over_streams(private(noise=4.0, ledger=ledger))
    last = private(noise=4.0, ledger=ledger)
    assert last.ledger.entries == 10
    assert last.ledger.epsilon == pytest.approx(privacy.epsilon(noise=4.0, rounds=10, delta=1e-5), rel=1e-9)
    assert repr(last) == f"noised_gradients(clip=1, noise=4, epsilon={last.ledger.epsilon:.4g} at delta=1e-05)"
    budget = privacy.epsilon(noise=4.0, rounds=12, delta=1e-5) * (1 + 1e-9)
    with pytest.raises(RuntimeError, match="above the budget of"):
        over_streams(private(noise=4.0, ledger=ledger, budget=budget))
    assert private(noise=4.0, ledger=ledger).ledger.entries == 12
