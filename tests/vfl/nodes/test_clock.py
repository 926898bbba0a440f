"""A server that goes on by the clock: what it knows and when, no bias where nothing is drawn, and resumed runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import splits
from support.oracles.closed_forms import ROUNDING
from support.verticals import KEY, gaussian_data, predictors

from fedtorch import vfl
from fedtorch.vfl.fit.guide import initial
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.predictors import flat_prior

WIDTHS = [2, 1]


def slow(party: int, number: int) -> int:
    """The second party is late by three or five ticks, the first by none."""
    return (3, 5)[number % 2] if party else 0


def made(delays: object = None, rate: float = 0.05, power: bool = False) -> vfl.NodesRun:
    """A variational fit among nodes."""
    build = vfl.power if power else vfl.augmented
    model = build(likelihoods.gaussian(0.8), predictors(WIDTHS), 0.7)
    guide = vfl.Guide(vfl.amortised(sees_response=power))
    data = gaussian_data(WIDTHS, 30)
    server, *holders = parts(model, guide, initial(model, guide, 30, 1, KEY, torch.float64), key=KEY)
    sgd = lambda leaves: torch.optim.SGD(leaves, lr=rate / 30)
    known = data.known_to_parties(response=power)
    nodes = [vfl.PartyNode(p, rows, optimizer=sgd) for p, rows in zip(holders, known)]
    return vfl.NodesRun(vfl.ServerNode(server, data.known_to_server(), optimizer=sgd), nodes, delays=delays)  # type: ignore[arg-type]


def weights(run: vfl.NodesRun) -> torch.Tensor:
    return torch.cat(
        [leaf.detach().flatten() for node in (run.server, *run.parties) for leaf in node.part.parameters()]
    )


@pytest.mark.parametrize("name", ["dropout", "amortised"])
def test_clock_without_delays_is_synchronous(name: str) -> None:
    models = [splits.CASES[name]() for _ in range(2)]
    runs = [vfl.NodesRun(*model.nodes(splits.data(), splits.SGD)) for model in models[:1]]
    runs.append(vfl.NodesRun(*models[1].nodes(splits.data(), splits.SGD), delays=lambda party, number: 0))
    for run in runs:
        for _ in run.rounds(5):
            pass
    assert torch.equal(*(weights(run) for run in runs))
    assert (runs[0].bytes_up, runs[0].bytes_down) == (runs[1].bytes_up, runs[1].bytes_down)


def test_clock_arrivals_by_tick() -> None:
    run = made(slow)
    heard = [round.ids.tolist() for round in run.rounds(11)]
    assert heard == [[], [], [], [0, 1], [0], [0], [0], [0], [0], [0, 1], [0]]
    assert run.clock is not None
    assert run.clock.numbers.tolist() == [8, 3]  # begun; the first waits for nobody, once there are values of all
    fast, synchronous = made(slow), made()
    for one in (fast, synchronous):
        for _ in one.rounds(9):
            pass
    assert not torch.equal(weights(fast), weights(synchronous))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole, first, second = made(slow), made(slow), made(slow)
    for _ in whole.rounds(12):
        pass
    for _ in first.rounds(6):  # in which the second party waits
        pass
    first.save(tmp_path / "run.safetensors")
    second.load(tmp_path / "run.safetensors")
    for _ in second.rounds(12):
        pass
    assert torch.equal(weights(whole), weights(second))
    assert whole.bytes_up == second.bytes_up


@pytest.mark.slow
def test_clocked_least_squares_reaches_the_pooled_solution() -> None:
    """Nothing is drawn, so that the stationary point is that of all columns in one place."""
    model = vfl.augmented(
        likelihoods.gaussian(1.0), [vfl.linear(w, flat_prior()) for w in WIDTHS], 1.0, intercept=False
    )
    guide, data = vfl.Guide(vfl.noiseless(), vfl.fit.guide.point()), gaussian_data(WIDTHS, 30)
    server, *holders = parts(model, guide, initial(model, guide, 30, 1, KEY, torch.float64), key=KEY)
    sgd = lambda leaves: torch.optim.SGD(leaves, lr=0.4)
    known = data.known_to_parties(response=False)
    nodes = [vfl.PartyNode(p, rows, optimizer=sgd, per_row=True) for p, rows in zip(holders, known)]
    whole = vfl.ServerNode(server, data.known_to_server(), optimizer=sgd, per_row=True)
    run = vfl.NodesRun(whole, nodes, delays=lambda party, number: 3 * party)
    for _ in run.rounds(320):
        pass
    x = torch.cat(data.features, 1)
    torch.testing.assert_close(weights(run), torch.linalg.lstsq(x, data.response).solution, rtol=0, atol=1e4 * ROUNDING)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="one message up and one down"):
        made(slow, power=True)
    with pytest.raises(ValueError, match="at least 0 ticks, but got -1 of 'party 0'"):
        made(lambda party, number: -1).step()
    run = made()
    with pytest.raises(ValueError, match="delays= or iteration="):
        vfl.NodesRun(run.server, run.parties, iteration=lambda number: vfl.Iteration(), delays=slow)
    run.parties[0].part.key = None
    with pytest.raises(ValueError, match="parts that draw their own noise"):
        vfl.NodesRun(run.server, run.parties, delays=slow)
