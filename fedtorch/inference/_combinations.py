"""Parser of linear combinations of named coefficients: sums, products with numbers and parentheses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Linear = dict[str, float]  # by name; "" is the constant

_NUMBER = re.compile(r"(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_ENDS = "+-*/)"  # characters that may follow a name
_DEEPEST = 20  # nesting of parentheses
_SHOWN = 12  # names in an error message


def linear(text: str, names: Sequence[str]) -> Linear:
    """Return the weights of the names in a text such as `"age - 2*sex[T.male]"`.

    The longest matching name is taken, so that names may contain signs and blanks; in backticks a name may be a number.

    Raises:
        ValueError: text that is not a linear combination of these names.

    >>> linear("(age + sex[T.m]) / 2 - `0`", ["age", "sex[T.m]", "0"])
    {'age': 0.5, 'sex[T.m]': 0.5, '0': -1.0}
    """
    weights = _Reader(text, names).read()
    if weights.pop("", 0.0):
        raise ValueError(f"Expected a combination of coefficients, but got a constant in {text!r}; leave it out")
    return weights


def written(weights: Mapping[str, float]) -> str:
    """Return weights as text.

    >>> written({"age": 1.0, "sex": -2.0})
    'age - 2*sex'
    """
    terms = [(weight < 0, name if abs(weight) == 1 else f"{abs(weight):g}*{name}") for name, weight in weights.items()]
    text = "".join(f" {'-' if negative else '+'} {term}" for negative, term in terms)
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}"


class _Reader:
    """A recursive-descent parser of a text."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.names = sorted(names, key=len, reverse=True)

    def read(self) -> Linear:
        total = self._sum()
        if self._next():
            raise self._wrong("the end, + or -")
        return total

    def _sum(self) -> Linear:
        sign = -1.0 if self._next() == "-" else 1.0
        if self._next() in ("+", "-"):
            self.at += 1
        total = _scaled(self._product(), sign)
        while self._next() in ("+", "-"):
            sign = -1.0 if self._next() == "-" else 1.0
            self.at += 1
            for name, weight in _scaled(self._product(), sign).items():
                total[name] = total.get(name, 0.0) + weight
        return total

    def _product(self) -> Linear:
        value = self._factor()
        while self._next() in ("*", "/"):
            divides = self._next() == "/"
            self.at += 1
            other = self._factor()
            if set(other) - {""} and (divides or set(value) - {""}):
                raise self._wrong("a product of a coefficient with a number")
            value, other = (other, value) if set(other) - {""} else (value, other)
            number = other.get("", 0.0)
            if divides and number == 0:
                raise self._wrong("a divisor other than 0")
            value = _scaled(value, 1 / number if divides else number)
        return value

    def _factor(self) -> Linear:
        first, rest = self._next(), self.text[self.at :]
        if first == "`":
            name, closed, _ = rest[1:].partition("`")
            if not closed or name not in self.names:
                raise self._wrong("one of the names in backticks")
            self.at += len(name) + 2
            return {name: 1.0}
        for name in self.names:
            if rest.startswith(name) and not _NUMBER.fullmatch(name):
                after = rest[len(name) :].lstrip()
                if not after or after[0] in _ENDS:
                    self.at += len(name)
                    return {name: 1.0}
        if (number := _NUMBER.match(rest)) is not None:
            self.at += number.end()
            return {"": float(number[0])}
        if first == "(" and self.depth < _DEEPEST:
            self.at, self.depth = self.at + 1, self.depth + 1
            value = self._sum()
            if self._next() != ")":
                raise self._wrong("a closing parenthesis")
            self.at, self.depth = self.at + 1, self.depth - 1
            return value
        raise self._wrong("a name or a number")

    def _next(self) -> str:
        """Skip blanks and return the next character, "" at the end."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _wrong(self, wanted: str) -> ValueError:
        shown = ", ".join(repr(name) for name in reversed(self.names[-_SHOWN:])) + ", …" * (len(self.names) > _SHOWN)
        return ValueError(
            f"Expected {wanted} at character {self.at + 1} of {self.text!r}, but got "
            f"{self.text[self.at :][:20] or 'its end'!r}; names are {shown}"
        )


def _scaled(value: Linear, factor: float) -> Linear:
    return {name: factor * weight for name, weight in value.items()}
