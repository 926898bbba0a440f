"""The report shows the share of missing cells by client, also of rows that were completed or left out since."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from report.test_report import harmless

import fedtorch as ft
from fedtorch.models import hierarchical

FRAME = pandas.DataFrame(
    {"site": ["north", "north", "north", "south"] * 5, "age": [1.0, None, 3.0, 2.5] * 5, "y": [1.0, 2.0, 3.0, 2.0] * 5}
)


@pytest.mark.parametrize("missing", ["drop", "impute"])
def test_missing_cells_are_shown(tmp_path: Path, missing: str) -> None:
    data = ft.data.from_frame(FRAME, client="site", formula="y ~ age + (1 | site)", missing=missing)
    algorithm = ft.normal_em(2, columns=2) if missing == "impute" else ft.ep(hierarchical.regression(data.design))
    run = ft.run(algorithm, ft.InProcess(data), rounds=2)
    texts = harmless(ft.report.write(run, tmp_path).read_text()).texts
    shown = json.loads((tmp_path / "about.json").read_text())["missing"]
    assert shown["columns"] == ["rows", *(["y", "age"] if missing == "drop" else ["age", "y"]), "any"]
    assert [(row[0], row[-1]) for row in shown["rows"]] == [
        ("north", pytest.approx(1 / 3)),
        ("south", 0.0),
        ("all", 0.25),
    ]
    assert {"Missing cells", "33.3 %", "25 %"} <= {text.strip() for text in texts}


def test_complete_rows_have_no_missing_section(tmp_path: Path) -> None:
    data = ft.data.from_frame(FRAME.dropna(), client="site", formula="y ~ age + (1 | site)")
    run = ft.run(ft.ep(hierarchical.regression(data.design)), ft.InProcess(data), rounds=2)
    assert "Missing cells" not in harmless(ft.report.write(run, tmp_path).read_text()).texts
