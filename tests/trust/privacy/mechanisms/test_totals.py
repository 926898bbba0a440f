"""Noise on running totals: the same size in every round, on what is clipped, and nothing is made anew."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.closed_forms import distance, linear, linear_clients, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.exchange import sum_over
from fedtorch.federation.runs import run as running
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.trust import privacy
from fedtorch.trust.privacy import AdaptiveClip

DATA = linear_clients([5, 2, 9, 4, 17, 6])
K, DELTA = 6, 1e-3


def ones(data) -> Tensor:
    return torch.ones_like(data.count, dtype=torch.float64)


MAKE = {
    "scaffold": lambda: ft.scaffold(sgd(0.1, steps=2), weight=ones),
    "feddyn": lambda: ft.feddyn(sgd(0.1, steps=2), 2.0, weight=ones),
}


def private(algorithm: ft.Algorithm, noise: float = 1e-9, seed: int = 0, **settings) -> ft.Algorithm:
    settings = {"clip": 1e3, "clip_told": 1e3, "delta": DELTA, "entropy": privacy.from_seed(seed), **settings}
    return algorithm | privacy.client_level(noise=noise, **settings)


def numbers(total) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.leaves(total.weighted)])


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("size", [None, 3])
def test_without_clipping_and_noise_it_is_the_algorithm(name: str, size: int | None) -> None:
    """Noise of 1e-6 on sums; the server divides fresh sums by the cohort and totals by the clients."""
    plain = ft.run(MAKE[name](), ft.InProcess(DATA), rounds=6, cohort=size)
    noised = ft.run(private(MAKE[name](), size=size), ft.InProcess(DATA), rounds=6)
    assert distance(plain.tensors(), noised.tensors()) < 1e-4
    assert distance(plain.server.total, noised.server.total) < 1e-4


def test_a_total_is_of_clipped_numbers_whoever_answers_in_any_blocks() -> None:
    ends = []
    for chunk in (None, 1):
        algorithm = private(MAKE["scaffold"](), noise=0.5, clip_told=0.05, size=4)
        silent = ft.Faults(after=lambda keys, ids: ids == 2)
        run = ft.run(algorithm, ft.InProcess(DATA, chunk), rounds=7, faults=silent)
        told = algorithm.told.of(run.clients.table.read(slice(0, K)))
        sizes = torch.cat([leaf.flatten(1) for leaf in tree.leaves(told.weighted)], 1).norm(dim=1)
        assert float(sizes.max()) <= 0.05
        assert float(sizes[2]) == 0
        assert distance(run.server.total, sum_over(algorithm.exchange, told, slice(0, K))) < 1e-12
        ends.append(run.server)
    assert distance(*ends) < 1e-9


def test_noise_on_the_total_has_the_same_size_in_every_round() -> None:
    """The variance is (√2 z C)², also after 16 rounds, where noise on differences would have 16 times that."""
    clip, noise, rounds, runs = 0.3, 2.0, 16, 6
    first, last, pairs = [], [], []
    wide = linear_clients([5, 2, 9, 4], features=60)
    for seed in range(runs):
        algorithm = ft.scaffold(sgd(0.001, linear(60), steps=2), weight=ones)
        run = ft.Run(private(algorithm, noise, seed, clip_told=clip, size=3), ft.InProcess(wide))
        before = None
        for round in run.rounds(rounds):
            off = (numbers(round.server.inner.total) - numbers(round.server.total)) / (math.sqrt(2) * noise * clip)
            first += [off] if round.number == 1 else []
            pairs += [] if before is None else [off * before]
            before = off
        last.append(off)
        assert torch.equal(round.server.inner.total.clients, round.server.total.clients)
    for draws in (first, last):
        whole = torch.cat(draws)
        assert float(whole.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * len(whole)))
    together = torch.cat(pairs)  # rounds have noise of their own
    assert float(together.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(len(together)))


def test_one_client_changes_every_total_by_no_more_than_the_clip() -> None:
    """Against a federation in which it tells zeros; the others' own steps do not depend on it in the first round."""
    x, y = DATA[4]
    totals = []
    for factor in (1.0, 1e6, 1e200):
        rows = list(DATA)
        rows[4] = (x, y * factor)
        run = ft.Run(private(MAKE["scaffold"](), clip_told=0.1), ft.InProcess(ft.data.from_tensors(rows)))
        totals.append(numbers(run.step().server.total))
    silent = ft.Faults(after=lambda keys, ids: ids == 4)
    run = ft.Run(private(MAKE["scaffold"](), clip_told=0.1), ft.InProcess(DATA), faults=silent)
    without = numbers(run.step().server.total)
    assert all(float((total - without).norm()) <= 0.1 + 1e-12 for total in totals)
    assert float((totals[0] - without).norm()) > 0.09


def test_all_rounds_count_whole_and_the_ledger_says_who_may_listen() -> None:
    run = ft.run(private(MAKE["feddyn"](), noise=3.0, size=2), ft.InProcess(DATA), rounds=3)
    expected = [privacy.epsilon(noise=3.0, rounds=t, delta=DELTA) for t in (1, 2, 3)]
    assert run.history["epsilon"].tolist() == pytest.approx(expected)
    assert "keeps their total" in run.algorithm.budget.claim.adversary


def test_the_total_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TOTAL_ANEW", 1)
    run = ft.Run(private(MAKE["scaffold"]()), ft.InProcess(DATA))
    monkeypatch.setattr(run.clients, "total", lambda: pytest.fail("made anew"))
    run.step()


def test_a_checkpoint_holds_the_total_with_noise_and_without(tmp_path) -> None:
    make = lambda: ft.Run(private(MAKE["scaffold"](), noise=1.0), ft.InProcess(DATA))
    run = make()
    for _ in run.rounds(3):
        pass
    run.save(tmp_path / "run")
    again = make().load(tmp_path / "run")
    assert distance(run.server, again.server) == 0
    assert again.step().number == 4


def test_what_cannot_be_noised_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="clip_told= for algorithms with persistent"):
        private(MAKE["scaffold"](), clip_told=None)
    with pytest.raises(ValueError, match="clip_told= for algorithms with persistent"):
        private(ft.fedavg(sgd(0.1)))
    with pytest.raises(ValueError, match="positive finite clip"):
        private(MAKE["scaffold"](), clip_told=-1.0)
    for wrong in ({"sampling_rate": 0.5}, {"clip": AdaptiveClip()}):
        with pytest.raises(ValueError, match="sampling amplifies nothing"):
            private(MAKE["scaffold"](), **wrong)
    for algorithm in (
        ft.gibbs(sparse.regression(), sparse.hierarchy()),
        ft.ep(hierarchical.linear(hierarchical.normal(3), noise=0.1)),
    ):
        with pytest.raises(ValueError, match=r"exact sums.*Gibbs protect the rows' sums"):
            private(algorithm)
    told = private(MAKE["scaffold"]()).told
    assert told is not None
    assert told.averages is ft.Averages.NONE  # a robust rule on it would have another sensitivity
    with pytest.raises(ValueError, match=r"weights of one .*'weight'"):
        ft.run(private(ft.scaffold(sgd(0.1))), ft.InProcess(DATA), rounds=1)
