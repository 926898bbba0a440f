"""Formulas are data: what is on the list is read, anything else is refused by name and nothing is evaluated."""

from __future__ import annotations

import pytest

from fedtorch.data.formulas.grammar import term_name
from fedtorch.data.formulas.parsing import LONGEST, MOST_TERMS, MOST_VARIABLES, parse


def terms(text: str) -> list[str]:
    return [term_name(term) for term in parse(text).terms]


@pytest.mark.parametrize(
    ("right", "wanted"),
    [
        ("a + b", ["Intercept", "a", "b"]),
        ("a + 0", ["a"]),
        ("0 + a", ["a"]),
        ("-1 + a", ["a"]),
        ("a - 1", ["a"]),
        ("a - 1 + 1", ["Intercept", "a"]),
        ("1", ["Intercept"]),
        ("b:a + a", ["Intercept", "a", "b:a"]),
        ("a*b", ["Intercept", "a", "b", "a:b"]),
        ("a*b - a:b", ["Intercept", "a", "b"]),
        ("a*b - b:a", ["Intercept", "a", "b"]),
        ("a*b:c", ["Intercept", "a", "b:c", "a:b:c"]),
        ("(a + b):c", ["Intercept", "a:c", "b:c"]),
        ("(a + b)*c", ["Intercept", "a", "b", "c", "a:c", "b:c"]),
        ("((a))", ["Intercept", "a"]),
        ("a + a + a:a", ["Intercept", "a"]),
        ("bs(x,df=4)+poly( log(z) , degree = 2 )", ["Intercept", "bs(x, 4)", "poly(log(z), 2)"]),
        ("C(a) + log(b) + center(c) + scale(log(d))", ["Intercept", "C(a)", "log(b)", "center(c)", "scale(log(d))"]),
        ("`body mass`:`a+b`", ["Intercept", "body mass:a+b"]),
        ("log + bs:C", ["Intercept", "log", "bs:C"]),  # columns may be called like functions
        ("größe\n+ b", ["Intercept", "größe", "b"]),
    ],
)
def test_terms(right: str, wanted: list[str]) -> None:
    assert terms(f"y ~ {right}") == wanted


@pytest.mark.parametrize(
    ("right", "wanted"),
    [
        ("(1 | h)", ["(1 | h)"]),
        ("(a | h)", ["(1 + a | h)"]),
        ("(0 + a | h)", ["(0 + a | h)"]),
        ("(1 + a || h)", ["(1 + a || h)"]),
        ("(1|h) + (a - 1|h)", ["(1 | h)", "(0 + a | h)"]),
        ("a + (C(a)*b | `the clinic`)", ["(1 + C(a) + b + C(a):b | the clinic)"]),
    ],
)
def test_random_terms(right: str, wanted: list[str]) -> None:
    formula = parse(f"y ~ {right}")
    assert [random.name for random in formula.random] == wanted


def test_responses_trials_and_offsets() -> None:
    formula = parse("log(y) ~ a + offset(log(days)) + offset(z)")
    assert formula.response == ("y", True)
    assert [quantity.name for quantity in formula.offset] == ["log(days)", "z"]
    assert parse("y | trials(n) ~ a").trials == "n"
    assert parse("y|trials(12) ~ a").trials == 12
    assert parse("y | trials(n) ~ a + (b | h)").columns == ("y", "n", "a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y ~ I(__import__('os').getpid())", r"but got the function I\(…\) at character 4"),
        ("y ~ __import__('os').getpid()", r"but got the function __import__\(…\)"),
        ("y ~ log('x')", 'but got "\'" at character 8'),
        ("y ~ 'x'", 'but got "\'" at character 4'),
        ("y ~ I(x)", r"but got the function I\(…\) at character 4"),
        ("y ~ np.log(x)", r"but got '\.' at character 6"),
        ("y ~ x.__class__", r"but got '\.'"),
        ("y ~ x[0]", r"but got '\['"),
        ("y ~ {x}", r"but got '\{'"),
        ("y ~ {1: 2}", r"but got '\{'"),
        ("y ~ (lambda: x)()", r"but got '\('"),
        ("y ~ lambda x: x", "but got 'x' at character 11"),
        ("y ~ x; import os", "but got ';'"),
        ("y ~ 2", "but got '2'"),
        ("y ~ x:2", "but got '2'"),
        ("y ~ x + 0.5", "but got '\\.'"),
        ("y ~ 1e9", "but got 'e9'"),
        ("y ~ x**2", r"but got '\*' at character 6"),
        ("y ~ x^2", r"but got '\^'"),
        ("y ~ x @ z", "but got '@'"),
        ("y ~ x = z", "but got '='"),
        ("y ~ .", r"but got '\.'"),
        ("y ~ a %in% b", "but got '%'"),
        ("y ~ a/b", "but got '/'"),
        ("y ~ exp(x)", r"the function exp\(…\)"),
        ("y ~ eval(x)", r"the function eval\(…\)"),
        ("y ~ C(x, Sum)", "but got ',' at character 7"),
        ("y ~ bs(x)", r"but got '\)'"),
        ("y ~ bs(x, knots=3)", "but got 'knots' .*; expected df there"),
        ("y ~ bs(x, 2)", "; expected df from 3 to 50"),
        ("y ~ bs(x, 999999999999999999999999999)", "expected a whole number"),
        ("y ~ poly(x, 11)", "; expected degree from 1 to 10"),
        ("y ~ log(log(x))", r"but got '\('"),
        ("y ~ log(x + 1)", r"but got '\+'"),
        ("y ~ ｌｏｇ(x)", "another spelling of 'log'"),
        ("y ~ a\u200bb", r"but got '\\u200b'"),
        ("y ~ `a\u202eb`", "the column name .*all its characters can be seen"),
        ("y ~ ``", "the column name ''"),
        ("y ~ `a", "but got '`'"),
        ("y ~ a\x00", r"but got '\\x00'"),
        ("y ~ a # comment", "but got '#'"),
        ("y ~", "but got the end"),
        ("~ x", "but got '~'"),
        ("y", "but got the end"),
        ("", "but got the end"),
        ("y ~ x ~ z", "but got '~'"),
        ("y ~ (1 | h", "but got the end"),
        ("y ~ x + (1 | h):x", "a summand of its own"),
        ("y ~ x - (1 | h)", "a summand of its own"),
        ("y ~ ((1 | h))", "a summand of its own"),
        ("y ~ (1 | a/b)", "but got '/'"),
        ("y ~ (1 | a:b)", "but got ':'"),
        ("y ~ x:(0 + z)", "0, 1 and - stand outside"),
        ("y ~ (a - b):c", "0, 1 and - stand outside"),
        ("y ~ a - b", "takes out a term that is there, which b is not"),
        ("y ~ x - offset(z)", "a summand of its own"),
        ("y | weights(w) ~ x", "only trials"),
        ("y | trials(0) ~ x", "at least 1 trial"),
        ("cbind(a, b) ~ x", "only log"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected a formula as a string, but got list"):
        parse(["y ~ x"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y ~ " + "x" * 100_000, f"at most {LONGEST} characters, but got 100004"),
        ("y ~ " + "(" * 4000 + "x" + ")" * 4000, "at most 20 parentheses"),
        ("y ~ " + "(" * 9000, "at most 20 parentheses"),
        ("y ~ (((((" + "(x | h)" * 1000, "a summand of its own"),
        ("y ~ " + "*".join(f"x{i}" for i in range(40)), f"at most {MOST_VARIABLES} variables in one term"),
        ("y ~ " + "*".join(f"x{i}" for i in range(7)), "variables in one term.* at character 24 "),
        ("y ~ " + ":".join(f"x{i}" for i in range(1000)), f"at most {MOST_VARIABLES} variables in one term"),
        ("y ~ " + ":".join(["(" + "+".join(f"x{i}" for i in range(30)) + ")"] * 2), f"at most {MOST_TERMS} terms"),
        ("y ~ " + "+".join(f"x{i}" for i in range(600)), f"at most {MOST_TERMS} terms"),
    ],
)
def test_size_is_bounded(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
