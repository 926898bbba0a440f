"""The trial of tides: which rows are known, mogptk's errors, and that it says how to get the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.trials import bramblemet


def weeks() -> list[tuple[np.ndarray, np.ndarray]]:
    days = np.arange(0, 7, 1 / 24)
    return [(days, 3 + 0.1 * days + np.cos(2 * np.pi * bramblemet.TIDE * days + k)) for k in range(4)]


def test_rows_that_are_known() -> None:
    stations = bramblemet.split(weeks(), seed=0)
    for each, missing in zip(stations, bramblemet.STATIONS.values()):
        at = each.x[each.known, 0]
        assert not bool(((at >= missing - 1) & (at <= missing)).any())
        assert 0 < len(at) <= 17  # of 168
        torch.testing.assert_close(each.trend + each.scale * each.y, each.depth)
    assert not torch.equal(stations[0].known, bramblemet.split(weeks(), seed=1)[0].known)


def test_errors_are_of_the_rows_that_are_not_known() -> None:
    stations = bramblemet.split(weeks(), seed=0)
    found = bramblemet.errors(stations, [each.y + 0.1 * ~each.known / each.scale for each in stations])
    assert found["mean absolute error"] == pytest.approx(0.1)
    assert found["root mean squared error"] == pytest.approx(0.1)
    assert 2 < found["mean absolute percentage error"] < 7


def test_missing_data_end_with_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="git clone"):
        bramblemet.main(["--smoke", "--mogptk", str(tmp_path)])
