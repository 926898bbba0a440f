"""Frames whose columns are taken as they are; formulas are tested in `formulas/`."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
import pytest
import torch

from fedtorch.data import from_frame


def frame(**columns: Any) -> pandas.DataFrame:
    table = {
        "site": ["b", "a", "b", "c", "a"],
        "age": [1, 2, 3, 4, 5],
        "dose": [0.5, 1.5, 2.5, 3.5, 4.5],
        "sick": [True, False, True, True, False],
    }
    return pandas.DataFrame({**table, **columns}, index=[10, 11, 12, 13, 14])


def test_from_frame_groups_by_client_in_order_of_appearance() -> None:
    data = from_frame(frame(), client="site", features=["age", "sick"], target="dose")
    assert data.names == ("b", "a", "c")
    assert data.features == ("age", "sick")
    assert data.counts.tolist() == [2, 2, 1]
    assert data[0][0].tolist() == [[1, 1], [3, 1]]
    assert data[1][1].tolist() == [1.5, 4.5]
    assert data.rows[0].dtype == data.rows[1].dtype == torch.float32
    wide = from_frame(frame(), client="site", features=["age"], target="dose", dtype=torch.float64)
    assert wide.rows[1].dtype == torch.float64


@pytest.mark.parametrize(
    ("target", "codes"),
    [
        ([7, 5, 7, 9, 5], [1, 0, 1, 2, 0]),
        ([True, False, True, True, True], [1, 0, 1, 1, 1]),
        (["no", "yes", "no", "maybe", "no"], [1, 2, 1, 0, 1]),
        (numpy.array(["no", "yes", "no", "maybe", "no"], dtype=object), [1, 2, 1, 0, 1]),
        (pandas.Categorical(list("xyxyy"), categories=["z", "y", "x"]), [2, 1, 2, 1, 1]),
        (pandas.array([3, 1, 3, 1, 1], dtype="Int64"), [1, 0, 1, 0, 0]),
    ],
)
def test_targets_become_class_codes(target: Any, codes: list[int]) -> None:
    table = frame(target=target)
    rows = from_frame(table, client="site", features=["age"], target="target").rows
    assert rows[1].dtype == torch.int64
    assert dict(zip(rows[0][:, 0].tolist(), rows[1].tolist())) == dict(zip([1, 2, 3, 4, 5], codes))


def test_clients_may_be_numbers() -> None:
    assert from_frame(frame(site=[3, 1, 3, 2, 1]), client="site", features=["age"], target="dose").names == (
        "3",
        "1",
        "2",
    )


@pytest.mark.parametrize(
    ("table", "features", "error", "message"),
    [
        (frame(), ["age", "weight"], ValueError, r"\['weight'\] are not in the frame; it has"),
        (frame(age=[1, 2, None, 4, 5]), ["age"], ValueError, "column 'age' of client 'b', row 12"),
        (frame(site=["b", None, "b", "c", "a"]), ["age"], ValueError, "column 'site' of client .*, row 11"),
        (frame(dose=[1.0, 2, 3, 4, None]), ["age"], ValueError, "column 'dose' of client 'a', row 14"),
        (frame(age=[1, 2, 3, numpy.inf, 5]), ["age"], ValueError, "field '0' of client 'c', row 0"),
        (frame(age=list("abcde")), ["age"], TypeError, "numeric or boolean features, .* 'age'; encode it"),
        (frame(age=[1j] * 5), ["age"], TypeError, "numeric or boolean features, but got complex128"),
        (frame(dose=[1, "a", 2, 3, 4]), ["age"], TypeError, "mixed types in column 'dose'"),
        (frame().iloc[:0], ["age"], ValueError, "empty frame"),
        (frame(site=[1, "1", 1, 1, 1]), ["age"], ValueError, "distinct client names, but got '1'"),
    ],
)
def test_bad_frames_are_refused(
    table: pandas.DataFrame, features: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_frame(table, client="site", features=features, target="dose")
