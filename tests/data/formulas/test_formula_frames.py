"""Frames of any kind become data with a design, which stays as long as x does."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy
import pandas
import pytest
import torch
from support.formulas.people import PEOPLE

import fedtorch as ft


def test_frames_of_others_are_read() -> None:
    class Other:
        """What polars offers, without being of pandas."""

        def __dataframe__(self, *args: Any, **settings: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return PEOPLE[["site", "age", "sex", "y"]].__dataframe__(*args, **settings)

    class Third:
        """What some offer beside it."""

        def to_pandas(self) -> pandas.DataFrame:
            return PEOPLE

    same = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age + sex")
    data = ft.data.from_frame(Other(), client="site", formula="y ~ age + sex")
    assert data.design == same.design
    assert torch.equal(data.rows[0], same.rows[0])
    assert ft.data.from_frame(Third(), client="site", formula="y ~ age + sex").design == same.design
    with pytest.raises(TypeError, match="offers __dataframe__, but got dict"):
        ft.data.from_frame({"y": [1]}, client="site", formula="y ~ 1")


def test_dropping_is_asked_for() -> None:
    holes = PEOPLE.assign(age=PEOPLE["age"].where(PEOPLE["age"] > 50), sbp=numpy.nan)
    data = ft.data.from_frame(holes, client="site", formula="y ~ age", missing="drop")
    assert int(data.counts.sum()) == int((PEOPLE["age"] > 50).sum())
    again = ft.data.from_frame(holes, client="site", design=data.design, missing="drop")
    assert torch.equal(again.rows[0], data.rows[0])
    with pytest.raises(ValueError, match=r"missing= as one of .'refuse', 'drop', 'impute'., but got 'mean'"):
        ft.data.from_frame(holes, client="site", formula="y ~ age", missing="mean")
    x, _ = data.design.rows(holes, missing=True)
    assert int(x.isnan().sum()) == int((PEOPLE["age"] <= 50).sum())


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(TypeError, match="a formula, or features and target, but got neither"):
        ft.data.from_frame(PEOPLE, client="site")
    with pytest.raises(TypeError, match=r"Expected \['weights'\] with a formula"):
        ft.data.from_frame(PEOPLE, client="site", features=["age"], target="y", weights="days")
    with pytest.raises(TypeError, match="one of a formula, a design, and features"):
        ft.data.from_frame(PEOPLE, client="site", features=["age"], target="y", formula="y ~ age")
    with pytest.raises(TypeError, match=r"numeric or boolean features.*formula="):
        ft.data.from_frame(PEOPLE, client="site", features=["sex"], target="y")


def test_data_keep_their_design_as_long_as_x_is_the_same() -> None:
    data = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age + sex", weights="days")
    training, validation = data.split(0.5, seed=0)
    for other in (training, validation, data.select([1]), data.pool(), data.to(dtype=torch.float32)):
        assert other.design is data.design
        assert other.features == data.design.columns
    assert data.map(lambda rows: (rows[0], rows[1] * 2)).design is data.design
    changed = data.map(lambda rows: (rows[0] * 2, rows[1]))
    assert changed.design is None
    assert changed.features == ()
    with pytest.raises(ValueError, match="Expected the 3 columns of the design in x, but got"):
        dataclasses.replace(data, rows=data.rows[0][:, :2], features=())


def test_a_file_of_rows_keeps_the_design(tmp_path: Any) -> None:
    for settings in ({}, {"weights": "days", "offset": "age"}):
        data = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age + bs(sbp, 4)", **settings)
        data.to_file(tmp_path / "rows.safetensors")
        again = ft.data.FederatedData.from_file(tmp_path / "rows.safetensors")
        assert again.design == data.design
        assert again.names == data.names
        for old, new in zip(ft.tree.leaves(data.rows), ft.tree.leaves(again.rows)):
            assert torch.equal(old, new)
