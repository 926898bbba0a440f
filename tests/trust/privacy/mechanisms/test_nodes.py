"""What nodes tell their neighbours, against a plain loop, and what one node can change of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.oracles.closed_forms import distance, linear, linear_clients
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.exchange import sum_over
from fedtorch.trust import privacy

SIZES = [7, 3, 12, 5, 9]
DATA = linear_clients(SIZES)
N, DELTA = len(SIZES), 1e-3
NETWORK = ft.Network.from_edges([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2)])


def gtv(alpha: float = 0.3) -> ft.Algorithm:
    return ft.gtv(ft.least_squares(linear()), NETWORK, alpha)


def private(noise: float = 1e-9, seed: int | None = 0, algorithm: ft.Algorithm | None = None, **settings):
    entropy = None if seed is None else privacy.from_seed(seed)
    settings = {"clip": 1e3, "delta": DELTA, "entropy": entropy, **settings}
    return (gtv() if algorithm is None else algorithm) | privacy.node_level(noise=noise, **settings)


def told(run: ft.Run) -> dict[str, Tensor]:
    return run.algorithm.told.of(run.clients.table.read(slice(0, N)))


@pytest.mark.parametrize("cohort", [None, 2])
def test_without_clipping_and_noise_it_is_the_algorithm(cohort: int | None) -> None:
    plain = ft.run(gtv(), ft.InProcess(DATA), rounds=20, cohort=cohort)
    noised = ft.run(private(), ft.InProcess(DATA), rounds=20, cohort=cohort)
    assert distance(plain.tensors(), noised.tensors()) < 1e-4  # noise of 1e-6


def test_neighbours_receive_last_released_values() -> None:
    """The total stays what the exchange makes of the noised values: a lost message is told in the next one's place."""
    for chunk in (None, 1, 2):
        silent = ft.Faults(after=lambda keys, ids: ids == 3)
        run = ft.run(private(0.5, clip=0.4), ft.InProcess(DATA, chunk), rounds=9, cohort=3, faults=silent)
        heard = sum_over(run.algorithm.exchange, told(run), slice(0, N))
        assert distance(run.server.total, heard) < 1e-12
        start = {name: leaf[None] for name, leaf in gtv().start.items()}
        assert distance({name: leaf[3:4] for name, leaf in told(run).items()}, start) == 0


def test_noise_has_the_size_that_is_accounted_in_every_round() -> None:
    """Also after 16 rounds, in which noise on differences would have grown to four times that."""
    clip, noise = 0.5, 3.0
    first, last = [], []
    for seed in range(15):
        run = ft.Run(private(noise, seed, clip=clip), ft.InProcess(DATA))
        for round in run.rounds(16):
            if round.number in (1, 16):
                state = run.clients.table.read(slice(0, N))
                change = tree.subtract(run.algorithm.told.of(state), state.start)
                own = {name: state.inner.parameters[name] - state.start[name] for name in change}
                size = torch.cat([leaf.flatten(1) for leaf in own.values()], 1).norm(dim=1)
                share = (clip * (1 - 2**-20) / size).clamp(max=1)
                off = [(change[n] - own[n] * tree.along(share, own[n])).flatten() for n in change]
                (first if round.number == 1 else last).append(torch.cat(off) / (noise * clip))
    for draws in (first, last):
        whole = torch.cat(draws)
        assert float(whole.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * len(whole)))
        assert float(whole.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(len(whole)))


def test_one_node_is_told_apart_from_the_start_by_no_more_than_the_clip() -> None:
    x, y = DATA[2]
    for factor in (1.0, 1e3, 1e200):
        rows = list(DATA)
        rows[2] = (x, y * factor)
        run = ft.Run(private(clip=0.7), ft.InProcess(ft.data.from_tensors(rows)))
        run.step()
        change = torch.cat([(leaf[2] - gtv().start[name]).flatten() for name, leaf in told(run).items()])
        assert float(change.norm()) <= 0.7 + 1e-7
    assert bool(change.norm() < 1e-6)  # what overflows says nothing at all


def test_all_rounds_count_whoever_is_active(tmp_path: Path) -> None:
    make = lambda: private(2.0, ledger=tmp_path / "ledger", budget=3.5)
    run = ft.run(make(), ft.InProcess(DATA), rounds=50, cohort=1)
    expected = [privacy.epsilon(noise=2.0, rounds=t, delta=DELTA) for t in range(1, run.number + 1)]
    assert run.history["epsilon"].tolist() == pytest.approx(expected)
    assert run.number == privacy.rounds_for(epsilon=3.5, noise=2.0, delta=DELTA)
    claim = run.algorithm.budget.claim
    assert claim.unit == "node"
    assert "neighbours of a node together" in claim.adversary


def test_laplace_noise_parts_of_parameters_regressors_and_edges_that_fail() -> None:
    laplace = ft.run(private(3.0, mechanism=privacy.laplace), ft.InProcess(DATA), rounds=2)
    expected = privacy.epsilon(noise=3.0, rounds=2, delta=DELTA, mechanism=privacy.laplace)
    assert laplace.history["epsilon"].iloc[-1] == pytest.approx(expected)
    partly = ft.run(private(0.1, algorithm=gtv({"weight": 0.5})), ft.InProcess(DATA), rounds=2)
    assert set(told(partly)) == {"weight"}
    unreliable = ft.run(private() | ft.unreliable_edges(NETWORK, loss=0.2), ft.InProcess(DATA), rounds=40)
    reliable = ft.run(gtv(), ft.InProcess(DATA), rounds=40)
    assert distance(unreliable.tensors(), reliable.tensors()) < 1e-2
    from sklearn.linear_model import LinearRegression

    regressors = ft.gtv_regressors(LinearRegression, NETWORK, 0.5, torch.zeros(4, 3).double())
    run = ft.run(private(algorithm=regressors), ft.InProcess(DATA), {}, rounds=3)
    plain = ft.run(regressors, ft.InProcess(DATA), {}, rounds=3)
    assert distance(run.server.total, plain.server.total) < 1e-4
    assert told(run).weight.tolist() == [1.0] * N


def test_noise_comes_from_the_system_unless_told_and_losses_are_left_out() -> None:
    runs = [ft.run(private(1.0, None), ft.InProcess(DATA), rounds=1) for _ in range(2)]
    assert distance(told(runs[0]), told(runs[1])) > 1e-3  # by noise, not by rounding
    assert "train_loss" not in runs[0].history or bool(runs[0].history["train_loss"].isna().all())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip": 0.0}, "positive finite clip"),
        ({"noise": 0.0}, "positive finite noise"),
        ({"delta": 1.0}, "delta above 0"),
        ({"budget": -1.0}, "positive budget"),
        ({"algorithm": ft.fedavg(ft.least_squares(linear()))}, "such as ft.gtv"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        private(**wrong)


def test_what_does_not_fit_is_refused_in_a_run() -> None:
    with pytest.raises(ValueError, match="below one over the 5 nodes"):
        ft.Run(private(delta=0.2), ft.InProcess(DATA))
    fresh = ft.scaffold(ft.gradient_descent(linear(), steps=1, loss=torch.nn.functional.mse_loss,
                                            optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
                        weight=lambda data: torch.ones_like(data.count, dtype=torch.float64))  # fmt: skip
    rows = ft.data.from_tensors([(x, y[:, None]) for x, y in DATA])
    with pytest.raises(TypeError, match="fresh messages"):
        ft.run(private(algorithm=fresh), ft.InProcess(rows), rounds=1)
