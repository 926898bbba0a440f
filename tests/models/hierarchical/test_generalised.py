"""Factors of logistic and Poisson devices against a fine grid, and responses that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Binomial, Poisson

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import generalised
from fedtorch.models.quadrature import gauss_hermite


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize("random", [[], [1]])
def test_a_generalised_device_factor_is_the_evidence_of_its_rows(kind: str, random: list[int]) -> None:
    """Against the likelihood itself where all effects are fixed, and a fine grid over the one that is not."""
    x, y = draw(6, 2, seed=4), torch.tensor([0.0, 1, 1, 0, 1, 1]).double()
    phi = draw(1, 5, 2 + len(random), seed=5)
    found = []
    for inner in ("default", gauss_hermite(2, 25)):
        model = getattr(generalised, kind)(hierarchical.normal(2, random=random), inner=inner)
        found.append(model.log_factor(phi, model.prepare(ft.data.from_tensors([(x, y)]).stack([0])))[0])
    standard = torch.linspace(-8, 8, 4001).double() if random else torch.zeros(1).double()
    weight = torch.softmax(-0.5 * standard.square(), 0)
    for default, fine, (a, b, *zeta) in zip(*found, phi[0]):
        slope = b + standard * (zeta[0] / 2).exp() if random else b + standard
        eta = x[:, :1] * a + x[:, 1:] * slope
        law = Bernoulli(logits=eta) if kind == "logistic" else Poisson(eta.exp())
        expected = (law.log_prob(y[:, None]).sum(0) + weight.log()).logsumexp(0)
        assert abs(float(fine - expected)) < 1e-6  # the fixed effect has a variance of one rounding error
        assert abs(float(default - expected)) < 1e-3  # seven nodes a coordinate


def test_responses_that_do_not_fit() -> None:
    x = torch.ones(3, 1).double()
    block = ft.data.from_tensors([(x, torch.tensor([0.0, 1.0, 2.0]).double())]).stack([0])
    with pytest.raises(ValueError, match=r"Expected responses 0 or 1, but got 2 in y \(1 such"):
        generalised.logistic(hierarchical.normal(1)).prepare(block)
    negative = ft.data.from_tensors([(x, torch.tensor([0.0, -1.0, 2.0]).double())]).stack([0])
    with pytest.raises(ValueError, match=r"Expected counts, but got -1 in y"):
        generalised.poisson(hierarchical.normal(1)).prepare(negative)


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize("counts", [(3, 1100), (7,)])
def test_without_deviations_a_factor_is_the_likelihood(kind: str, counts: tuple[int, ...]) -> None:
    """Of few rows beside many, of far predictors, and of more nodes than are computed at a time."""
    x = [draw(count, 2, seed=count) * torch.tensor([1.0, 12.0 if kind == "logistic" else 1.0]) for count in counts]
    y = [(draw(count, seed=1) > 0).double() for count in counts]
    model = getattr(generalised, kind)(hierarchical.normal(2, random=[]))
    phi = draw(len(counts), 80, 2, seed=2)
    found = model.log_factor(phi, model.prepare(ft.data.from_tensors(list(zip(x, y))).stack(list(range(len(counts))))))
    for k in range(len(counts)):
        eta = phi[k] @ x[k].mT
        law = Bernoulli(logits=eta) if kind == "logistic" else Poisson(eta.exp())
        expected, score = law.log_prob(y[k]).sum(-1), (y[k] - law.mean) @ x[k]
        variance = torch.finfo(torch.float64).eps * score.square().sum(-1)  # of a fixed effect: one rounding error
        assert ((found[k] - expected).abs() < 1e-12 * expected.abs() + variance).all()


def block(*client: object) -> ft.data.ClientData:
    return ft.data.from_tensors([client]).stack([0])


def beside(kind: str) -> dict[str, Tensor]:
    """What rows have beside x and y."""
    more = {"offset": draw(7, seed=8), "weight": torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0]).double()}
    return more | ({"trials": torch.tensor([1.0, 4.0, 2.0, 9.0, 1.0, 3.0, 5.0]).double()} if kind == "logistic" else {})


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_offset_weight_and_trials_are_those_of_statsmodels(kind: str) -> None:
    statsmodels = pytest.importorskip("statsmodels.api")
    x, y, more = draw(7, 2, seed=4), torch.tensor([0.0, 3, 1, 2, 1, 0, 4]).double(), beside(kind)
    endog, family = y, statsmodels.families.Poisson()
    if kind == "logistic":
        endog, family = torch.stack([y, more["trials"] - y], 1), statsmodels.families.Binomial()
    peer = statsmodels.GLM(endog.numpy(), x.numpy(), family, offset=more["offset"], freq_weights=more["weight"])
    model, phi = getattr(generalised, kind)(hierarchical.normal(2, random=[])), draw(1, 5, 2, seed=5)
    found = model.log_factor(phi, model.prepare(block(x, y, more)))[0]
    expected = torch.tensor([peer.loglike(each.numpy()) for each in phi[0]])
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("random", [[], [0, 1]])
def test_rows_of_trials_are_rows_of_single_ones(random: list[int]) -> None:
    """Also with weights 2, which are two equal rows, beside a client that has fewer of them."""
    x, y, more = draw(7, 2, seed=4), torch.tensor([0.0, 3, 1, 2, 1, 0, 4]).double(), beside("logistic")
    n, weight = more["trials"].long(), more["weight"].long()
    each = torch.arange(7).repeat_interleave(n * weight)
    single = torch.cat([(torch.arange(int(m)) < s).double().repeat(int(w)) for m, s, w in zip(n, y, weight)])
    model = generalised.logistic(hierarchical.normal(2, random=random))
    phi = draw(2, 5, 2 + len(random), seed=5)
    some = {name: values[:3] for name, values in more.items()}
    few = each[each < 3]
    grouped = ft.data.from_tensors([(x, y, more), (x[:3], y[:3], some)])
    expanded = ft.data.from_tensors([(x[at], single[: len(at)], {"offset": more["offset"][at]}) for at in (each, few)])
    found, expected = (model.log_factor(phi, model.prepare(data.stack([0, 1]))) for data in (grouped, expanded))
    choices = Binomial(more["trials"], logits=torch.zeros(7).double()).log_prob(y) + more["trials"] * math.log(2)
    constant = torch.stack([(more["weight"] * choices).sum(), (more["weight"] * choices)[:3].sum()])
    assert torch.allclose(found, expected + constant[:, None], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "y", "more", "message"),
    [
        (
            "logistic",
            4.0,
            {"trials": 3.0},
            "Expected successes, whole numbers from 0 to the row's trials, but got 4 of 3 in y",
        ),
        ("logistic", 1.0, {"trials": 0.0}, "Expected trials, whole numbers from 1, but got 0"),
        ("logistic", 1.0, {"trials": 1.5}, "Expected trials, whole numbers from 1, but got 1.5"),
        ("poisson", 1.0, {"weight": -1.0}, "Expected positive weights, but got -1"),
        ("poisson", -1.0, {}, "Expected counts, but got -1 in y"),
    ],
)
def test_bad_rows_name_their_client(kind: str, y: float, more: dict[str, float], message: str) -> None:
    good = (torch.ones(2, 1), torch.ones(2), {name: torch.ones(2) for name in more})
    bad = (torch.ones(1, 1), torch.tensor([y]), {name: torch.tensor([value]) for name, value in more.items()})
    data = ft.data.from_tensors([good, bad], names=["north", "south"])
    model = getattr(generalised, kind)(hierarchical.normal(1))
    with pytest.raises(ft.BadClients, match=message) as caught:
        model.prepare(data.stack([0, 1]))
    assert caught.value.rows == [1]
    with pytest.raises(ValueError, match=f"'south'.*{message}|{message}.*'south'"):
        ft.run(ft.ep(model), ft.InProcess(data), rounds=1)


def test_names_that_a_model_does_not_know_are_refused() -> None:
    rows = (torch.ones(2, 1), torch.ones(2), {"trials": torch.ones(2)})
    with pytest.raises(ValueError, match=r"Expected rows .x, y., with offset or weight .*but got 'trials'"):
        generalised.poisson(hierarchical.normal(1)).prepare(block(*rows))
    with pytest.raises(ValueError, match="but got 'ofset'; leave it out"):
        generalised.logistic(hierarchical.normal(1)).prepare(block(*rows[:2], {"ofset": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"Expected one number a row as trials, but got shape \(3,\)"):
        generalised.logistic(hierarchical.normal(1)).prepare(block(*rows[:2], {"trials": torch.ones(2, 3)}))


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize(("shared", "mean_error", "sd_error"), [(0.02, 0.001, 0.0005), (0.3, 0.01, 0.006)])
def test_fixed_effects_to_first_order(kind: str, shared: float, mean_error: float, sd_error: float) -> None:
    """Tilted moments beside all coefficients at 9³ nodes, with fixed effects known as to many and to few devices."""
    x = draw(10, 3, seed=3)
    x[:, 0] = 1
    y = (draw(10, seed=6) > -0.2).double()
    hierarchy, many = hierarchical.normal(3, random=[0]), gauss_hermite(3, 9)
    data = ft.data.from_tensors([(x, y), (x.repeat(20, 1), y.repeat(20))]).stack([0, 1])
    cavity = Moments(
        torch.zeros(2, 4).double(), torch.diag(torch.tensor([shared] * 3 + [0.3]).double()).expand(2, 4, 4)
    )
    tilted = []
    for model in (
        getattr(generalised, kind)(hierarchy),
        getattr(generalised, kind)(hierarchy, rule=gauss_hermite(1, 21), inner=many),
    ):
        tilted.append(model.project(cavity, model.prepare(data), torch.zeros(2, dtype=torch.int64)).tilted)
    sds = [moments.covariance.diagonal(dim1=1, dim2=2).sqrt() for moments in tilted]
    assert float(((tilted[0].mean - tilted[1].mean) / sds[1]).abs().max()) < mean_error
    assert float((sds[0] / sds[1] - 1).abs().max()) < sd_error


def test_a_rule_is_for_all_coefficients_or_for_those_that_differ() -> None:
    with pytest.raises(ValueError, match=r"Expected inner= for the 1 coefficients that differ, or for all 3"):
        generalised.logistic(hierarchical.normal(3, random=[2]), inner=gauss_hermite(2, 3))


def test_the_order_of_coefficients_does_not_matter() -> None:
    """Fixed effects are brought before the others: a permutation of columns permutes what comes out."""
    x, y, order = draw(9, 4, seed=7), (draw(9, seed=8) > 0).double(), [2, 0, 3, 1]
    means, covariances = [], []
    for columns, random in (([0, 1, 2, 3], [0, 2]), (order, [1, 0])):
        model = generalised.logistic(hierarchical.normal(4, random=random))
        cavity = Moments(torch.zeros(1, 6).double(), torch.eye(6).double()[None])
        prepared = model.prepare(block(x[:, columns], y))
        tilted = model.project(cavity, prepared, torch.zeros(1, dtype=torch.int64)).tilted
        means.append(tilted.mean[0, :4])
        covariances.append(tilted.covariance[0, :4, :4])
    assert torch.allclose(means[0][order], means[1], atol=1e-4)  # nodes are not where they were
    assert torch.allclose(covariances[0][order][:, order], covariances[1], atol=1e-4)


def test_long_fit_is_announced() -> None:
    x = torch.ones(200_000, 1).double().expand(-1, 12)
    model = generalised.logistic(hierarchical.normal(12, correlated=True))
    with pytest.warns(RuntimeWarning, match=r"but 200,000 rows at 4,992 nodes over 78 log variances.* let fewer coeff"):
        model.prepare(block(x, x[:, 0]))
