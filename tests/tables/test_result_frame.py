"""Frames of results write themselves as tables, with names escaped and numbers rounded to what is known of them."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pandas as pd
import pytest

from fedtorch.tables.result_frame import ResultFrame

NASTY = "a|b_c & <i>*50 %*</i> {x} \\ [`t`] ^~$#\nnext"


def frame(names: list[str], **columns: list[object]) -> ResultFrame:
    return ResultFrame.of(columns, names, "coefficient", level=0.9)


def test_a_row_is_rounded_to_two_digits_of_its_sd() -> None:
    table = frame(
        ["small", "large"],
        estimate=[0.123456, -1234.56],
        sd=[0.00456, 210.0],
        low=[0.1, -1600.0],
        high=[0.13, -800.0],
        n=[10, 2000],
        r_hat=[1.00049, 1.2],
        ess=[399.6, 12.0],
    )
    rows = table.to_markdown().splitlines()
    assert rows[0] == "| coefficient | estimate | sd | 90 % interval | n | R-hat | ESS |"
    assert rows[2] == "| small | 0.1235 | 0.0046 | 0.1000 to 0.1300 | 10 | 1.000 | 400 |"
    assert rows[3] == "| large | -1235 | 210 | -1600 to -800 | 2000 | 1.200 | 12 |"


def test_point_estimates_have_three_digits_and_no_interval() -> None:
    nothing = [math.nan]
    table = frame(["mean"], estimate=[1.23456], sd=nothing, low=nothing, high=nothing)
    assert table.to_markdown().splitlines()[-1] == "| mean | 1.23 | – | – |"


def test_names_are_escaped_in_html() -> None:
    text = frame([NASTY], estimate=[-1.5], sd=[0.5]).to_html(caption="5 < 6 & more")
    parsed = ElementTree.fromstring(text)
    assert parsed.find("caption").text == "5 < 6 & more"  # type: ignore[union-attr]
    assert parsed.find("tbody/tr/th").text == " ".join(NASTY.split())  # type: ignore[union-attr]


def test_names_are_escaped_in_latex() -> None:
    text = frame([NASTY, "[T.m]"], estimate=[-1.5, 2.0], sd=[0.5, 0.5]).to_latex(caption="50 %")
    (row,) = [line for line in text.splitlines() if "next" in line]
    assert row == (
        r"a\textbar{}b\_c \& \textless{}i\textgreater{}*50 \%*\textless{}/i\textgreater{} \{x\} \textbackslash{} "
        r"[`t`] \textasciicircum{}\textasciitilde{}\$\# next & $-$1.50 & 0.50 \\"
    )
    assert "{}[T.m] & 2.00" in text, "LaTeX takes [ after \\\\ as an argument"
    assert r"\caption{50 \%}" in text


def test_names_are_escaped_in_markdown() -> None:
    markdown_it = pytest.importorskip("markdown_it")
    text = frame([NASTY], estimate=[-1.5], sd=[0.5]).to_markdown()
    rendered = markdown_it.MarkdownIt().enable("table").render(text).replace("\n", " ")
    shown = "".join(ElementTree.fromstring(f"<p>{rendered}</p>").itertext())
    assert " ".join(NASTY.split()) in " ".join(shown.split())


def test_a_part_of_a_frame_knows_its_level_and_has_all_of_its_index() -> None:
    index = pd.MultiIndex.from_product([["ward 1", "ward 2"], ["age"]], names=["site", "coefficient"])
    table = ResultFrame.of({"estimate": [1.0, 2.0], "low": [0.0, 1.0], "high": [2.0, 3.0]}, index, level=0.5)
    part = table.loc[["ward 2"]]
    assert part.to_markdown().splitlines()[::2] == [
        "| site | coefficient | estimate | 50 % interval |",
        "| ward 2 | age | 2.00 | 1.00 to 3.00 |",
    ]


def test_intervals_of_two_kinds_stand_beside_each_other() -> None:
    table = frame(["a"], estimate=[1.0], low=[0.5], high=[1.5], new_low=[-1.0], new_high=[3.0])
    (header, *_) = table.to_markdown().splitlines()
    assert header == "| coefficient | estimate | 90 % interval | 90 % interval of a new response |"
