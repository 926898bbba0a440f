"""Attacks on who a person is, on frames of sites: right each time without a protection, and as good as a coin with it.

A site is one person, whose sex is a fair coin. An attack reads what the site sends and guesses. Without protection it
is always right. With it the number of right guesses is what a coin would have, within the binomial interval that a coin
is out of once in ten thousand times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy
import pandas
import pytest
import torch
from safetensors.torch import load
from scipy.stats import binom
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear, sgd
from support.sites import Carried, carry_of, offers
from torch import Tensor

import fedtorch as ft
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gibbs import sparse
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree, masked, sealed
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.secure import ExactSums, Grid
from fedtorch.trust import attacks, privacy

ONE = Policy(minimum=1)
RING = ft.Network.ring(3)
GRID = Grid(12, 2.0**40)
DELTA = 1e-3
Frame = Mapping[str, Tensor]
Make = Callable[[], ft.Algorithm]
Guess = Callable[[Frame], bool | None]  # None where the frame has nothing to read


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def chance(right: int, trials: int, level: float = 0.9999) -> bool:
    """Whether a coin is right as often, but for once in ten thousand times."""
    low, high = binom.interval(level, trials, 0.5)
    return bool(low <= right <= high)


def test_a_coin_is_at_chance_and_what_is_right_in_three_of_four_is_not() -> None:
    assert chance(60, 120)
    assert not chance(90, 120)
    assert not chance(30, 120)


def persons(seed: int) -> tuple[ft.data.FederatedData, list[bool]]:
    """(three persons: a constant, an age and a sex, in units of one; their sexes)."""
    draws = numpy.random.default_rng(seed)
    sexes = [bool(each) for each in draws.integers(0, 2, 3)]
    rows = [
        (torch.tensor([[1.0, draws.normal(), float(sex)]]).double(), torch.tensor([draws.normal() + 2.0]).double())
        for sex in sexes
    ]
    return ft.data.from_tensors(rows), sexes


def curves(seed: int) -> tuple[ft.data.FederatedData, list[bool]]:
    """(three units of one row each: an input, and an output of one size; whether the outputs are above zero)."""
    draws = numpy.random.default_rng(seed)
    signs = [bool(each) for each in draws.integers(0, 2, 3)]
    rows = [
        (torch.tensor([[draws.uniform(-1, 1)]]).double(), torch.tensor([1.0 if sign else -1.0]).double())
        for sign in signs
    ]
    return ft.data.from_tensors(rows), signs


def said(make: Make, data: ft.data.FederatedData, rounds: int = 1, policy: Policy = ONE) -> dict[str, list[bytes]]:
    """All payloads of three sites of one client each, by site."""
    hidden = carry_of(make).masks is not None or carry_of(make).network is not None
    host = Loopback(offers(data, make, policy=policy), None, certified().identities if hidden else None)
    heard: dict[str, list[bytes]] = {name: [] for name in host.brought}

    def after(name: str, payload: bytes) -> bytes:
        if frames.read(payload, name).payload:
            heard[name].append(payload)
        return payload

    host.after = after
    roster: dict[str, Any] = {"roster": certified().roster} if hidden else {}
    more = {"rows": data.rows, "carry": carry_of(make), "quorum": 1.0, "seconds": 0.2, **roster}
    run = ft.Run(make(), Remote(host, list(host.brought), "it", **more))  # type: ignore[arg-type]
    for _ in run.rounds(rounds):
        pass
    return heard


def score(
    make: Make, guess: Guess, runs: int, rounds: int = 1, drawn: Callable[[int], Any] = persons
) -> tuple[int, int]:
    """(right guesses, guesses) of the last frame of each site that has something to read."""
    right = trials = 0
    for seed in range(runs):
        data, truth = drawn(seed)
        for payloads, true in zip(said(make, data, rounds).values(), truth, strict=True):
            guesses = [found for payload in payloads if (found := guess(load(payload))) is not None]
            assert guesses
            right, trials = right + (guesses[-1] == true), trials + 1
    return right, trials


# -- noise -------------------------------------------------------------------------------------------------------------


def field(said: Frame, ends: str) -> Tensor | None:
    """The tensor whose name ends so."""
    return next((leaf for name, leaf in said.items() if name.endswith(ends)), None)


def by_change(said: Frame) -> bool | None:
    """The sex in the row of which a linear model's step tells (1, 3) and its multiple."""
    weight, bias = field(said, "value.weight"), field(said, "value.bias")
    if weight is None or bias is None:
        return None
    return bool(attacks.linear_inputs(weight.reshape(-1, 3)[:1], bias.reshape(-1)[:1])[0, 2] > 0.5)


def by_products(said: Frame) -> bool | None:
    """The sex in a row of whose products with itself exact solutions are made, from a start of zeros."""
    weight = field(said, "change.value.weight")
    return None if weight is None else bool((weight[0, 2] / weight[0, 0]) > 0.5)


def by_site(said: Frame) -> bool | None:
    """The sex in the row of whose products an approximate likelihood is made."""
    packed = field(said, "site.precision")
    if packed is None:
        return None
    precision = gaussian.unpack(packed)[0, :3]
    return bool(precision[2] > 0.5 * precision[0])


def by_sign(said: Frame) -> bool | None:
    """Whether the one output of a unit is above zero, of the sums of its rows."""
    shift = field(said, "told.value.shift")
    return None if shift is None else bool(shift.sum() > 0)


def averaging() -> ft.Algorithm:
    return ft.fedavg(sgd(1e-2, steps=1))


def neighbours() -> ft.Algorithm:
    return ft.gtv(sgd(1e-2, steps=1), RING, 0.1)


def curve() -> ConvolvedGP:
    return ConvolvedGP(torch.linspace(-1, 1, 5).double()[:, None])


def examples() -> ft.Algorithm:
    solver = privacy.example_level(
        linear(), loss=lambda prediction, target: (prediction[..., 0] - target).square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=1, sampling_rate=1.0, clip=1.0, noise=8.0, delta=DELTA,
    )  # fmt: skip
    return ft.fedavg(solver)


def statistics(noise: float | None) -> ft.Algorithm:
    if noise is None:
        return ft.fedavg(ft.least_squares(linear(3, bias=False), steps=1, lr=0.1))
    solver = privacy.sufficient_statistics(
        linear(3, bias=False), clip_features=2.0, clip_targets=3.0, noise=noise, delta=DELTA
    )
    return ft.fedavg(solver)


NOISED: dict[str, tuple[Make, Make, Guess, Callable[[int], Any]]] = {  # without noise, with noise, the attack, its data
    "averaging, noise at each client": (
        averaging,
        lambda: averaging() | privacy.local_level(clip=1.0, noise=8.0, delta=DELTA),
        by_change,
        persons,
    ),
    "averaging, noise in each step": (averaging, examples, by_change, persons),
    "averaging, noise in the sums": (lambda: statistics(None), lambda: statistics(8.0), by_products, persons),
    "neighbours on a graph, noise at each node": (
        neighbours,
        lambda: neighbours() | privacy.node_level(clip=1.0, noise=8.0, delta=DELTA),
        by_change,
        persons,
    ),
    "multi-output GP, noise in the sums": (
        lambda: ft.fedmgp(curve(), steps=0, server_lr=0.0, accept_disclosure=True),
        lambda: privacy.private_process(curve(), clip_targets=1.0, noise=8.0, delta=DELTA),
        by_sign,
        curves,
    ),
}


@pytest.mark.parametrize("name", NOISED)
def test_without_noise_the_attack_is_right_each_time(name: str) -> None:
    plain, _, guess, drawn = NOISED[name]
    right, trials = score(plain, guess, runs=4, drawn=drawn)
    assert right == trials == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISED)
def test_with_noise_it_is_at_chance(name: str) -> None:
    _, noised, guess, drawn = NOISED[name]
    right, trials = score(noised, guess, runs=40, drawn=drawn)
    assert trials == 120
    assert chance(right, trials), f"{right} of {trials}"


def equals() -> ft.Algorithm:
    """Averaging in which every client counts alike."""
    return ft.fedavg(sgd(1e-2, steps=1), weight=lambda data: torch.ones_like(data.count))


def of_the_model(make: Make, runs: int) -> tuple[int, int]:
    """(right guesses, guesses) of who sees the model after a round, and knows all clients' rows but the first one's."""
    right = 0
    for seed in range(runs):
        data, truth = persons(seed)
        start = equals().start
        changed = lambda algorithm, rows, start=start: {
            name: leaf - start[name] for name, leaf in ft.run(algorithm, ft.InProcess(rows), rounds=1).server.items()
        }
        every, others = changed(make(), data), [changed(equals(), data.select([k])) for k in (1, 2)]
        left = {name: 3 * leaf - sum(other[name] for other in others) for name, leaf in every.items()}
        right += by_change({f"value.{name}": leaf for name, leaf in left.items()}) == truth[0]
    return right, runs


def test_who_knows_all_others_reads_one_client_in_the_mean() -> None:
    assert of_the_model(equals, 10) == (10, 10)


@pytest.mark.slow
def test_with_noise_at_the_server_one_client_is_at_chance() -> None:
    noised = lambda: equals() | privacy.client_level(clip=1.0, noise=8.0, delta=DELTA)
    right, trials = of_the_model(noised, 100)
    assert chance(right, trials), f"{right} of {trials}"


# -- the least number of rows ------------------------------------------------------------------------------------------

ALONE: dict[str, tuple[Make, Guess, int, Callable[[int], Any]]] = {
    "averaging": (averaging, by_change, 1, persons),
    "neighbours on a graph": (neighbours, by_change, 1, persons),
    "multi-output GP": (NOISED["multi-output GP, noise in the sums"][0], by_sign, 1, curves),
    "expectation propagation": (lambda: ft.ep(hierarchical.linear(hierarchical.normal(3))), by_site, 2, persons),
}


SLOW = "expectation propagation"  # whose programs are compiled first


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow if each == SLOW else ()) for each in ALONE])
def test_a_site_of_one_person_is_read_and_by_default_says_nothing(name: str) -> None:
    make, guess, rounds, drawn = ALONE[name]
    right, trials = score(make, guess, runs=4, rounds=rounds, drawn=drawn)
    assert right == trials == 12
    data, _ = drawn(0)
    with pytest.raises(RuntimeError, match="fewer"):
        said(make, data, rounds, Policy())


# -- masks -------------------------------------------------------------------------------------------------------------


def learnt(seen: numpy.ndarray, truth: numpy.ndarray) -> tuple[int, int]:
    """(right guesses, guesses) about the second half of what was seen, by the class means of the first half."""
    half = len(seen) // 2
    train, test = seen[:half], seen[half:]
    means = [train[truth[:half] == value].mean(0) for value in (False, True)]
    away = [numpy.square(test - mean).sum(1) for mean in means]
    return int(((away[1] < away[0]) == truth[half:]).sum()), len(test)


def words(make: Make, runs: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(what is in each site's tensors, byte by byte; the sexes of persons whose rows are alike but for these)."""
    seen, truth = [], []
    for seed in range(runs):
        _, sexes = persons(seed)
        data = ft.data.from_tensors(
            [(torch.tensor([[1.0, 0.5, float(sex)]]).double(), torch.tensor([2.0]).double()) for sex in sexes]
        )
        for payloads, sex in zip(said(make, data).values(), sexes, strict=True):
            leaves = [leaf for each in payloads for name, leaf in sorted(load(each).items()) if name[:2] != "__"]
            seen.append(numpy.frombuffer(b"".join(leaf.numpy().tobytes() for leaf in leaves), numpy.uint8))
            truth.append(sex)
    shortest = min(map(len, seen))  # signatures and lists of keys are not all of one length
    return numpy.array([each[:shortest] for each in seen], numpy.float64), numpy.array(truth)


def test_who_learns_to_read_plain_frames_is_right_each_time() -> None:
    right, trials = learnt(*words(averaging, 8))
    assert right == trials == 12


HIDDEN: dict[str, Make] = {
    "averaging": Carried(averaging, masked(GRID, dropouts=0)),
    "control variates": Carried(lambda: ft.scaffold(sgd(1e-2, steps=1)), masked(GRID, dropouts=0)),
    "Gibbs sampling": Carried(
        lambda: dataclasses.replace(ft.gibbs(sparse.regression(), sparse.hierarchy()), start=torch.zeros(3).double()),
        masked(ExactSums(), dropouts=0),
    ),
    "neighbours on a graph, sealed": Carried(neighbours, sealed(RING)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HIDDEN)
def test_who_learns_to_read_a_sites_words_is_at_chance(name: str) -> None:
    """The sum of all sites is told, and is of no single one: a site's own frames are what is read here."""
    right, trials = learnt(*words(HIDDEN[name], 60))
    assert trials == 90
    assert chance(right, trials), f"{right} of {trials}"


# -- sums over two starts ----------------------------------------------------------------------------------------------


def shares(quorum: int | None) -> Make:
    plain = lambda: ft.fedavg(ft.least_squares(linear(3)), weight=lambda data: torch.ones_like(data.count))
    if quorum is None:
        return plain
    return lambda: plain() | privacy.local_level(clip=1.0, noise=8.0, delta=DELTA, quorum=quorum)


def of_two_starts(make: Make, seed: int) -> tuple[bool, bool]:
    """(the sign of a site's first coefficient, and that of the difference of two sums under masks, one without it).

    Sites remember which sums they were in; the second sum is from another start, far away, which is another sum.
    """
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8, 3, generator=draws, dtype=torch.float64)
    sign = bool(torch.rand((), generator=draws) < 0.5)
    slopes = torch.tensor([[0.1, 0.2, 0.1]] * 3 + [[0.5 if sign else -0.5, 0.2, 0.1]]).double()
    data = ft.data.from_tensors([(x[k], x[k] @ slopes[k]) for k in range(4)])
    carried = Carried(make, masked(GRID, dropouts=0))
    host = Loopback(offers(data, carried, sites=4, policy=ONE), None, certified().identities)
    found = []
    for names, start in ((["a", "b", "c", "d"], 0.0), (["a", "b", "c"], 0.3)):
        rows = data.rows
        more = {"rows": rows, "carry": carry_of(carried), "quorum": 1.0, "seconds": 0.2, "roster": certified().roster}
        begun = {name: torch.full_like(leaf, start) for name, leaf in make().start.items()}
        run = ft.Run(make(), Remote(host, names, "it", **more), begun)  # type: ignore[arg-type]
        run.step()
        found.append(len(names) * run.server["weight"][0, 0])
    return sign, bool(found[0] - found[1] > 0)


def test_two_sums_under_masks_from_two_starts_tell_a_site() -> None:
    """What least squares find is the same from every start; no site can refuse that."""
    trials = [of_two_starts(shares(None), seed) for seed in range(6)]
    assert {true for true, _ in trials} == {True, False}
    assert all(true == guess for true, guess in trials)


@pytest.mark.slow
def test_with_shares_of_noise_two_sums_are_at_chance() -> None:
    trials = [of_two_starts(shares(3), seed) for seed in range(60)]
    right = sum(true == guess for true, guess in trials)
    assert chance(right, len(trials)), f"{right} of {len(trials)}"


# -- constants of a column ---------------------------------------------------------------------------------------------


def classes(seed: int) -> tuple[pandas.DataFrame, bool]:
    """(a hundred patients of three NYHA classes, one of whom may be of the fourth; whether one is)."""
    draws = numpy.random.default_rng(seed)
    there = bool(draws.integers(0, 2))
    nyha = draws.choice([1.0, 2.0, 3.0], 100, p=[0.5, 0.35, 0.15])
    nyha[0] = 4.0 if there else 3.0
    return pandas.DataFrame({"ward": "7", "nyha": nyha, "score": draws.normal(size=100)}), there


def columns(minimum: int, runs: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(the counts of a column's values that a site's histogram tells, by the value in which a bin ends; the truth)."""
    algorithms = {"it": lambda design: ft.ep(hierarchical.regression(design))}
    seen, truth = [], []
    for seed in range(runs):
        frame, there = classes(seed)
        policy = Policy(minimum=minimum)
        host = Loopback({"a": SiteConfiguration.of_frame(frame, "ward", algorithms, policy=policy)}, None)
        answers: list[Any] = []
        host.after = lambda name, reply, answers=answers: (
            answers.append(frames.read(reply, name).names("answer")) or reply
        )
        with suppress(ValueError):  # where the site tells none, which is an answer, too
            agree(host, ["a"], "score ~ scale(nyha) + (1 | ward)", client="ward", minimum=minimum)  # type: ignore[arg-type]
        told = next(answer["histograms"]["nyha"] for answer in answers if "nyha" in answer.get("histograms", {}))
        seen.append(_by_class(told))
        truth.append(there)
    return numpy.array(seen), numpy.array(truth)


def _by_class(told: Any) -> list[float]:
    """How many rows are in the bin that each class is in, none where there are no bins."""
    ends, counts, _ = told or ([0.0, 5.0], [0], True)
    return [float(counts[numpy.searchsorted(ends[1:-1], value)]) for value in (1.0, 2.0, 3.0, 4.0)]


def test_a_histogram_of_single_rows_tells_who_is_there() -> None:
    seen, truth = columns(1, 20)
    assert ((seen[:, 3] == 1) == truth).all()


@pytest.mark.slow
def test_a_histogram_of_ten_rows_a_bin_is_at_chance() -> None:
    right, trials = learnt(*columns(10, 160))
    assert trials == 80
    assert chance(right, trials), f"{right} of {trials}"
