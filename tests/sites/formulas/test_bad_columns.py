"""What stops a site names its column and a remedy at the server, and no client, row or value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.loopback import Clock, Loopback

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.sites import Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import sites as meeting


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def frame(**changes: Any) -> pd.DataFrame:
    """Falls on a ward, of which the fourth row is changed."""
    draw = np.random.default_rng(0)
    made = pd.DataFrame({"ward": "secret ward", "age": draw.normal(60, 10, 90), "falls": draw.poisson(2.0, 90)})
    made = made.assign(days=7.0, w=1.0, n=9).astype({"falls": float, "n": float})
    for column, value in changes.items():
        made.loc[3, column] = value
    return made


def offered(design: ft.data.Design, family: str) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design, family))


def hosted(**changes: Any) -> Any:
    frames = {"a": frame().assign(ward="a"), "b": frame(**changes)}
    return Loopback({name: SiteConfiguration.of_frame(each, "ward", {"it": offered}) for name, each in frames.items()},
                    None)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "right", "more", "message"),
    [
        ({"age": np.inf}, "age", {}, r"'b': the site's column 'age' has others than finite numbers; correct them"),
        ({"w": -4321.0}, "age", {"weights": "w"}, "'b': the site's column 'w' has others than weights of at least 0"),
        ({"days": -4321.0}, "age + offset(log(days))", {}, r"column 'days' has others than positive numbers for log"),
        ({}, "age", {"offset": "exposure"}, "'a', 'b': the site has no column 'exposure' that the formula reads"),
        ({"n": 4321.5}, "age", {"trials": "n"}, "'b': the site's column 'n' has others than numbers of trials"),
    ],
)
def test_a_formula_that_a_site_cannot_read(
    changes: dict[str, float], right: str, more: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        agree(hosted(**changes), ["a", "b"], f"falls ~ {right} + (1 | ward)", client="ward", **more)
    assert "secret" not in str(error.value)
    assert "4321" not in str(error.value)


def test_responses_that_the_family_does_not_have() -> None:
    host = hosted(falls=-4321.0)
    design = agree(host, ["a", "b"], "falls ~ age + (1 | ward)", client="ward")
    remote = Remote(host, ["a", "b"], "it", {"family": "poisson"}, quorum=0.5)
    ft.run(offered(design, "poisson"), remote, rounds=1, progress=False)
    assert remote.troubles == {
        "b": "the site could not begin: the site has others than counts; correct them, or take another family; y is "
        "the column 'falls'"
    }


@pytest.mark.filterwarnings("ignore:Expected posterior sds below the prior's")  # of the variance over wards
def test_a_response_that_is_the_same_everywhere_is_fitted_and_said() -> None:
    frames = {name: frame().assign(ward=name, falls=0.0) for name in "ab"}
    host: Any = Loopback(
        {name: SiteConfiguration.of_frame(each, "ward", {"it": offered}) for name, each in frames.items()}, None
    )
    design = agree(host, ["a", "b"], "falls ~ age + (1 | ward)", client="ward")
    run = ft.run(offered(design, "logistic"), Remote(host, ["a", "b"], "it", {"family": "logistic"}), rounds=2,
                 progress=False)  # fmt: skip
    with pytest.warns(RuntimeWarning, match="'Intercept' may do so"):
        run.summary(tolerance=torch.inf)
