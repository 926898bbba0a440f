"""A frame of people at three sites, with columns of all kinds."""

from __future__ import annotations

from typing import Any

import numpy
import pandas

import fedtorch as ft


def people(rows: int = 60) -> pandas.DataFrame:
    """Return some people."""
    draw = numpy.random.default_rng(1)
    return pandas.DataFrame(
        {
            "site": draw.choice(["north", "south", "west"], rows),
            "age": draw.normal(60, 12, rows),
            "sbp": draw.gamma(30, 4, rows),
            "sex": draw.choice(["female", "male"], rows),
            "stage": draw.choice([1, 2, 10], rows),
            "drug": pandas.Categorical(draw.choice(["b", "a", "c"], rows), categories=["c", "a", "b"]),
            "smoker": draw.random(rows) < 0.4,
            "days": draw.integers(1, 30, rows),
            "y": draw.normal(size=rows),
        }
    )


PEOPLE = people()


def design(formula: str, **settings: Any) -> ft.data.Design:
    """Return the design of a formula for them."""
    made = ft.data.from_frame(PEOPLE, client="site", formula=formula, **settings).design
    assert made is not None
    return made
