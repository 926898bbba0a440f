"""The accountant against published figures, closed forms and independent bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fedtorch.trust import privacy
from fedtorch.trust.privacy.accounting import accountant, renyi
from fedtorch.trust.privacy.accounting.accountant import Release, pld_epsilon, spent
from fedtorch.trust.privacy.accounting.analytic import gaussian_delta, gaussian_epsilon
from fedtorch.trust.privacy.accounting.renyi import renyi_epsilon
from fedtorch.trust.privacy.examples.examples import Cut
from fedtorch.trust.privacy.noise import gaussian

DELTA = 1e-5


def test_privacy_loss_distributions_are_installed() -> None:
    """An old dp-accounting, which pip takes beside a new attrs, has none."""
    from dp_accounting import pld

    assert hasattr(pld, "PLDAccountant")


def test_a_thousand_sampled_rounds_cost_what_others_say() -> None:
    """Google's accountant: 1.8282; Microsoft's PRV: between 1.8182 and 1.8383; Opacus' Rényi: 2.1014."""
    found = privacy.epsilon(noise=1.0, sampling_rate=0.01, rounds=1000, delta=DELTA)
    assert found == pytest.approx(1.8282, abs=1e-4)
    assert 1.8182 < found < 1.8383
    assert renyi_epsilon(1.0, DELTA, rounds=1000, sampling_rate=0.01) == pytest.approx(2.1014, abs=1e-4)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (5.0, 10), (50.0, 3), (3.0, 200)])
def test_without_sampling_distributions_agree_with_the_closed_form(noise: float, rounds: int) -> None:
    """Losses are rounded up to a grid of 1e-4, which a round costs at most once."""
    exact = gaussian_epsilon(noise, DELTA, rounds)
    assert privacy.epsilon(noise=noise, rounds=rounds, delta=DELTA) == pytest.approx(exact, rel=1e-12)
    assert -1e-9 < pld_epsilon({Release(noise): rounds}, DELTA) - exact < 1e-4
    assert renyi_epsilon(noise, DELTA, rounds) > exact


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1, 0.6])
def test_the_least_gaussian_noise_is_the_inverse_of_its_epsilon(epsilon: float, delta: float) -> None:
    noise = privacy.gaussian_noise(epsilon, delta)
    assert gaussian_delta(noise, epsilon) == pytest.approx(delta, rel=1e-8)
    assert gaussian_epsilon(noise, delta) == pytest.approx(epsilon, rel=1e-8)
    assert privacy.gaussian_noise(epsilon, delta, rounds=9) == pytest.approx(3 * noise)


def test_the_analytic_delta_is_the_integral_of_the_excess() -> None:
    """δ(ε) = ∫ max(0, p − e^ε p') of two normal densities one sensitivity apart."""
    noise, epsilon = 1.3, 0.7
    excess = lambda x: max(0.0, norm.pdf(x, 1, noise) - math.exp(epsilon) * norm.pdf(x, 0, noise))
    exact = quad(excess, -20, 20, points=[0.5 + epsilon * noise**2], epsabs=1e-13)[0]
    assert gaussian_delta(noise, epsilon) == pytest.approx(exact, abs=1e-10)


def test_the_analytic_mechanism_needs_less_noise_than_the_textbook() -> None:
    """σ = √(2 ln(1.25/δ))/ε, which is proved for ε < 1 and is not private at ε = 10."""
    for epsilon in (0.1, 0.5, 0.99):
        assert privacy.gaussian_noise(epsilon, DELTA) < math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon
    printed = math.sqrt(2 * math.log(1.25 / 0.1)) / 10
    assert gaussian_delta(printed, 10.0) > 0.1


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.01), (5.0, 0.3), (0.5, 0.3)])
@pytest.mark.parametrize("order", [2, 3, 7, 40])
def test_quadrature_gives_the_moments_of_the_closed_form(noise: float, rate: float, order: int) -> None:
    whole = renyi._binomial(noise, rate, order)
    assert renyi._quadrature(noise, rate, order) == pytest.approx(whole, rel=1e-12, abs=1e-13)


def test_laplace_noise_is_private_without_a_delta() -> None:
    """Basic composition at δ → 0; at δ > 0 composed losses rarely add up to all of it."""
    one = privacy.epsilon(noise=2.0, delta=1e-10, mechanism=privacy.laplace)
    assert one == pytest.approx(0.5, abs=2e-4)
    many = privacy.epsilon(noise=2.0, rounds=100, delta=1e-5, mechanism=privacy.laplace)
    assert many < 0.8 * 50


def test_releases_of_different_kinds_compose() -> None:
    gaussians = {Release(2.0): 3, Release(1.0): 1}
    assert spent(gaussians, DELTA) == pytest.approx(gaussian_epsilon((3 / 4 + 1) ** -0.5, DELTA))
    mixed = {Release(2.0): 3, Release(1.0, 0.1): 5, Release(3.0, mechanism=privacy.laplace): 1}
    parts = [spent({release: count}, DELTA / 3) for release, count in mixed.items()]
    assert max(spent({r: c}, DELTA) for r, c in mixed.items()) < spent(mixed, DELTA) < sum(parts)
    assert spent({}, DELTA) == spent({Release(1.0): 0}, DELTA) == 0


@pytest.mark.parametrize(("noise", "rounds", "scale"), [(2.0, 3, 2.0), (5.0, 10, 3.0)])
def test_gaussian_and_laplace_rounds_compose_to_the_integral_over_laplace_losses(noise, rounds, scale) -> None:
    """δ(ε) = E[δ_G(ε − L)], where L, the loss of Laplace noise, is ±1/b beyond 0 and 1 and (1 − 2x)/b between."""
    sd = noise / math.sqrt(rounds)
    gaussian_only = lambda e: norm.cdf(0.5 / sd - e * sd) - math.exp(e) * norm.cdf(-0.5 / sd - e * sd)  # of any sign

    def delta(e: float) -> float:
        ends = gaussian_only(e - 1 / scale) / 2 + math.exp(-1 / scale) * gaussian_only(e + 1 / scale) / 2
        density = lambda x: math.exp(-x / scale) / (2 * scale) * gaussian_only(e - (1 - 2 * x) / scale)
        return ends + quad(density, 0, 1, epsabs=1e-14)[0]

    exact = brentq(lambda e: delta(e) - DELTA, 0, 60, xtol=1e-12)
    found = spent({Release(noise): rounds, Release(scale, mechanism=privacy.laplace): 1}, DELTA)
    assert exact - 1e-9 < found < exact + 1e-5


def test_two_sampled_rounds_compose_to_the_integral_over_both_losses() -> None:
    """δ(ε) = Σ p(x) p(y) (1 − e^(ε − L(x) − L(y)))₊ over grids of a four-hundredth, for a unit that leaves or comes."""
    kinds = [(1.0, 0.1), (2.0, 0.5)]

    def losses(noise: float, rate: float, leaves: bool) -> tuple[np.ndarray, np.ndarray]:
        x = np.arange(-9 * noise, 9 * noise + 1, 1 / 100)
        without, ratio = norm.pdf(x, 0, noise), 1 + rate * np.expm1((x - 0.5) / noise**2)
        return without * (ratio if leaves else 1) / 100, np.log(ratio) * (1 if leaves else -1)

    def delta(e: float, leaves: bool) -> float:
        (p, first), (q, second) = (losses(*kind, leaves) for kind in kinds)
        excess = np.clip(-np.expm1(np.minimum(e - first[:, None] - second, 0)), 0, None)
        return float(p @ excess @ q)

    found = spent({Release(*kind): 1 for kind in kinds}, DELTA)
    exact = max(delta(found, leaves) for leaves in (True, False))
    assert exact == pytest.approx(DELTA, rel=1e-3)  # a grid of 1e-4 in ε, which changes δ by some 1e-3 of itself
    assert exact <= DELTA * (1 + 1e-4)  # the sum's own error is that of a trapezoidal rule with a kink


def test_batches_that_are_cut_are_never_below_what_a_row_can_do_to_a_step() -> None:
    """A sum of −1 of the others, and 1 or 0 of one row, which may push another out: a mixture of normals, exactly."""
    rows, most, rate, noise, delta = 7, 4, 0.3, 1.5, 0.15  # δ as large as η = 0.03 makes it
    excess = Cut(most, rows).excess(rate)
    others = np.arange(rows)
    chance = binom.pmf(others, rows - 1, rate)
    kept_by = np.minimum(1, most / (others + 1))  # of a drawn row

    def density(x: np.ndarray, own: float) -> np.ndarray:
        among = lambda place: norm.pdf(x[:, None], place, noise) @ chance
        with_it = lambda left: norm.pdf(x[:, None], left, noise)
        drawn = with_it(own - np.minimum(others, most - 1)) @ (chance * kept_by)
        pushed = with_it(-np.full(rows, float(most))) @ (chance * (1 - kept_by))
        return (1 - rate) * among(-np.minimum(others, most)) + rate * (drawn + pushed)

    x = np.arange(-20, 20, 1e-3)
    one, zero = density(x, 1.0), density(x, 0.0)
    assert one.sum() * 1e-3 == pytest.approx(1, abs=1e-9)
    found = spent({Release(noise, rate, excess=excess): 1}, delta)
    assert math.isfinite(found)
    for p, q in ((one, zero), (zero, one)):
        assert np.clip(p - math.exp(found) * q, 0, None).sum() * 1e-3 <= delta


@pytest.mark.parametrize(("rate", "rounds"), [pytest.param(0.2, 5, marks=pytest.mark.slow), (1.0, 7)])
def test_noise_and_rounds_are_the_inverses_of_epsilon(rate: float, rounds: int) -> None:
    settings = {"sampling_rate": rate, "delta": DELTA}
    noise = privacy.noise_for(epsilon=1.5, rounds=rounds, **settings)
    assert privacy.epsilon(noise=noise, rounds=rounds, **settings) <= 1.5
    assert privacy.epsilon(noise=0.998 * noise, rounds=rounds, **settings) > 1.5
    most = privacy.rounds_for(epsilon=1.5, noise=noise, **settings)
    assert most >= rounds
    assert privacy.epsilon(noise=noise, rounds=most, **settings) <= 1.5
    assert privacy.epsilon(noise=noise, rounds=most + 1, **settings) > 1.5
    assert privacy.rounds_for(epsilon=1e-4, noise=noise, **settings) == 0


def test_sampling_costs_less() -> None:
    found = [privacy.epsilon(noise=1.0, sampling_rate=rate, rounds=10, delta=DELTA) for rate in (0.01, 0.1, 0.5, 1.0)]
    assert found == sorted(found)
    assert found[0] < 0.1 * found[-1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"noise": 0.0}, "positive finite noise"),
        ({"noise": -1.0}, "positive finite noise"),
        ({"noise": math.nan}, "positive finite noise"),
        ({"sampling_rate": 0.0}, "rate above 0"),
        ({"sampling_rate": 1.5}, "rate above 0"),
        ({"rounds": 0}, "at least 1"),
        ({"rounds": 2.5}, "whole number"),
        ({"delta": 0.0}, "delta above 0"),
        ({"delta": 1.0}, "delta above 0"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        privacy.epsilon(**{"noise": 1.0, "sampling_rate": 0.5, "rounds": 2, "delta": DELTA, **wrong})


@pytest.mark.parametrize("function", [privacy.noise_for, privacy.rounds_for])
def test_no_epsilon_is_no_budget(function) -> None:
    settings = {"noise": 1.0} if function is privacy.rounds_for else {}
    with pytest.raises(ValueError, match="positive epsilon"):
        function(epsilon=0.0, delta=DELTA, **settings)


@pytest.mark.parametrize(
    ("mechanism", "rate"), [(privacy.laplace, 1.0), pytest.param(gaussian, 0.5, marks=pytest.mark.slow)]
)
def test_noise_next_to_none_has_no_account(mechanism, rate: float) -> None:
    assert privacy.epsilon(noise=1e-9, delta=DELTA, sampling_rate=rate, mechanism=mechanism) == math.inf
    assert 10 < privacy.epsilon(noise=0.1, delta=DELTA, sampling_rate=rate, mechanism=mechanism) < 100


def test_a_library_without_distributions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting.pld", None)
    accountant._losses.cache_clear()
    accountant._curves.cache_clear()
    with pytest.raises(ImportError, match=r"fedtorch\[privacy\]"):
        privacy.epsilon(noise=1.0, sampling_rate=0.5, delta=DELTA)


@pytest.mark.parametrize("rate", [1.0, 0.05])
def test_cut_batches_have_the_least_epsilon_whose_delta_is_the_one_asked_for(rate: float) -> None:
    """δ(ε) + (1 + e^ε) η = δ, with δ(ε) of whole batches."""
    whole, cut = Release(8.0, rate), Release(8.0, rate, excess=1e-10)
    found = spent({cut: 40}, 1e-5)
    eta = 40 * 1e-10
    assert found > spent({whole: 40}, 1e-5)
    assert found == pytest.approx(spent({whole: 40}, 1e-5 - (1 + math.exp(found)) * eta), rel=1e-4)
    assert spent({cut: 20, whole: 20}, 1e-5) < found
    assert spent({whole._replace(excess=1e-4): 40}, 1e-5) == math.inf
    assert spent({whole._replace(excess=1e-300): 40}, 1e-5) == pytest.approx(
        spent({whole: 40}, 1e-5),
        rel=1e-5,  # ε is rounded up by 1e-6, twice
    )


HARD = {
    "little noise": (0.05, 0.03, 300, 1e-5),
    "less noise, once": (0.002, 0.5, 1, 1e-5),
    "a million rounds": (1.0, 0.5, 10**6, 1e-8),
    "a million rounds of little noise": (0.05, 0.5, 10**6, 1e-5),
    "a million rounds of next to no noise": (0.002, 0.9, 10**6, 1e-5),
    "a rate next to one": (0.05, 0.999, 10, 1e-5),
    "half of the units": (0.3, 0.5, 1000, 1e-5),
}


def rdp_bound(noise: float, rate: float, rounds: int, delta: float) -> float:
    """Of the accountant of dp-accounting that takes Rényi divergences."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    one = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
    return RdpAccountant().compose(one, rounds).get_epsilon(delta)


@pytest.mark.parametrize("name", HARD)
def test_settings_that_would_take_long_have_bounds(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """At most that of Rényi divergences, and of whole batches, and at least that of half the rounds."""
    noise, rate, rounds, delta = HARD[name]
    found = privacy.epsilon(noise=noise, sampling_rate=rate, rounds=rounds, delta=delta)
    assert found <= rdp_bound(noise, rate, rounds, delta)
    assert found <= gaussian_epsilon(noise, delta, rounds)
    assert isinstance(found, accountant.UpperBound) == (rounds > 1)
    assert ("upper bound" in repr(found)) == ("upper bound" in caplog.text) == (rounds > 1)
    assert found > rate * gaussian_epsilon(noise, delta, rounds) / 2


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "delta"), [(1.0, 0.01, 1000, 1e-5), (0.5, 0.1, 100, 1e-6), (5.0, 0.5, 3, 1e-5)]
)
def test_bounds_are_above_the_tight_value_and_close(noise: float, rate: float, rounds: int, delta: float) -> None:
    releases = {Release(noise, rate): rounds}
    tight, bounds = spent(releases, delta), [spent(releases, delta, most=most) for most in (200_000, 50_000, 2_000)]
    assert type(tight) is float
    assert all(isinstance(bound, accountant.UpperBound) for bound in bounds)
    assert tight < bounds[0] < bounds[1] < bounds[2] < 1.2 * tight
    assert bounds[0] < (1 + 1e-3) * tight


def test_bounds_are_rather_of_divergences_than_of_a_grid_without_use() -> None:
    releases = {Release(1.0, 0.01): 1000, Release(4.0, mechanism=privacy.laplace): 2}
    bound = spent(releases, DELTA, most=8)
    assert bound == pytest.approx(renyi_epsilon(1.0, DELTA, 1000, 0.01) + 2 / 4, rel=1e-2)
    assert bound > spent(releases, DELTA)


@pytest.mark.parametrize("mechanism", [gaussian, privacy.laplace])
@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.01), (0.3, 0.5), (5.0, 0.999), (0.08, 1e-4), (0.02, 1.0)])
def test_curves_of_losses_are_those_of_the_library(mechanism, noise: float, rate: float) -> None:
    distributions = accountant._library()
    kinds = distributions.privacy_loss_mechanism
    make = kinds.GaussianPrivacyLoss if mechanism is gaussian else kinds.LaplacePrivacyLoss
    curves = mechanism.losses(distributions, noise, rate, 1e-2)
    assert len(curves) == (1 if rate == 1 else 2)
    for curve, kind in zip(curves, (kinds.AdjacencyType.REMOVE, kinds.AdjacencyType.ADD)):
        epsilons = (curve.lowest + np.arange(len(curve.deltas))) * 1e-2
        exact = make(noise, sampling_prob=rate, adjacency_type=kind).get_delta_for_epsilon(epsilons)
        np.testing.assert_allclose(curve.deltas, exact, rtol=1e-9, atol=1e-15)


@pytest.mark.slow
def test_epsilons_beyond_the_smallest_numbers_grow_with_the_rounds() -> None:
    """e^−ε of some 700 to 745 is denormal."""
    found = [privacy.epsilon(noise=0.1, sampling_rate=0.03, rounds=rounds, delta=DELTA) for rounds in (130, 137, 144)]
    assert found == sorted(found)
    assert 650 < found[0] < found[-1] < 760


@pytest.mark.parametrize(
    ("epsilon", "rate", "rounds"),
    [
        (50.0, 0.03, 300),
        pytest.param(5000.0, 0.03, 300, marks=pytest.mark.slow),
        pytest.param(300.0, 0.5, 10**6, marks=pytest.mark.slow),
    ],
)
def test_noise_for_a_large_epsilon_is_enough_and_hardly_more(epsilon: float, rate: float, rounds: int) -> None:
    settings = {"sampling_rate": rate, "rounds": rounds, "delta": DELTA}
    noise = privacy.noise_for(epsilon=epsilon, **settings)
    assert "upper bound" in str(noise)
    assert privacy.epsilon(noise=noise, **settings) <= epsilon
    assert privacy.epsilon(noise=0.99 * noise, **settings) > epsilon


@pytest.mark.parametrize(
    ("epsilon", "rate", "rounds", "noise"), [(1.0, 0.01, 1000, 1.415), (8.0, 0.1, 1000, 2.052), (20.0, 0.1, 50, 0.5615)]
)
def test_noise_is_what_bisection_on_the_fine_grid_gives(epsilon, rate: float, rounds: int, noise: float) -> None:
    """As computed by one evaluation of dp-accounting's distributions a step, at the same noises."""
    delta = 1e-6 if rounds == 50 else DELTA
    found = privacy.noise_for(epsilon=epsilon, sampling_rate=rate, rounds=rounds, delta=delta)
    assert found == pytest.approx(noise, rel=1e-12)
    assert "upper bound" not in repr(found)


def test_sampled_laplace_noise_next_to_none_has_the_bound_of_its_parts() -> None:
    """log(1 + q (e^{1/b} − 1)) a round, where e^{1/b} has no number."""
    found = privacy.epsilon(noise=1e-3, sampling_rate=0.5, rounds=3, delta=DELTA, mechanism=privacy.laplace)
    assert isinstance(found, accountant.UpperBound)
    assert found == pytest.approx(3 * (1000 + math.log(0.5)))
