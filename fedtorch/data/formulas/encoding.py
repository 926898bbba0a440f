"""The shared encoding of different clients' rows for one model.

An encoding is agreed once, from the rows of one place or by sums over many, and saved with the run: levels of factors,
knots of splines, coefficients of polynomials, means and scales. It is data: `Encoding.from_json` checks all of it.

>>> encoding = Encoding(levels={"sex": Levels(("f", "m"))}, splines={"bs(sbp, 4)": Spline((120.0,), 90.0, 180.0)})
>>> Encoding.from_json(encoding.to_json()) == encoding
True
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

MOST_LEVELS = 1000
_LONGEST_NAME = 1000
# sizes of nonzero numbers; others could make rows overflow, which would disclose their size
_SMALLEST, _LARGEST = 1e-100, 1e100


class Levels(NamedTuple):
    """The values of a factor, as strings."""

    names: tuple[str, ...]  # the first is the reference
    other: str | None = None  # one of them, which replaces every other value


class Spline(NamedTuple):
    """The knots of a cubic spline."""

    knots: tuple[float, ...]  # within the bounds, ascending
    lower: float
    upper: float  # values beyond a bound count as the bound


class Polynomial(NamedTuple):
    """Polynomials in z = (value − mean) / sd that are orthogonal over the rows of the agreement."""

    mean: float
    sd: float
    coefficients: tuple[tuple[float, ...], ...]  # (degree, degree + 1), of 1, z, z², …: of degree 1 first


class Scale(NamedTuple):
    """A centre and a scale: (value − mean) / sd."""

    mean: float
    sd: float


@dataclass(frozen=True)
class Encoding:
    """The shared encoding of rows: of columns by their names, of variables and coefficients by theirs."""

    levels: Mapping[str, Levels] = field(default_factory=dict)  # by column: these columns are factors
    splines: Mapping[str, Spline] = field(default_factory=dict)  # by variable, "bs(sbp, 4)"
    polynomials: Mapping[str, Polynomial] = field(default_factory=dict)  # by variable, "poly(age, 2)"
    scales: Mapping[str, Scale] = field(default_factory=dict)  # by variable, "center(age)" or "scale(age)"
    standard: Mapping[str, Scale] = field(default_factory=dict)  # by coefficient: columns of x within the fit
    centres: Mapping[str, float] = field(default_factory=dict)  # by coefficient: means that are not subtracted, in sds
    response: Scale | None = None  # mean and sd of the response minus its offsets; like `centres` for default priors

    def __post_init__(self) -> None:
        for part in (self.levels, self.splines, self.polynomials, self.scales, self.standard, self.centres):
            for name, value in part.items():
                _check(bool(isinstance(name, str) and name and len(name) <= _LONGEST_NAME), name, "a name")
                _CHECKS.get(type(value), _check_number)(name, value)
        if self.response is not None:
            _check_scale("response", self.response)

    def to_json(self) -> str:
        """Return the encoding as JSON."""
        parts = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return json.dumps(
            {
                name: part
                if part is None
                else part._asdict()
                if name == "response"
                else {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in part.items()}
                for name, part in parts.items()
            },
            allow_nan=False,
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read and check an encoding.

        Raises:
            ValueError: not an encoding; the message names the part and the entry.
        """
        try:
            parts = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"Expected an encoding as JSON, but got something else: {error}") from None
        _check(isinstance(parts, dict) and set(parts) <= {*_KINDS, "response"}, "encoding", "its parts", parts)
        read: dict[str, Any] = {}
        for part, kind in _KINDS.items():
            entries = parts.get(part, {})
            _check(isinstance(entries, dict), part, "entries by their names", entries)
            read[part] = {name: _read(kind, name, entry) for name, entry in entries.items()}
        response = parts.get("response")
        return cls(**read, response=None if response is None else _read(Scale, "response", response))


_KINDS: dict[str, Any] = {
    "levels": Levels, "splines": Spline, "polynomials": Polynomial, "scales": Scale, "standard": Scale,
    "centres": float,
}  # fmt: skip


def _read(kind: Any, name: str, entry: Any) -> Any:
    if kind is float:
        _check_number(name, entry)
        return float(entry)
    _check(isinstance(entry, dict) and set(entry) == set(kind._fields), name, f"{', '.join(kind._fields)}", entry)
    value = kind(**{key: _tuples(part) for key, part in entry.items()})
    _CHECKS[kind](name, value)
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _check(good: bool, name: Any, wanted: str, got: Any = "") -> None:
    if not good:
        raise ValueError(
            f"Expected {wanted} in the encoding of {str(name)[:80]!r}, but got {str(got)[:200] or 'something else'}; "
            f"agree on the encoding again, by numbers that are 0 or from {_SMALLEST:g} to {_LARGEST:g} in size"
        )


def _finite(*values: Any) -> bool:
    """Return whether all values are numbers, zero or from _SMALLEST to _LARGEST in size."""
    return all(
        isinstance(value, (int, float)) and (value == 0 or _SMALLEST <= abs(value) <= _LARGEST) for value in values
    )


def _check_levels(name: str, value: Levels) -> None:
    _check(isinstance(value.names, tuple) and all(isinstance(level, str) for level in value.names), name, "levels")
    _check(
        2 <= len(value.names) <= MOST_LEVELS and len(set(value.names)) == len(value.names),
        name, f"2 to {MOST_LEVELS} different levels", list(value.names[:20]),
    )  # fmt: skip
    _check(value.other is None or value.other in value.names, name, "other= as one of the levels", value.other)


def _check_spline(name: str, value: Spline) -> None:
    _check(isinstance(value.knots, tuple) and _finite(*value.knots, value.lower, value.upper), name, "knots", value)
    ordered = [value.lower, *value.knots, value.upper]
    _check(
        value.lower < value.upper and ordered == sorted(ordered), name, "ascending knots between the bounds", ordered
    )


def _check_polynomial(name: str, value: Polynomial) -> None:
    _check_scale(name, Scale(value.mean, value.sd))
    rows = value.coefficients
    _check(isinstance(rows, tuple) and len(rows) >= 1, name, "coefficients of polynomials", rows)
    good = all(isinstance(row, tuple) and len(row) == len(rows) + 1 and _finite(*row) for row in rows)
    _check(good, name, f"coefficients ({len(rows)}, {len(rows) + 1})", rows)


def _check_scale(name: str, value: Scale) -> None:
    _check(_finite(*value) and value.sd > 0, name, "a finite mean and a positive sd", tuple(value))


def _check_number(name: str, value: Any) -> None:
    _check(_finite(value), name, "a finite number", value)


_CHECKS: dict[type, Callable[[str, Any], None]] = {
    Levels: _check_levels, Spline: _check_spline, Polynomial: _check_polynomial, Scale: _check_scale,
}  # fmt: skip
