"""An attack by integer programming on what a site tells of a column: which values have surely some rows, but few?

Whoever asks knows which whole numbers a column may hold, and how a site makes its histogram. The unknowns are how many
rows have each value. Where a cell was not halved, one of its halves has too few rows, and which is another unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import pandas
import pytest
from scipy.optimize import LinearConstraint, milp

from fedtorch.data.agreement.disclosure import Disclosure
from fedtorch.data.agreement.site import Answers

HALVED = 6  # times, as the page on privacy says
FORMULAS = ["scale(x)", "center(x)", "scale(log(x))", "bs(x, 5)", "poly(x, 2)", "bs(log(x), 4)", "x", "C(x)"]


def nyha(draws: numpy.random.Generator, rows: int) -> numpy.ndarray:
    return draws.permutation(numpy.repeat([1, 2, 3, 4], [rows // 2, rows - rows // 2 - rows // 5 - 2, rows // 5, 2]))


def ages(draws: numpy.random.Generator, rows: int) -> numpy.ndarray:
    return numpy.clip(draws.normal(62, 12, rows).round(), 18, 100).astype(int)


def counts(draws: numpy.random.Generator, rows: int) -> numpy.ndarray:
    return 1 + draws.poisson(2.5, rows)


def days(draws: numpy.random.Generator, rows: int) -> numpy.ndarray:
    stays = 1 + draws.geometric(0.15, rows)
    stays[:2] = 60, 45  # two that stayed for long
    return stays


DOMAINS: dict[Any, range] = {nyha: range(1, 5), ages: range(18, 101), counts: range(1, 16), days: range(1, 62)}


class Program:
    """Counts of values `(V,)`, and binary variables beside them, under linear constraints."""

    def __init__(self, domain: range) -> None:
        self.domain, self.binaries = numpy.array(domain), 0
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def within(self, low: float, high: float) -> dict[int, float]:
        """Return the coefficients of how many rows have values in [low, high)."""
        return {int(i): 1.0 for i in numpy.flatnonzero((self.domain >= low) & (self.domain < high))}

    def binary(self) -> int:
        self.binaries += 1
        return len(self.domain) + self.binaries - 1

    def add(self, coefficients: dict[int, float], low: float, high: float) -> None:
        self._rows.append((coefficients, low, high))

    def most(self, coefficients: dict[int, float], most: float, where: int, rows: int) -> None:
        """Ask for at most so many rows where a binary variable is 1."""
        self.add({**coefficients, where: float(rows)}, -numpy.inf, most + rows)

    def least(self, coefficients: dict[int, float], sign: float = 1.0) -> float:
        """Return the least of a sum; infinity where nothing fits."""
        size = len(self.domain) + self.binaries
        matrix, cost, upper = numpy.zeros((len(self._rows), size)), numpy.zeros(size), numpy.full(size, numpy.inf)
        for i, (row, _, _) in enumerate(self._rows):
            matrix[i, list(row)] = list(row.values())
        cost[list(coefficients)] = sign
        upper[len(self.domain) :] = 1
        bounds = numpy.array([(low, high) for _, low, high in self._rows])
        constraints = LinearConstraint(matrix, bounds[:, 0], bounds[:, 1])
        found = milp(cost, constraints=constraints, integrality=numpy.ones(size), bounds=(0, upper))
        assert found.success, found.message
        return sign * round(found.fun)


class Told(NamedTuple):
    ends: list[float]
    counts: list[int]
    minimum: int


def of_histogram(program: Program, told: Told) -> None:
    """Add all that a histogram says, how it was made included."""
    inner, rows = [end + 0.5 for end in told.ends[1:-1]], sum(told.counts)
    places = [-numpy.inf, *inner, numpy.inf]
    for (low, high), count in zip(itertools.pairwise(places), told.counts, strict=True):
        program.add(program.within(low, high), count, count)

    def walk(low: float, high: float, times: int) -> None:
        """Follow a cell of which it is known that rows come to it."""
        middles = [end for end in inner if low < end < high]
        if not middles:
            if times:
                chain(low, high, where=None)
            return
        middle = (low + high) / 2
        if middle in middles:
            walk(low, middle, times - 1), walk(middle, high, times - 1)
        elif all(end < middle for end in middles):
            program.add(program.within(middle, high), 0, told.minimum - 1)
            walk(low, middle, times)
        else:
            assert all(end > middle for end in middles)
            program.add(program.within(low, middle), 0, told.minimum - 1)
            walk(middle, high, times)

    def chain(low: float, high: float, where: int | None) -> None:
        """Say that a cell is not halved: it is followed to one of its halves, or it ends there with few rows."""
        if len(program.within(low, high)) < 2:
            return
        middle = (low + high) / 2
        ends, left, right = (program.binary() for _ in range(3))
        chosen: dict[int, float] = {ends: 1.0, left: 1.0, right: 1.0}
        program.add(chosen, 1, 1) if where is None else program.add({**chosen, where: -1.0}, 0, 0)
        program.most(program.within(low, high), 2 * told.minimum - 1, ends, rows)
        program.most(program.within(middle, high), told.minimum - 1, left, rows)
        program.most(program.within(low, middle), told.minimum - 1, right, rows)
        chain(low, middle, left), chain(middle, high, right)

    walk(-256.0, 256.0, HALVED)


def sets(values: numpy.ndarray, domain: range, minimum: int) -> Iterator[tuple[str, float, float]]:
    """Yield the values and tails that few rows have."""
    for value in domain:
        for name, low, high in [
            ("value", value, value + 1), ("at least", value, domain.stop), ("at most", domain.start, value + 1)
        ]:  # fmt: skip
            if 0 < ((values >= low) & (values < high)).sum() < minimum:
                yield f"{name} {value}", low, high


def found(program: Program, values: numpy.ndarray, domain: range, minimum: int) -> list[str]:
    """Return what the attack is sure of: sets that have some rows, and fewer than the minimum."""
    return [
        name
        for name, low, high in sets(values, domain, minimum)
        if program.least(program.within(low, high)) > 0 and -program.least(program.within(low, high), -1.0) > -minimum
    ]


def answers(values: numpy.ndarray, minimum: int, formulas: list[str]) -> list[dict[str, Any]]:
    """Return all that a site tells of a column, asked by one formula after the other."""
    frame = pandas.DataFrame({"x": values, "y": numpy.random.default_rng(1).normal(size=len(values))})
    site = Answers(frame, Disclosure(minimum=minimum))
    ask = {"step": "describe", "minimum": minimum, "declared": [], "also": ["x", "log(x)", "y"], "offset": []}
    return [site.answer({**ask, "formula": f"y ~ {formula}"}) for formula in formulas]


def told_of(said: list[dict[str, Any]], part: str) -> Any:
    """Return what was told of the column, which is the same each time; None where nothing was."""
    every = [answer[part]["x"] for answer in said if "refused" not in answer and "x" in answer[part]]
    assert all(each == every[0] for each in every)
    return every[0] if every else None


@pytest.mark.parametrize("minimum", [3, 5, 10])
@pytest.mark.parametrize("column", DOMAINS, ids=lambda column: column.__name__)
def test_no_value_and_no_tail_is_found_that_few_rows_have(column: Any, minimum: int) -> None:
    tried = 0
    for rows in (60, 200):
        values, domain = column(numpy.random.default_rng(rows), rows), DOMAINS[column]
        said = answers(values, minimum, FORMULAS)
        alone = [told_of(answers(values, minimum, [formula]), "histograms") for formula in FORMULAS[:-1]]
        told = told_of(said, "histograms")
        assert alone == [told] * len(alone)  # whatever is asked, alone or with everything else
        assert told_of(said, "levels") is None or told is None
        if told is None:
            continue
        program = Program(domain)
        of_histogram(program, Told(told[0], told[1], minimum))
        tried += len(list(sets(values, domain, minimum)))
        assert found(program, values, domain, minimum) == []
    assert tried > 0


@pytest.mark.parametrize("minimum", [3, 5, 10])
def test_names_of_levels_tell_no_value_that_few_rows_have(minimum: int) -> None:
    """Asked for levels first, a site tells nothing else of the column."""
    values, domain = nyha(numpy.random.default_rng(0), 200), DOMAINS[nyha]
    said = answers(values, minimum, FORMULAS[::-1])
    assert told_of(said, "histograms") is None
    levels, program = told_of(said, "levels"), Program(domain)
    program.add(program.within(-numpy.inf, numpy.inf), len(values), len(values))
    for value in domain:
        program.add(program.within(value, value + 1), *((minimum, 200) if str(value) in levels else (0, minimum - 1)))
    assert found(program, values, domain, minimum) == []


def of_moments(program: Program, values: numpy.ndarray, step: float) -> None:
    """Add that a mean and an sd are known to half a step."""
    rows, mean, sd = len(values), values.mean(), values.std(ddof=1)
    program.add(program.within(-numpy.inf, numpy.inf), rows, rows)
    powers = [{i: float(value) ** p for i, value in enumerate(program.domain)} for p in (1, 2)]
    low, high = mean - step / 2, mean + step / 2
    program.add(powers[0], rows * low, rows * high)
    squares = [(rows - 1) * (sd + part) ** 2 for part in (-step / 2, step / 2)]
    program.add(powers[1], squares[0] + rows * low**2, squares[1] + rows * high**2)


def test_exact_moments_would_tell_the_patient_of_class_4() -> None:
    """The protection off: means and sds of the column and of its logarithm."""
    values = numpy.repeat([1, 2, 3, 4], [60, 37, 2, 1])
    program = Program(DOMAINS[nyha])
    of_moments(program, values, 1e-6)
    logs = {i: float(numpy.log(value)) for i, value in enumerate(program.domain)}
    program.add(logs, float(numpy.log(values).sum()) - 1e-6, float(numpy.log(values).sum()) + 1e-6)
    assert set(found(program, values, DOMAINS[nyha], 3)) == {"value 3", "value 4", "at least 4"}


@pytest.mark.parametrize("column", ["classes", "stays"])
def test_moments_rounded_to_a_percent_of_the_sd_would_still_tell(column: str) -> None:
    """Of classes alone, of stays beside the histogram, which alone tells nothing."""
    minimum, program = 10, Program(range(1, 62))
    values = numpy.repeat([1, 2, 3, 4], [60, 37, 2, 1])
    if column == "stays":
        values = numpy.append(1 + numpy.random.default_rng(0).geometric(0.3, 98), [60, 45])
        ends, told, _ = told_of(answers(values, minimum, ["scale(x)"]), "histograms")
        of_histogram(program, Told(ends, told, minimum))
        assert found(program, values, range(1, 62), minimum) == []
    else:
        program = Program(DOMAINS[nyha])
    of_moments(program, values, values.std() / 100)
    everything = found(program, values, range(1, 62), minimum)
    assert {"classes": "at least 3", "stays": "at least 21"}[column] in everything
