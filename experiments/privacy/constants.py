"""What round constants cost: fits by means and sds that clients agree on, beside fits by exact ones.

With `minimum=` clients tell histograms, and means and sds that follow from these are round numbers. A fit goes back
to the columns' own scale, so that without priors nothing changes but rounding. Default priors are in units of the
sds: they change as much as these. Rows: diabetes progression (scikit-learn) at clients that are drawn at random, with
a level each: a linear model, and a logistic one of more than the median, with intercepts that differ.

- *sds off*: by how much a constant differs from the exact one, at most, in exact sds.
- *estimates moved*: by how much a coefficient on its own scale differs, at most, in exact standard errors.
- *errors changed*: by which part a standard error (a posterior sd) differs, at most.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy
from sklearn.datasets import load_diabetes

import fedtorch as ft
from experiments import common
from fedtorch.federation.algorithms.maximum_likelihood import maximised
from fedtorch.models import hierarchical

FORMULA = "{} ~ age + bmi + bp + s1 + s2 + s3 + s4 + s5 + s6 + (1 | clinic)"
FAMILIES = {"linear": ("target", "gaussian"), "logistic": ("high", "logistic")}


def frame(clients: int, seed: int) -> Any:
    """Rows in the units of the columns, of clients that are drawn at random, with a level each."""
    rows, draws = load_diabetes(as_frame=True, scaled=False).frame, numpy.random.default_rng(seed)
    clinic = draws.permutation(len(rows)) % clients
    rows = rows.assign(target=rows["target"] + 40 * draws.normal(size=clients)[clinic])
    high = (rows["target"] > rows["target"].median()).astype(int)
    return rows.assign(clinic=[f"clinic {k}" for k in clinic], high=high)


def fitted(data: ft.data.FederatedData, family: str, way: str) -> Any:
    """The table of a fit, by maximum likelihood or under default priors."""
    assert data.design is not None
    model = hierarchical.regression(data.design, family)
    algorithm = ft.maximum_likelihood(model) if way == "without priors" else ft.ep(model)
    until = maximised(1e-14) if way == "without priors" else None
    run = ft.run(algorithm, ft.InProcess(data), rounds=100 if until else 25, until=until, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few clients say little of how far they differ
        table = run.summary(**({} if until else {"tolerance": numpy.inf}))
    return table.loc[list(data.design.columns)]


def compared(clients: int, family: str, way: str, seed: int) -> dict[str, float]:
    """How much rounding changes."""
    response, kind = FAMILIES[family]
    settings: dict[str, Any] = {"client": "clinic", "formula": FORMULA.format(response)}
    exact, agreed = (ft.data.from_frame(frame(clients, seed), minimum=minimum, **settings) for minimum in (None, 10))
    scales = [data.design.encoding.standard for data in (exact, agreed) if data.design is not None]
    off = [abs(scales[1][name].sd / scale.sd - 1) for name, scale in scales[0].items()]
    first, second = (fitted(data, kind, way) for data in (exact, agreed))
    return {
        "sds off": max(off),
        "estimates moved": float(((second["estimate"] - first["estimate"]) / first["sd"]).abs().max()),
        "errors changed": float((second["sd"] / first["sd"] - 1).abs().max()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and print a table."""
    options = common.arguments(__doc__).parse_args(argv)
    rows = []
    for clients in (4,) if options.smoke else (2, 4, 8):
        for family in FAMILIES:
            for way in ("without priors", "default priors"):
                found = [compared(clients, family, way, seed) for seed in range(options.seeds)]
                setting = f"{clients} clients, {family}, {way}"
                rows += [common.row(setting, name, values) for name, values in common.by_metric(found).items()]
    common.show_rows(f"By round constants beside exact ones, minimum = 10 ({common.machine()})", rows, ".2e")
    common.finish("privacy.constants", rows, options)


if __name__ == "__main__":
    main()
