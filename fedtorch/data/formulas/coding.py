"""Columns of x from the terms of a formula, and the names of their coefficients.

A factor of a term is coded by contrasts with its first level, `sex[T.male]`, if the formula has the term without it,
and otherwise by all of its levels, `sex[male]`: the rule of patsy and formulaic, which avoids linearly dependent
columns.

>>> from fedtorch.data.formulas.encoding import Levels
>>> from fedtorch.data.formulas.parsing import parse
>>> encoding = Encoding(levels={"sex": Levels(("f", "m"))})
>>> [column.name for column in columns(parse("y ~ age * sex").terms, encoding)]
['Intercept', 'age', 'sex[T.m]', 'age:sex[T.m]']
>>> [column.name for column in columns(parse("y ~ 0 + age + sex").terms, encoding)]
['age', 'sex[f]', 'sex[m]']
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from fedtorch.data.formulas.encoding import Encoding
from fedtorch.data.formulas.grammar import INTERCEPT, Term, Variable

MOST_COLUMNS = 2000


class Part(NamedTuple):
    """One column that a variable makes."""

    variable: Variable
    place: int  # of its level, spline or polynomial
    name: str


class Column(NamedTuple):
    """A column of x: the product of its parts; of none, ones."""

    name: str
    parts: tuple[Part, ...]
    term: int  # the number of its term


_Subterm = frozenset[tuple[Variable, bool]]  # factors, and whether all of their levels occur


def is_factor(variable: Variable, encoding: Encoding) -> bool:
    """Return whether a variable is coded by levels."""
    return variable.function in ("", "C") and variable.quantity.column in encoding.levels


def columns(terms: Sequence[Term], encoding: Encoding) -> list[Column]:
    """Return the columns of x that the terms make, in their order; within a term the first factor changes fastest."""
    used: dict[frozenset[Variable], set[_Subterm]] = {}
    made: list[Column] = []
    for number, term in enumerate(terms):
        factors = [variable for variable in term if is_factor(variable, encoding)]
        among = used.setdefault(frozenset(term) - frozenset(factors), set())
        for coding in _codings(factors, among):
            chosen = [variable for variable in term if variable in coding or variable not in factors]
            parts = [_parts(variable, encoding, coding.get(variable, False)) for variable in chosen]
            if len(made) + _product(map(len, parts)) > MOST_COLUMNS:
                raise ValueError(f"Expected at most {MOST_COLUMNS} columns of x, but the formula makes more")
            for picked in itertools.product(*parts[::-1]):
                name = ":".join(part.name for part in picked[::-1]) or INTERCEPT
                made.append(Column(name, picked[::-1], number))
    names = [column.name for column in made]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    twice += [column.name for column in made if column.name == INTERCEPT and column.parts and not twice]
    if twice:
        raise ValueError(
            f"Expected a different name for each coefficient, but got {twice} of a column and of another coefficient; "
            "rename the column in the frame"
        )
    return made


def _product(numbers: Sequence[int] | map[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _codings(factors: list[Variable], used: set[_Subterm]) -> list[dict[Variable, bool]]:
    """Return the codings that a term adds to the span of earlier terms, each: factor -> whether by all levels."""
    subsets = [
        frozenset((factor, False) for factor in subset)
        for size in range(len(factors) + 1)
        for subset in itertools.combinations(factors, size)
    ]
    fresh: list[_Subterm] = [subset for subset in subsets if subset not in used]
    used.update(fresh)
    while (merged := _merged(fresh)) is not None:
        fresh = merged
    return [dict(subterm) for subterm in fresh]


def _merged(subterms: list[_Subterm]) -> list[_Subterm] | None:
    """Merge one pair, b and b:a by contrasts, into b:a with all levels of a, or return None without a pair."""
    for i, short in enumerate(subterms):
        for j in range(i + 1, len(subterms)):
            more = subterms[j] - short
            if len(more) == 1 and short < subterms[j]:
                ((factor, whole),) = more
                if not whole:
                    together = [*subterms[:j], short | {(factor, True)}, *subterms[j + 1 :]]
                    return together[:i] + together[i + 1 :]
    return None


def _parts(variable: Variable, encoding: Encoding, whole: bool) -> list[Part]:
    name = variable.name
    if is_factor(variable, encoding):
        levels = encoding.levels[variable.quantity.column].names
        if whole:
            return [Part(variable, i, f"{name}[{level}]") for i, level in enumerate(levels)]
        return [Part(variable, i, f"{name}[T.{level}]") for i, level in enumerate(levels) if i]
    if variable.number:
        return [Part(variable, i, f"{name}[{i + 1}]") for i in range(variable.number)]
    return [Part(variable, 0, name)]
