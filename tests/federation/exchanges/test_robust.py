"""Robust rules against their papers' formulas, and what wrong clients can do to them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.oracles import robust_oracles as oracles
from support.oracles.closed_forms import ROUNDING, distance, joined, linear_clients, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.federation.exchanges.robust import Rule
from fedtorch.federation.exchanges.robust.exchange import bounded, star as robust_star
from fedtorch.federation.exchanges.star import star
from fedtorch.trust import robust

M, F = 11, 2
GENERATOR = torch.Generator().manual_seed(0)
VALUES = torch.randn(M, 2, 3, generator=GENERATOR, dtype=torch.float64)
FLAT = VALUES.reshape(M, -1)
ONES = torch.ones(M)
# A case of every rule, for so many wrong messages; `tests/test_conformance.py` and the tests of devices take them, too.
MAKERS: dict[str, Callable[[int], Rule]] = {
    "bulyan": robust.bulyan,
    "centred_clipping": lambda faulty: robust.centred_clipping(),
    "fltrust": lambda faulty: robust.fltrust(2),
    "geometric_median": lambda faulty: robust.geometric_median(),
    "krum": robust.krum,
    "median": lambda faulty: robust.median(),
    "nearest_neighbour_mixing": lambda faulty: robust.nearest_neighbour_mixing(faulty, robust.krum(faulty)),
    "norm_bounding": lambda faulty: robust.norm_bounding(),
    "trimmed_mean": lambda faulty: robust.trimmed_mean(0.2),
}
RULES: dict[str, Rule] = {
    **{name: make(F) for name, make in MAKERS.items()},
    "mixed trimmed mean": robust.nearest_neighbour_mixing(F, robust.trimmed_mean(0.2)),
    "multi-krum": robust.krum(F, chosen=4),
}
every_rule = pytest.mark.parametrize("name", RULES)


def aggregate(rule: Rule, value: Tensor, weight: Tensor, spread: float = 1.0) -> Tensor:
    exchange = robust_star(rule, spread=spread)
    return exchange.finish(exchange.gather(Mean({"w": value}, weight), slice(0, len(value)))).value["w"]


def equally(rule: Rule, values: Tensor) -> Tensor:
    return rule.average(values, torch.full(values.shape[:-1], 1 / values.shape[-2], dtype=torch.float64))


# -- the papers' formulas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [9, 8, 1])
def test_the_median_is_that_of_sorting(count: int) -> None:
    ordered = VALUES[:count].sort(0).values
    expected = 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
    assert torch.equal(aggregate(robust.median(), VALUES[:count], ONES[:count]), expected)


def test_the_trimmed_mean_leaves_both_ends_out() -> None:
    expected = VALUES[:9].sort(0).values[2:7].mean(0)
    assert distance(aggregate(robust.trimmed_mean(2 / 9), VALUES[:9], ONES[:9]), expected) < ROUNDING
    plain = star().finish(star().gather(Mean({"w": VALUES}, ONES), slice(0, M))).value["w"]
    assert distance(aggregate(robust.trimmed_mean(0.0), VALUES, ONES), plain) < ROUNDING


@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_krum_and_bulyan_are_the_papers_loops(faulty: int) -> None:
    for chosen in (1, 3):
        expected = oracles.krum(FLAT, faulty, chosen)
        assert distance(equally(robust.krum(faulty, chosen), FLAT), expected) < ROUNDING
    assert distance(equally(robust.bulyan(faulty), FLAT), oracles.bulyan(FLAT, faulty)) < ROUNDING


@pytest.mark.parametrize("weights", [torch.ones(M), torch.arange(1.0, M + 1)])
def test_the_geometric_median_has_no_direction_to_go(weights: Tensor) -> None:
    """Σ w_i (z − x_i)/‖z − x_i‖ = 0, the derivative of the sum of distances; in one dimension it is the median."""
    share = (weights / weights.sum()).double()
    found = robust.geometric_median().average(FLAT, share)
    away = found - FLAT
    slope = (share[:, None] * away / away.norm(dim=1, keepdim=True)).sum(0)
    assert float(slope.norm()) < 1e-9  # iterations end where coefficients change by 1e-12, and converge linearly
    line = FLAT[:, :1]
    # Towards a message the smoothed iteration is slow: it is as near as its smoothing allows.
    assert distance(equally(robust.geometric_median(), line), line.median(0).values) < 1e-3


def test_messages_that_lie_together_are_their_geometric_median() -> None:
    same = FLAT[:1].repeat(M, 1)
    same[:4] = FLAT[:4]
    assert distance(equally(robust.geometric_median(), same), FLAT[0]) < 1e-6  # the smoothing is 1e-8 of the norms


def test_norm_bounding_and_centred_clipping_are_loops() -> None:
    norms = FLAT.norm(dim=1)
    bounded_mean = (FLAT * (1.7 / norms).clamp(max=1)[:, None]).mean(0)
    assert distance(equally(robust.norm_bounding(1.7), FLAT), bounded_mean) < ROUNDING
    default = (FLAT * (norms.median() / norms).clamp(max=1)[:, None]).mean(0)
    assert distance(equally(robust.norm_bounding(), FLAT), default) < ROUNDING
    centre = adaptive = FLAT.median(0).values
    for _ in range(4):
        centre = oracles.clipped_mean(FLAT, centre, 1.3)
        adaptive = oracles.clipped_mean(FLAT, adaptive, float((FLAT - adaptive).norm(dim=1).median()))
    assert distance(equally(robust.centred_clipping(1.3, steps=4), FLAT), centre) < ROUNDING
    assert distance(equally(robust.centred_clipping(steps=4), FLAT), adaptive) < ROUNDING


@pytest.mark.parametrize("count", [2, 4, 8, 9])
def test_defaults_are_the_median_of_even_counts_too(count: int) -> None:
    """As NumPy's: between two values in the middle it is their mean, here of norms, of distances and of weights."""
    x = FLAT[:count] * torch.arange(1, count + 1)[:, None]
    norms = x.norm(dim=1)
    radius = float(np.median(norms.numpy()))
    expected = (x * (radius / norms).clamp(max=1)[:, None]).mean(0)
    assert distance(equally(robust.norm_bounding(), x), expected) < ROUNDING
    assert distance(equally(robust.norm_bounding(radius), x), expected) < ROUNDING
    centre = torch.from_numpy(np.median(x.numpy(), 0))
    for _ in range(3):
        centre = oracles.clipped_mean(x, centre, float(np.median((x - centre).norm(dim=1).numpy())))
    assert distance(equally(robust.centred_clipping(steps=3), x), centre) < ROUNDING
    claims = norms.square()
    middle = float(np.median(claims.numpy()))
    assert distance(bounded(claims, 1.5), claims.clamp(middle / 1.5, middle * 1.5)) < ROUNDING
    assert distance(bounded(claims, 1.0), torch.full_like(claims, middle)) < ROUNDING


def test_fltrust_is_the_papers_formula_with_the_trusted_client_as_reference() -> None:
    for trusted in (0, 4, M - 1):
        others = torch.cat([FLAT[:trusted], FLAT[trusted + 1 :]])
        expected = oracles.fltrust(FLAT[trusted], others).reshape(2, 3)
        assert distance(aggregate(robust.fltrust(trusted), VALUES, ONES), expected) < ROUNDING
    against = -FLAT[:1].abs().repeat(4, 1)
    against[0] *= -1
    assert distance(aggregate(robust.fltrust(0), against, torch.ones(4)), against[0]) < ROUNDING  # nobody is trusted
    still = torch.cat([torch.zeros(1, 6, dtype=torch.float64), FLAT[:3]])
    assert distance(aggregate(robust.fltrust(0), still, torch.ones(4)), still[0]) == 0


def test_mixing_comes_before_the_rule() -> None:
    mixed = oracles.mixed(FLAT, F)
    for rule in (robust.median(), robust.krum(F), robust.trimmed_mean(0.2), robust.geometric_median()):
        found = equally(robust.nearest_neighbour_mixing(F, rule), FLAT)
        assert distance(found, equally(rule, mixed)) < ROUNDING


# -- what holds for all of them --------------------------------------------------------------------------------------


def test_every_rule_has_a_case() -> None:
    made = {name: getattr(robust, name) for name in dir(robust) if inspect.isfunction(getattr(robust, name))}
    assert sorted(MAKERS) == sorted(
        name for name, value in made.items() if inspect.signature(value).return_annotation in (Rule, "Rule")
    )


@every_rule
def test_batched_is_looped(name: str) -> None:
    rule, generator = RULES[name], torch.Generator().manual_seed(1)
    values = torch.randn(4, M, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(4, M, generator=generator, dtype=torch.float64) + 0.5
    weights /= weights.sum(-1, keepdim=True)
    for given in (weights, torch.full_like(weights, 1 / M)):
        looped = torch.stack([rule.average(x, w) for x, w in zip(values, given)])
        assert distance(rule.average(values, given), looped) < (1e-9 if name == "geometric_median" else ROUNDING)


@every_rule
def test_blocks_of_columns_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = aggregate(RULES[name], VALUES, ONES)
    monkeypatch.setattr("fedtorch.federation.exchanges.robust.rules._NUMBERS", 2 * M)
    assert distance(aggregate(RULES[name], VALUES, ONES), whole) < ROUNDING


@every_rule
def test_shifting_all_messages_shifts_the_aggregate(name: str) -> None:
    if name in ("fltrust", "norm_bounding"):
        pytest.skip("measures lengths from zero")
    shift = torch.arange(6.0).reshape(2, 3).double()
    moved = aggregate(RULES[name], VALUES + shift, ONES)
    assert distance(moved, aggregate(RULES[name], VALUES, ONES) + shift) < 1e-9  # differences of squares cancel


@every_rule
@pytest.mark.parametrize("size", [1e9, 1e99])
def test_two_far_messages_of_eleven_move_little(name: str, size: float) -> None:
    wrong = VALUES.clone()
    wrong[0], wrong[1] = size, -size
    found = aggregate(RULES[name], wrong, ONES)
    assert float(found.norm()) <= 2 * float(FLAT[F:].norm(dim=1).max())


@every_rule
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e200])
def test_what_is_not_finite_moves_nothing(name: str, wrong: float) -> None:
    values = torch.cat([VALUES, VALUES[:1]])
    values[M] = VALUES[3]
    values[M, 1, 2] = wrong
    weight = torch.ones(M + 1)
    expected = aggregate(RULES[name], VALUES, ONES)
    assert torch.equal(aggregate(RULES[name], values, weight), expected)
    single = values.to(torch.float32)
    assert torch.equal(aggregate(RULES[name], single, weight), aggregate(RULES[name], single[:M], ONES))
    if not math.isfinite(wrong):
        weight[M] = wrong
        assert torch.equal(aggregate(RULES[name], torch.cat([VALUES, VALUES[:1]]), weight), expected)


@every_rule
def test_claimed_rows_are_not_looked_at(name: str) -> None:
    claims = torch.cat([torch.full((3,), 1e9), torch.ones(M - 3)])
    assert torch.equal(aggregate(RULES[name], VALUES, claims), aggregate(RULES[name], VALUES, ONES))


def test_claimed_rows_do_not_win() -> None:
    """Three of ten with 51 %, or all, of the rows."""
    values = torch.cat([torch.full((3, 4), 100.0), torch.randn(7, 4, generator=torch.Generator().manual_seed(2))])
    for claim in (51 * 7 / (49 * 3), 1e9):
        weight = torch.cat([torch.full((3,), claim), torch.ones(7)])
        for rule in (robust.median(), robust.trimmed_mean(0.3), robust.geometric_median(), robust.krum(3)):
            for spread in (1.0, 1.5):  # 3 · 1.5² < 7
                found = aggregate(rule, values, weight, spread)
                assert bool((found <= values[3:].amax(0) + 1.0).all()) or (rule.name == "trimmed_mean" and spread > 1)
        assert bool((aggregate(robust.median(), values, weight, math.inf) == 100).all())


def test_weights_count_as_copies_as_far_as_they_are_believed() -> None:
    weight = torch.tensor([1, 3, 2, 1, 1, 4, 1, 2, 2, 1, 1])
    copies = VALUES.repeat_interleave(weight, 0)
    for rule in (robust.median(), robust.trimmed_mean(0.2), robust.trimmed_mean(0.0), robust.geometric_median()):
        one = aggregate(rule, VALUES, weight.float(), math.inf)
        two = aggregate(rule, copies, torch.ones(len(copies)), math.inf)
        assert distance(one, two) < 1e-9  # of the geometric median; the others to rounding
    assert torch.equal(
        bounded(torch.tensor([1.0, 2.0, 3.0, 100.0, 0.1]), 2.0), torch.tensor([1.0, 2, 3, 4, 1]).double()
    )


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.convex])
def test_convex_rules_keep_matrices_positive_definite(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(200, M, 5, generator=generator, dtype=torch.float64)
    matrices = (vectors[..., None] * vectors[..., None, :]).flatten(2)
    found = equally(RULES[name], matrices).reshape(200, 5, 5)
    assert float(torch.linalg.eigvalsh(found).min()) > -1e-12  # roundings of numbers of order ten
    medians = equally(robust.median(), matrices).reshape(200, 5, 5)
    assert float(torch.linalg.eigvalsh(medians).min()) < -1e-3  # number by number they are not kept


# -- in a run --------------------------------------------------------------------------------------------------------


def test_fedavg_with_a_median_withstands_a_wrong_client() -> None:
    clients = list(linear_clients([30] * 7, seed=1))
    x, y = clients[0]
    clients = [(x, y)] * 6
    honest = ft.fedavg(sgd(0.1, steps=5))
    start = honest.start
    attacked = ft.data.from_tensors([*clients, (x, 1e6 * y)])
    defended = honest | robust.rule(robust.median())
    best = ft.run(honest, ft.InProcess(ft.data.from_tensors(clients)), start, rounds=50).last
    found = ft.run(defended, ft.InProcess(attacked), start, rounds=50).last
    assert distance(joined(found.server), joined(best.server)) < ROUNDING
    moved = ft.run(honest, ft.InProcess(attacked), start, rounds=50).last
    assert distance(joined(best.server), joined(moved.server)) > 1e4


# -- refusals --------------------------------------------------------------------------------------------------------


def test_increments_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="Expected messages that are Mean for median, but got a Sum"):
        robust_star(robust.median()).gather(Sum({"w": VALUES}), slice(0, M))
    algorithm = dataclasses.replace(ft.scaffold(sgd(0.1)), exchange=robust_star(robust.trimmed_mean(0.1)))
    with pytest.raises(TypeError, match="for trimmed_mean"):
        ft.Run(algorithm, ft.InProcess(linear_clients([5, 6])))
    with pytest.raises(TypeError, match="bare tensor"):
        robust_star(robust.median()).gather({"w": VALUES}, slice(0, M))


@pytest.mark.parametrize(("rule", "least"), [(robust.krum(3), 9), (robust.bulyan(2), 11)])
def test_too_few_messages_are_refused(rule: Rule, least: int) -> None:
    aggregate(rule, VALUES[:least], ONES[:least])
    with pytest.raises(ValueError, match=f"Expected at least {least} credible messages for {rule.name}, but got"):
        aggregate(rule, VALUES[: least - 1], ONES[: least - 1])
    with pytest.raises(ValueError, match="0 of 11"):
        aggregate(rule, VALUES, tree.zeros_like(ONES))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 0 and below 0\.5, but got 0\.5"):
        robust.trimmed_mean(0.5)
    with pytest.raises(ValueError, match="whole number of at least 0, but got -1"):
        robust.krum(-1)
    with pytest.raises(ValueError, match="at least one chosen message, but got 0"):
        robust.krum(1, chosen=0)
    for make in (robust.norm_bounding, robust.centred_clipping):
        with pytest.raises(ValueError, match="positive radius, but got 0"):
            make(0.0)
    with pytest.raises(ValueError, match="at least one step, but got 0"):
        robust.centred_clipping(steps=0)
    with pytest.raises(ValueError, match=r"spread of at least 1, but got 0\.5"):
        robust.rule(robust.median(), spread=0.5)
    with pytest.raises(ValueError, match="Expected a rule without a reference, but got fltrust"):
        robust.nearest_neighbour_mixing(1, robust.fltrust(0))
    with pytest.raises(ValueError, match="Expected client 20, whom fltrust trusts, in every round"):
        aggregate(robust.fltrust(20), VALUES, ONES)


@pytest.mark.parametrize("rule", [robust.median(), robust.trimmed_mean(0.1)])
def test_gtv_is_refused_over_a_star(rule: Rule) -> None:
    algorithm = ft.gtv(sgd(0.1), ft.Network.from_edges([(0, 1), (1, 2)]), 0.3)
    with pytest.raises(ValueError, match=r"Expected an algorithm over a plain star, .* pass the algorithm's network"):
        algorithm | robust.rule(rule)
    replaced = dataclasses.replace(algorithm, exchange=robust_star(rule))
    with pytest.raises(TypeError, match=r"Expected messages that are Mean for .* use an algorithm .* ft\.fedavg"):
        ft.Run(replaced, ft.InProcess(linear_clients([4, 5, 6])))
    run = ft.Run(dataclasses.replace(algorithm, exchange=star()), ft.InProcess(linear_clients([4, 5, 6])))
    with pytest.raises(TypeError, match="Expected messages of neighbours, but got dict; do not replace GTV's exchange"):
        run.step()
