"""Completed rows are the same in any block and order, keep what is observed, and make the columns of a formula."""

from __future__ import annotations

import pandas
import pytest
import torch

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data.frames.incomplete import incomplete_cells
from fedtorch.models.completion import completed
from fedtorch.models.incomplete_normal import SiteNormal

NAN = torch.nan
CELLS = torch.tensor([[1.0, NAN, 0.5], [NAN, 2.0, -1.0], [0.3, NAN, NAN], [NAN, 1.0, 2.0], [1.0, NAN, 0.5]]).double()
NORMAL = SiteNormal(torch.zeros(3).double(), torch.eye(3).double() + 0.5, torch.ones(3).double())
KEY = random.key(3)


def data() -> ft.data.FederatedData:
    return ft.data.FederatedData(incomplete_cells(CELLS), torch.tensor([4, 1]), ("a", "b"))


def test_the_same_in_any_block() -> None:
    both, count = completed(data().stack([0, 1]), NORMAL, KEY)
    turned, _ = completed(data().select([1, 0]).stack([0, 1]), NORMAL, KEY)
    for k in range(2):
        alone, _ = completed(data().stack([k]), NORMAL, KEY)
        for one, other, third in zip(alone, both, turned):
            assert torch.allclose(one[0], other[k, : int(count[k])], atol=1e-12)
            assert torch.allclose(third[1 - k], other[k], atol=1e-12)


def test_what_is_observed_stays_and_rows_without_response_go() -> None:
    (x, y), count = completed(data().stack([0]), NORMAL, KEY)
    assert count.tolist() == [3]
    assert y.tolist() == [[0.5, -1.0, 2.0]]
    seen = ~CELLS[[0, 1, 3], :2].isnan()
    assert torch.equal(x[0][seen], CELLS[[0, 1, 3], :2][seen])


def test_other_keys_and_other_clients_draw_others() -> None:
    """Two clients have a row in common: their draws of its missing cell differ."""
    (x, _), _ = completed(data().stack([0, 1]), NORMAL, KEY)
    (other, _), _ = completed(data().stack([0, 1]), NORMAL, random.key(4))
    assert x[0, 0, 1] != other[0, 0, 1]
    assert x[0, 0, 1] != x[1, 0, 1]


FRAME = pandas.DataFrame(
    {
        "site": ["n", "n", "s", "s", "s", "n"],
        "age": [50.0, NAN, 60.0, 70.0, NAN, 40.0],
        "dose": [1.0, 2.0, NAN, 4.0, 5.0, NAN],
        "sex": ["f", "m", "m", "f", "m", "f"],
        "y": [1.0, 2.0, 0.5, 3.0, 2.0, 1.0],
    }
)


def test_columns_of_a_formula_follow_from_completed_columns() -> None:
    text = "y ~ age * sex + poly(age, 2) + log(dose) + (1 | site)"
    gaps = ft.data.from_frame(FRAME, client="site", formula=text, missing="impute")
    assert gaps.features == ("age", "sex[T.m]", "log(dose)", "y")
    normal = SiteNormal(torch.tensor([55.0, 0.5, 1.0, 1.5]).double(), torch.eye(4).double(), torch.zeros(4).double())
    (x, y), _ = completed(gaps.stack([1]), normal, KEY, gaps.design)
    assert gaps.design is not None
    names = list(gaps.design.columns)
    original = x[0] @ torch.linalg.inv(gaps.design.back())
    age = original[:, names.index("age")]
    assert age[:2].tolist() == pytest.approx([60.0, 70.0])
    assert torch.allclose(original[:, names.index("age:sex[T.m]")], age * torch.tensor([1.0, 0.0, 1.0]).double())
    filled = FRAME[FRAME["site"] == "s"].assign(
        age=age.numpy(), dose=original[:, names.index("log(dose)")].exp().numpy()
    )
    again, response = gaps.design.rows(filled)
    assert torch.allclose(again, x[0], atol=1e-9)
    assert torch.equal(response, y[0])


def test_cells_of_factors_are_completed_as_shares_of_their_levels() -> None:
    """Not rounded; contrasts and full indicators are of the same shares, which add up to one."""
    frame = FRAME.assign(sex=["f", None, "m", "f", "d", "f"])
    gaps = ft.data.from_frame(
        frame, client="site", formula="y ~ 0 + sex + dose:sex", missing="impute", standardise=False
    )
    assert gaps.features == ("sex[T.f]", "sex[T.m]", "dose", "y")
    assert gaps.missing().loc["n", "sex[T.m]"] == pytest.approx(1 / 3)
    size = torch.zeros(4).double()
    (x, _), _ = completed(gaps.stack([0]), SiteNormal(size, 0.1 * torch.eye(4).double(), size), KEY, gaps.design)
    assert gaps.design is not None
    assert x[0, 0].tolist() == [0, 1, 0, 0, 1, 0]
    shares, products = x[0, 1, :3], x[0, 1, 3:]
    assert float(shares.sum()) == pytest.approx(1)
    assert not bool((shares == shares.round()).any())
    assert products.tolist() == pytest.approx((2 * shares).tolist())  # dose is 2


def test_weights_are_not_imputed() -> None:
    with pytest.raises(ValueError, match="no missing cells, but got 2 in column 'dose'"):
        ft.data.from_frame(FRAME, client="site", formula="y ~ age", weights="dose", missing="impute")


def test_a_column_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="values in column 'age', but all of its cells are missing"):
        ft.data.from_frame(FRAME.assign(age=NAN), client="site", formula="y ~ age", missing="impute")


def test_a_two_level_response_may_be_missing() -> None:
    frame = FRAME.assign(y=["ill", "well", None, "ill", "ill", "well"])
    gaps = ft.data.from_frame(frame, client="site", formula="y ~ age + (1 | site)", missing="impute")
    normal = SiteNormal(torch.tensor([55.0, 0.5]).double(), torch.eye(2).double(), torch.zeros(2).double())
    (_, y), count = completed(gaps.stack([0, 1]), normal, KEY, gaps.design)
    assert count.tolist() == [3, 2]
    assert y.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_frames_without_a_formula_keep_their_gaps_too() -> None:
    gaps = ft.data.from_frame(FRAME, client="site", features=["age", "dose"], target="y", missing="impute")
    assert gaps.features == ("age", "dose", "y")
    assert gaps.missing().loc["all", "any"] == pytest.approx(4 / 6)
    dropped = ft.data.from_frame(FRAME, client="site", features=["age", "dose"], target="y", missing="drop")
    assert dropped.counts.tolist() == [1, 1]


def test_no_clients_are_an_empty_block() -> None:
    """As at a server, whose rows are elsewhere."""
    gaps = ft.data.from_frame(FRAME, client="site", formula="y ~ age + (1 | site)", missing="impute")
    normal = SiteNormal(torch.zeros(2).double(), torch.eye(2).double(), torch.zeros(2).double())
    block = gaps.stack([0])
    (x, y), count = completed(tree.take(block, slice(0, 0)), normal, KEY, gaps.design)
    assert (x.shape, y.shape, count.shape) == ((0, 1, 2), (0, 1), (0,))
