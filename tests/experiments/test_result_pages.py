"""Pages of results say what was kept of the runs and nothing else, and every experiment of a source has one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import common, demo_statistics, result_pages

ROOT = Path(__file__).parents[2]
KEPT = sorted(result_pages.RESULTS.glob("*.json"))
READING = result_pages.Reading(
    smaller="error",
    larger="accuracy",
    reasons=(result_pages.Reason("b: error", "too few rows"), result_pages.Reason("^c", "not credible", True)),
    across="(?P<line>.*) at (?P<column>.*)",
)


def sources() -> list[str]:
    """The experiments that redo a source, as the page about experiments lists them."""
    lines = (ROOT / "docs" / "experiments.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ") and "of our own" not in line]
    return sorted(set(re.findall(r"`([\w.]+)`", "\n".join(table))))


def figures(record: dict) -> list[float]:
    """All figures that are kept of the runs of an experiment."""
    rows = [row for run in record["runs"] for row in run["rows"]]
    return [row[name] for row in rows for name in ("ours", "sd", "published", "published_sd") if name in row]


def test_every_experiment_of_a_source_has_a_page() -> None:
    assert len(sources()) > 15
    assert [name for name in sources() if not (result_pages.RESULTS / f"{name.replace('.', '_')}.json").exists()] == []


def test_every_page_is_made_of_what_is_kept() -> None:
    assert [file.stem for file in sorted(result_pages.RESULTS.glob("*.md"))] == [file.stem for file in KEPT]


@pytest.mark.parametrize("kept", KEPT, ids=[file.stem for file in KEPT])
def test_a_page_says_what_is_kept(kept: Path) -> None:
    record = json.loads(kept.read_text())
    text, _, notes = kept.with_suffix(".md").read_text().partition(result_pages.NOTES)
    assert text == result_pages.page(record, result_pages.reading(record["experiment"]))
    assert kept.read_text() == result_pages.dumps(record)
    assert record["experiment"].replace(".", "_") == kept.stem
    script = ["python", "-m", f"experiments.{record['experiment']}"]
    assert all(run["command"].split()[:3] == script for run in record["runs"])
    assert not any("--smoke" in run["command"] for run in record["runs"])
    for number in re.findall(r"(?<![\d.(])−?\d+\.\d+", notes):
        digits = len(number.partition(".")[2])
        rounded = [f"{abs(value):.{digits}f}" for value in figures(record)]
        assert number in text or number.lstrip("−") in rounded, number


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"metric": "error", "ours": 1.0, "published": 0.8, "published_sd": 0.1}, "agrees"),
        ({"metric": "error", "ours": 1.01, "published": 0.8, "published_sd": 0.1}, "worse"),
        ({"metric": "accuracy", "ours": 1.01, "published": 0.8, "published_sd": 0.1}, "better"),
        ({"metric": "count", "ours": 1.01, "published": 0.8, "published_sd": 0.1}, "differs"),
        ({"metric": "error", "ours": 0.5, "published": 0.8, "sd": 0.2}, "agrees"),
        ({"metric": "error", "ours": 0.5, "published": 0.8, "sd": 0.2, "published_sd": 0.1}, "better"),
        ({"metric": "error", "ours": 0.8049, "published": 0.80}, "agrees"),
        ({"metric": "error", "ours": 0.8049, "published": 0.8, "sd": 0.001}, "worse"),
        ({"metric": "error", "ours": 0.8049, "published": 0.803}, "worse"),
        ({"metric": "rank", "ours": 2, "published": 1}, "differs"),
        ({"metric": "rank", "ours": 1, "published": 1}, "agrees"),
        ({"metric": "sd", "ours": 24.74049, "published": 24.741, "decimals": 3}, "differs"),
        ({"metric": "mean", "ours": 1527.4999999, "published": 1528.0, "decimals": 0}, "agrees"),
        ({"metric": "sd", "ours": 25.6004, "published": 25.6, "decimals": 3}, "agrees"),
        ({"metric": "sd", "ours": 25.6006, "published": 25.6, "decimals": 3}, "differs"),
        ({"metric": "error", "ours": 21.33624589784, "published": 21.336245897848386}, "agrees"),
    ],
)
def test_verdicts(row: dict, word: str) -> None:
    assert result_pages.compared({"setting": "a", **row}, READING) == word


def test_reasons_stand_where_figures_do_not_come_out() -> None:
    row = {"metric": "error", "ours": 1.0, "published": 0.5, "repeats": 3}
    rows = [{"setting": name, **row} for name in "abc"] + [{"setting": "c", **row, "ours": 0.1}]
    rows += [{"setting": "b", **row, "ours": 0.1}, {"setting": "b", **row, "ours": 0.5}]
    run = {"command": "python", "machine": "m", "date": "d", "seconds": 1.0, "processor_seconds": 1.0, "rows": rows}
    text = result_pages.page({"title": "T", "runs": [run]}, READING)
    verdicts = [
        line.split(" | ")[-1].removesuffix(" |") for line in text.splitlines() if line.startswith(("| a", "| b", "| c"))
    ]
    assert verdicts == [
        "worse",
        "does not come out (worse): reason 1",
        "does not come out (worse): reason 2",
        "does not come out (better): reason 2",
        "better",
        "agrees",
    ]
    assert "Of 6 published figures: agrees 1, better 2, worse 3." in text
    assert "1. too few rows\n2. not credible" in text


@pytest.mark.parametrize(
    ("text", "figure", "sd"),
    [("0.081 ± 0.001", 0.081, 0.001), ("0.050 ± 0.000", 0.05, 0.0005), ("9.63 ± 7.50", 9.63, 7.5), ("4 ± 0", 4.0, 0.5)],
)
def test_published_figures_are_read_as_they_are_printed(text: str, figure: float, sd: float) -> None:
    assert common.published(text) == (figure, sd)
    row = common.row("a", "error", [1.0, 2.0], common.published(text))
    assert (row.published, row.published_sd, row.repeats) == (figure, sd, 2)


def test_figures_of_other_data_do_not_compare() -> None:
    how = READING._replace(incomparable=(result_pages.Reason("^other", "other patients"),), remark="A remark.")
    rows = [
        {"setting": name, "metric": "error", "ours": ours, "published": 0.5}
        for name in ("other", "same")
        for ours in (0.5, 0.1)
    ]
    text = result_pages.page({"title": "T", "runs": [{"command": "c", "machine": "m", "date": "d", "rows": rows}]}, how)
    verdicts = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith(("| other", "| same"))]
    assert verdicts == ["does not compare: reason 1 |"] * 2 + ["agrees |", "better |"]
    assert "Of 4 published figures: agrees 1, better 1, does not compare 2." in text
    assert "1. other patients" in text
    assert "digits printed.\nA remark.\n" in text


def test_figures_have_the_digits_that_were_printed() -> None:
    row = {"setting": "a", "metric": "sd", "ours": 25.60012, "published": 25.6, "decimals": 3}
    run = {"command": "python", "machine": "m", "date": "d", "rows": [row]}
    text = result_pages.page({"title": "T", "runs": [run]}, READING)
    assert "| a | sd | 25.600 |  | 1 | 25.600 | agrees |" in text


def test_settings_of_two_parts_make_a_table() -> None:
    rows = [
        {"setting": f"{way} at {n}", "metric": "error", "ours": n, "sd": 0.5, "repeats": 4}
        for way in "ab"
        for n in (1, 2)
    ]
    rows.append({"setting": "alone", "metric": "|seconds|", "ours": 3.0})
    run = {"command": "python", "machine": "m", "date": "d", "seconds": 1.0, "processor_seconds": 1.0, "rows": rows}
    text = result_pages.page({"title": "T", "runs": [run]}, READING)
    assert "| error | 1 | 2 |\n| --- | --- | --- |\n| a | 1 ± 0.5 | 2 ± 0.5 |\n| b | 1 ± 0.5 | 2 ± 0.5 |\n" in text
    assert "|  | \\|seconds\\| |\n| --- | --- |\n| alone | 3 |\n" in text
    assert "the standard deviation of 4 repetitions" in text


@pytest.mark.parametrize(
    ("spreads", "said"),
    [
        ([{}], "of these."),
        ([{"sd": 1.0, "repeats": 3}, {}], "of these; ± is the standard deviation of 3 repetitions."),
        ([{"sd": 1.0}], "of these; ± is what its column says."),
        (
            [{"sd": 1.0, "repeats": 3}, {"sd": 1.0}],
            "of these; ± is the standard deviation of 3 repetitions or what its column says.",
        ),
    ],
)
def test_what_the_spread_is_of(spreads: list[dict], said: str) -> None:
    rows = [{"setting": str(i), "metric": "m", "ours": 1.0, **spread} for i, spread in enumerate(spreads)]
    run = {"command": "python", "machine": "m", "date": "d", "rows": rows}
    assert f"Nothing is published {said}\n" in result_pages.page({"title": "T", "runs": [run]}, READING)


def test_a_script_keeps_its_runs_and_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ["--results", str(tmp_path)]
    file = tmp_path / "demo_statistics.md"
    for seeds in ("1", "2"):
        rows = [common.row("a setting", "error", [float(i) for i in range(int(seeds))])]
        options = common.arguments(demo_statistics.__doc__).parse_args(["--seeds", seeds, *shown])
        common.finish("demo_statistics", rows, options)
        if seeds == "1":
            file.write_text(file.read_text() + "\n## Notes\n\nWhy it is so.\n")
    kept = json.loads((tmp_path / "demo_statistics.json").read_text())
    assert [run["command"].partition(" --results")[0] for run in kept["runs"]] == [
        "python -m experiments.demo_statistics --seeds 2"
    ]
    assert kept["runs"][0]["rows"][0]["repeats"] == 2
    options = common.arguments(demo_statistics.__doc__).parse_args(["--smoke", *shown])
    common.finish("demo_statistics", rows, options)
    text = file.read_text()
    assert text.count("\n## Run ") == 2
    assert text.endswith("\n\n## Notes\n\nWhy it is so.\n")
    assert text.startswith(f"# {demo_statistics.__doc__.splitlines()[0].rstrip('.')}\n")


def test_the_privacy_page_says_of_labels_what_was_measured() -> None:
    kept = json.loads((ROOT / "experiments/results/privacy_attacks.json").read_text())["runs"][-1]["rows"]
    measured = {(row["setting"].removeprefix("labels, "), row["metric"]): row["ours"] for row in kept}
    metrics = ("labels found, mean of 200 steps", "labels found, 200 steps, by both", "accuracy")
    for name in ("docs/explanation/what_is_private.md", "docs/tutorials/vertical.md"):
        lines = [line.strip("| ").split(" | ") for line in (ROOT / name).read_text().splitlines()]
        said = {cells[0]: cells[1:] for cells in lines if (cells[0], "accuracy") in measured}
        assert len(said) >= 4
        for setting, shares in said.items():
            assert shares == [f"{100 * measured[setting, metric]:.0f} %" for metric in metrics], setting
    assert measured["z, ρ = 10", "R² of g, T = 100"] == pytest.approx(0.99, abs=0.005)
