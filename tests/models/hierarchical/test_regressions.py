"""Regressions by a formula: names, priors, and fits beside those of statsmodels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.federation.algorithms.maximum_likelihood import estimates, maximised
from fedtorch.models import hierarchical
from fedtorch.models.gaussian import unpack

CLINICS, EACH = 30, 20


def patients() -> pandas.DataFrame:
    draw = numpy.random.default_rng(0)
    clinic = numpy.repeat(numpy.arange(CLINICS), EACH)
    age, sex = draw.normal(60, 10, len(clinic)), draw.choice(["f", "m"], len(clinic))
    level = draw.normal(0, 1.5, CLINICS)[clinic]
    eta = -6 + 0.1 * age + 0.8 * (sex == "m") + level
    trials = draw.integers(1, 9, len(clinic))
    return pandas.DataFrame(
        {
            "clinic": clinic,
            "age": age,
            "sex": sex,
            "score": eta + draw.normal(0, 1.5, len(clinic)),
            "well": draw.binomial(1, 1 / (1 + numpy.exp(-eta))),
            "visits": draw.poisson(numpy.exp(eta / 4) * trials),
            "cured": draw.binomial(trials, 1 / (1 + numpy.exp(-eta))),
            "trials": trials,
            "slopes": eta + 0.1 * draw.normal(size=CLINICS)[clinic] * (age - 60) + draw.normal(0, 1.5, len(clinic)),
        }
    )


PATIENTS = patients()


def data(formula: str, **settings: Any) -> ft.data.FederatedData:
    return ft.data.from_frame(PATIENTS, client="clinic", formula=formula, **settings)


def fitted(rows: ft.data.FederatedData, family: str = "gaussian", **settings: Any) -> ft.Run:
    model = hierarchical.regression(rows.design, family, **settings)
    return ft.run(ft.ep(model), ft.InProcess(rows), rounds=60, until=settled(), progress=False)


def coefficients(run: ft.Run) -> tuple[torch.Tensor, torch.Tensor]:
    d, q = len(run.design.columns), posterior(run)
    mean, covariance = run.design.original(q.mean[:d], q.covariance_matrix[:d, :d])
    return mean, covariance.diagonal().sqrt()


def test_a_random_intercept_is_that_of_statsmodels() -> None:
    formulas = pytest.importorskip("statsmodels.formula.api")
    mean, sd = coefficients(fitted(data("score ~ age + sex + (1 | clinic)"), sd=1e3))
    theirs = formulas.mixedlm("score ~ age + sex", PATIENTS, groups="clinic").fit()
    names = ["Intercept", "age", "sex[T.m]"]
    numpy.testing.assert_array_less(numpy.abs(mean.numpy() - theirs.params[names]), 0.05 * theirs.bse[names])
    numpy.testing.assert_allclose(sd.numpy(), theirs.bse[names], rtol=0.05)


def likeliest(formula: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None]:
    """Return means, their standard errors, the covariance over clinics in original units, and the noise, by REML."""
    rows = data(formula, **settings)
    algorithm = ft.maximum_likelihood(hierarchical.regression(rows.design), restricted=True)
    found = estimates(ft.run(algorithm, ft.InProcess(rows), rounds=60, until=maximised(), progress=False))
    d = len(rows.design.columns)
    mean, covariance = rows.design.original(found.mean[:d], found.covariance[:d, :d])
    return mean, covariance.diagonal().sqrt(), rows.design.original(mean, found.spread)[1], found.noise


@pytest.mark.parametrize("random", ["(1 | clinic)", "(0 + age | clinic)", "(1 + age || clinic)"])
def test_standardising_changes_no_model(random: str) -> None:
    """Without priors, estimates are the same in the units of the columns whether these are standardised or not."""
    formula = f"slopes ~ age*sex + {random}"
    for standardised, plain in zip(likeliest(formula), likeliest(formula, standardise=False)):
        torch.testing.assert_close(standardised, plain, rtol=2e-3, atol=1e-6)


def test_random_slopes_are_those_of_statsmodels() -> None:
    formulas = pytest.importorskip("statsmodels.formula.api")
    mean, errors, between, noise = likeliest("slopes ~ age + sex + (1 + age | clinic)")
    shifted = PATIENTS.assign(age=PATIENTS["age"] / 10 - 6)  # on which statsmodels converges
    theirs = formulas.mixedlm("slopes ~ age + sex", shifted, groups="clinic", re_formula="~age").fit(method="bfgs")
    names = ["Intercept", "age", "sex[T.m]"]
    back = torch.tensor([[1.0, -6.0], [0.0, 0.1]], dtype=torch.float64)
    wanted = back @ torch.tensor(theirs.cov_re.to_numpy()) @ back.mT
    torch.testing.assert_close(between[:2, :2], wanted, rtol=0.02, atol=0)
    assert not between[2].any()
    assert noise == pytest.approx(theirs.scale**0.5, rel=1e-3)
    scale = numpy.array([0.1, 1.0])
    numpy.testing.assert_allclose(mean[1:].numpy(), theirs.params[names[1:]] * scale, rtol=1e-3)
    numpy.testing.assert_allclose(errors[1:].numpy(), theirs.bse[names[1:]] * scale, rtol=1e-2)


@pytest.mark.parametrize(
    ("formula", "family", "settings", "theirs"),
    [
        ("well ~ age + sex", "logistic", {}, "Binomial"),
        ("visits ~ age + sex + offset(log(trials))", "poisson", {}, "Poisson"),
        ("visits ~ age + sex", "poisson", {"weights": "trials"}, "Poisson"),
    ],
)
def test_without_random_terms_it_is_the_generalised_linear_model(
    formula: str, family: str, settings: dict[str, str], theirs: str
) -> None:
    api = pytest.importorskip("statsmodels.api")
    formulas = pytest.importorskip("statsmodels.formula.api")
    mean, sd = coefficients(fitted(data(formula, **settings), family, sd=10.0))
    arguments: dict[str, Any] = {"freq_weights": PATIENTS["trials"]} if settings else {}
    if "offset" in formula:
        arguments["offset"] = numpy.log(PATIENTS["trials"])
    plain = formulas.glm(formula.split(" + offset")[0], PATIENTS, family=getattr(api.families, theirs)(), **arguments)
    names, result = ["Intercept", "age", "sex[T.m]"], plain.fit()
    numpy.testing.assert_array_less(numpy.abs(mean.numpy() - result.params[names]), 0.1 * result.bse[names])
    numpy.testing.assert_allclose(sd.numpy(), result.bse[names], rtol=0.05)


def test_successes_of_trials_are_as_many_rows_of_one() -> None:
    binomial = data("cured | trials(trials) ~ age + (1 | clinic)")
    by_argument = data("cured ~ age + (1 | clinic)", trials="trials")
    for old, new in zip(ft.tree.leaves(binomial.rows), ft.tree.leaves(by_argument.rows)):
        assert torch.equal(old, new)
    each = PATIENTS.loc[PATIENTS.index.repeat(PATIENTS["trials"])]
    first = each.groupby(level=0).cumcount()
    each = each.assign(cured=(first < each["cured"]).astype(int))
    design = ft.data.Design("cured ~ age + (1 | clinic)", binomial.design.encoding, "clinic")
    singly = ft.data.from_frame(each, client="clinic", design=design)
    phi = torch.tensor([[0.1, 0.4, -1.0], [-0.5, 1.0, 0.5]]).double().expand(CLINICS, 2, 3)
    gains = []  # of one φ over another, which the number of ways to succeed does not change
    for rows, family in ((binomial, "binomial"), (singly, "logistic")):
        model = hierarchical.regression(rows.design, family)
        gains.append(model.log_factor(phi, model.prepare(rows.stack(range(CLINICS)))).diff(dim=1))
    torch.testing.assert_close(gains[0], gains[1])


def test_default_priors_are_in_the_response_s_units() -> None:
    design = data("score ~ age + (1 + age | clinic)").design
    prior = hierarchical.regression(design).prior.normal
    covariance = unpack(prior.precision).inverse()
    mean, sd = PATIENTS["score"].mean(), PATIENTS["score"].std()
    wanted = [5 * sd, 2.5 * sd, 2, 2, 1, 3]
    numpy.testing.assert_allclose(covariance.diagonal().sqrt().numpy(), wanted)
    numpy.testing.assert_allclose((covariance @ prior.shift)[:2].numpy(), [mean, 0], atol=1e-9)
    apart = data("score ~ age + (1 + age || clinic)").design
    far = PATIENTS["age"].mean() / PATIENTS["age"].std()
    wide = hierarchical.regression(apart).prior.normal
    assert float(unpack(wide.precision)[0, 0]) == pytest.approx(1 / (sd**2 * (25 + 6.25 * far**2)))
    named = hierarchical.regression(design, mean={"age": 1.0}, sd={"age": 0.1}).prior.normal
    assert float(unpack(named.precision)[1, 1]) == pytest.approx(100)
    assert float(named.shift[1]) == pytest.approx(100)
    assert float(unpack(named.precision)[0, 0]) == pytest.approx(1 / (5 * sd) ** 2)


def test_without_an_intercept_priors_reach_the_response() -> None:
    far = PATIENTS.assign(score=PATIENTS["score"] + 500)
    rows = ft.data.from_frame(far, client="clinic", formula="score ~ 0 + sex")
    mean, sd = coefficients(fitted(rows))
    means = far.groupby("sex")["score"].mean().to_numpy()
    numpy.testing.assert_array_less(numpy.abs(mean.numpy() - means), 0.05 * sd.numpy())


def test_a_saved_run_has_its_design(tmp_path: Path) -> None:
    rows = data("score ~ bs(age, 4) + sex + (1 | clinic)")
    run = fitted(rows)
    run.save(tmp_path / "run.safetensors")
    design = ft.data.Design.of_run(tmp_path / "run.safetensors")
    assert design == rows.design == run.design
    again = ft.data.from_frame(PATIENTS, client="clinic", design=design)
    resumed = ft.Run(ft.ep(hierarchical.regression(design)), ft.InProcess(again)).load(tmp_path / "run.safetensors")
    assert torch.equal(posterior(resumed).mean, posterior(run).mean)
    other = data("score ~ bs(age, 4) + sex + (1 | clinic)", levels={"sex": ["m", "f"]})
    with pytest.raises(ValueError, match="Expected a checkpoint of a run with model"):
        ft.Run(ft.ep(hierarchical.regression(other.design)), ft.InProcess(other)).load(tmp_path / "run.safetensors")
    plain = ft.Run(
        ft.ep(hierarchical.linear(hierarchical.normal(6))), ft.InProcess(rows.map(lambda r: (r[0] + 0, r[1])))
    )
    assert plain.design is None
    plain.save(tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match=r"a checkpoint with a design, but .* has none"):
        ft.data.Design.of_run(tmp_path / "plain.safetensors")


def test_bad_models_are_refused() -> None:
    design = data("cured ~ age").design
    with pytest.raises(ValueError, match=r"Expected a family, one of .*'poisson'.*, but got 'gamma'"):
        hierarchical.regression(design, "gamma")
    with pytest.raises(ValueError, match=r"got none with 'binomial'; write 'cured \| trials\(n\) ~"):
        hierarchical.regression(design, "binomial")
    with pytest.raises(ValueError, match="got trials by 'trials' with 'poisson'"):
        hierarchical.regression(data("cured ~ age", trials="trials").design, "poisson")
    with pytest.raises(ValueError, match=r"sd= of coefficients \['Intercept', 'age'\], but got \['weight'\]"):
        hierarchical.regression(design, sd={"weight": 1.0})
    with pytest.raises(ValueError, match="Expected positive sds, but got"):
        hierarchical.regression(design, sd=[1.0, 0.0])
    with pytest.raises(ValueError, match="noise= with the Gaussian family only, but got it with 'poisson'"):
        hierarchical.regression(design, "poisson", noise=1.0)


@pytest.mark.parametrize(
    ("change", "family", "message"),
    [
        ({"visits": -1}, "poisson", "Expected counts"),
        ({"visits": 0.5}, "poisson", "Expected counts"),
        ({"visits": 2}, "logistic", "Expected responses 0 or 1"),
    ],
)
def test_responses_that_do_not_fit_name_client_and_column(change: dict[str, float], family: str, message: str) -> None:
    frame = PATIENTS.astype({"visits": float}).copy()
    frame["visits"] = frame["visits"].clip(upper=1)
    for column, value in change.items():
        frame.loc[frame["clinic"] == 7, column] = value
    rows = ft.data.from_frame(frame, client="clinic", formula="visits ~ age + (1 | clinic)")
    with pytest.raises(ValueError, match=message) as error:
        fitted(rows, family)
    assert "'7'" in str(error.value)
    assert "column 'visits'" in str(error.value)


def test_a_clinic_of_fewer_rows_than_coefficients_takes_part() -> None:
    few = PATIENTS[PATIENTS["clinic"] < 15].groupby("clinic").head(2)
    few = few[(few["clinic"] > 0) | (few.groupby("clinic").cumcount() == 0)]  # one row in the first
    rows = ft.data.from_frame(few, client="clinic", formula="score ~ age*sex + (1 + age | clinic)")
    run = fitted(rows)
    assert bool(coefficients(run)[1].isfinite().all())


def test_known_variances_of_clients_are_weights_of_their_rows() -> None:
    """Eight schools, each with a standard error of its own: the same posterior as with σ_k² by the function."""
    effect = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
    variance = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64) ** 2
    ones = torch.ones(1, 1, dtype=torch.float64)
    rows = ft.data.from_tensors([(ones, y[None]) for y in effect])
    frame = pandas.DataFrame({"school": list("abcdefgh"), "y": effect, "weight": 1 / variance})
    weighted = ft.data.from_frame(frame, client="school", formula="y ~ 1 + (1 | school)", weights="weight")
    prior: Any = {"sd": 5.0, "mean": 0.0, "variance": hierarchical.hyperpriors.log_normal(0.0, 2.0)}
    by_weights = hierarchical.regression(weighted.design, noise=1.0, **prior)
    by_function = hierarchical.linear(hierarchical.normal(1, **prior), noise=lambda sums: variance)
    found = [
        ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled(1e-6))
        for model, data in ((by_weights, weighted), (by_function, rows))
    ]
    one, two = (posterior(run) for run in found)
    torch.testing.assert_close(one.mean, two.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.covariance_matrix, two.covariance_matrix, rtol=1e-8, atol=1e-9)
    for noise in (variance, variance.tolist()):
        with pytest.raises(TypeError, match=r"weights of their rows, 1/variance, with noise=1.0"):
            hierarchical.regression(weighted.design, noise=noise)
