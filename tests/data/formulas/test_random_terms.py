"""Random terms become columns that differ by client, or are refused by name."""

from __future__ import annotations

import pytest

from fedtorch.data.formulas.coding import columns
from fedtorch.data.formulas.design import random_columns
from fedtorch.data.formulas.encoding import Encoding, Levels
from fedtorch.data.formulas.parsing import parse

ENCODING = Encoding(levels={"sex": Levels(("f", "m"))})


def terms(right: str) -> tuple[tuple[int, ...], bool]:
    formula = parse(f"y ~ {right}")
    return random_columns(formula, [column.name for column in columns(formula.terms, ENCODING)], ENCODING, "h")


@pytest.mark.parametrize(
    ("right", "wanted"),
    [
        ("age", ((), False)),
        ("age + (1 | h)", ((0,), False)),
        ("age + (age | h)", ((0, 1), True)),
        ("age + (1 + age || h)", ((0, 1), False)),
        ("age + (0 + age | h)", ((1,), False)),
        ("age + (1 | h) + (0 + age | h)", ((0, 1), False)),
        ("age + sex + (sex | h)", ((0, 2), True)),
        ("age + sex + (0 + age + age:sex | h) + age:sex", ((1, 3), True)),
        ("0 + sex + (0 + sex | h)", ((0, 1), True)),
        ("age + (age + 1 | h)", ((0, 1), True)),
    ],
)
def test_which_columns(right: str, wanted: tuple[tuple[int, ...], bool]) -> None:
    assert terms(right) == wanted


@pytest.mark.parametrize(
    ("right", "message"),
    [
        ("age + (1 | ward)", r"by the column of clients, 'h', but got \(1 \| ward\)"),
        ("age + (0 + bmi | h)", r"coefficients of \(0 \+ bmi \| h\), but got none for \['bmi'\].*add bmi"),
        (
            "0 + age + (1 | h)",
            r"of \(1 \| h\), but got none for \['Intercept'\].*add 1 as a fixed effect too, which is there",
        ),
        ("age + sex + (0 + sex | h)", r"none for \['sex\[f\]', 'sex\[m\]'\]"),
        ("age + (1 | h) + (1 + age | h)", r"each coefficient in one random term, but got \['Intercept'\] in several"),
        (
            "age + bmi + (1 + age | h) + (0 + bmi | h)",
            r"all correlated or all not.*of \(1 \+ age \| h\), \(0 \+ b",
        ),
        ("age + (0 | h)", r"of \(0 \| h\), but got none"),
    ],
)
def test_what_no_hierarchy_expresses_is_refused_by_name(right: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms(right)
