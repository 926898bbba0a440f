"""What a site of the tests brings for formulas: a frame. `SITE` in the environment says which.

`MISSING` says what it does with missing cells.
"""

import os

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.sites import Policy
from support.formulas.agreeing import FRAMES


def regression(design: ft.data.Design, sd: float = 2.0) -> ft.Algorithm:
    """Of a normal response with a known variance."""
    return ft.ep(hierarchical.regression(design, sd=sd, noise=1.0))


missing = os.environ.get("MISSING", "refuse")
frame, client = FRAMES[os.environ.get("SITE", "a")], "clinic"
algorithms = {"it": regression}
policy = Policy(minimum=10, columns=("y", "age", "sbp", "sex"))
