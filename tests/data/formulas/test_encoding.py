"""Encodings that come from elsewhere are checked."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from fedtorch.data.formulas.encoding import Encoding, Levels, Scale, Spline


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (lambda: Encoding(levels={"a": Levels(("x",))}), "2 to 1000 different levels .* of 'a'"),
        (lambda: Encoding(levels={"a": Levels(("x", "x"))}), "different levels"),
        (lambda: Encoding(levels={"a": Levels(("x", "y"), "z")}), "other= as one of the levels"),
        (lambda: Encoding(splines={"a": Spline((5.0,), 0.0, 1.0)}), "ascending knots between the bounds"),
        (lambda: Encoding(splines={"a": Spline((numpy.nan,), 0.0, 1.0)}), "Expected knots"),
        (lambda: Encoding(scales={"a": Scale(0.0, 0.0)}), "a finite mean and a positive sd"),
        (lambda: Encoding(standard={"": Scale(0.0, 1.0)}), "a name in the encoding"),
        (lambda: Encoding(response=Scale(0.0, -1.0)), "a positive sd in the encoding of 'response'"),
        (lambda: Encoding(centres={"a": numpy.inf}), "a finite number in the encoding of 'a'"),
        (lambda: Encoding.from_json('{"centres": {"a": "1"}}'), "a finite number in the encoding of 'a'"),
        (lambda: Encoding.from_json("[]"), "its parts"),
        (lambda: Encoding.from_json('{"levels": []}'), "entries by their names"),
        (lambda: Encoding.from_json('{"levels": {"a": {"names": "xy"}}}'), "names, other in the encoding of 'a'"),
        (lambda: Encoding.from_json('{"levels": {"a": {"names": [1, 2], "other": null}}}'), "levels in the encoding"),
        (lambda: Encoding.from_json('{"scales": {"a": {"mean": "0", "sd": 1}}}'), "a finite mean"),
        (lambda: Encoding.from_json('{"scales": {"a": {"mean": NaN, "sd": 1}}}'), "a finite mean"),
        (
            lambda: Encoding.from_json('{"polynomials": {"a": {"mean": 0, "sd": 1, "coefficients": [[1]]}}}'),
            r"coefficients \(1, 2\) in the encoding of 'a'",
        ),
        (
            lambda: Encoding.from_json('{"polynomials": {"a": {"mean": 0, "sd": 1, "coefficients": 3}}}'),
            "coefficients of polynomials",
        ),
    ],
)
def test_encodings_are_checked(encoding: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoding()
