"""Frames of three clinics that agree on a design."""

from __future__ import annotations

import numpy
import pandas

from fedtorch.data.agreement.server import Request

REQUEST = Request("y ~ age + bs(sbp, 5) + sex + (1 | clinic)", group="clinic", other={"sex": "x"})


def frame(clinic: str, rows: int, seed: int) -> pandas.DataFrame:
    """Return the patients of a clinic, of which three are of a rare level."""
    draws = numpy.random.default_rng(seed)
    age, sbp = draws.normal(60.0, 9.0, rows), draws.gamma(20.0, 6.0, rows)
    sex = ["rare"] * 3 + draws.choice(["f", "m"], rows - 3).tolist()
    y = age / 10 + draws.normal(size=rows)
    return pandas.DataFrame({"clinic": clinic, "age": age, "sbp": sbp, "sex": sex, "y": y})


FRAMES = {name: frame(name, 60 + 20 * i, i) for i, name in enumerate("abc")}
