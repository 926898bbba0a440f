"""The result types of the parser: columns, variables, terms, random terms.

>>> age, sex = Variable(Quantity("age")), Variable(Quantity("sex"), "C")
>>> term_name((age, sex)), term_name(())
('age:C(sex)', 'Intercept')
>>> Variable(Quantity("sbp", log=True), "bs", 4)
Variable(quantity=Quantity(column='sbp', log=True), function='bs', number=4)
"""

from __future__ import annotations

from typing import NamedTuple

INTERCEPT = "Intercept"


class Quantity(NamedTuple):
    """A column of a frame, or its logarithm."""

    column: str
    log: bool = False

    @property
    def name(self) -> str:
        """Return the quantity's name in formulas and coefficients."""
        return f"log({self.column})" if self.log else self.column


class Variable(NamedTuple):
    """A quantity, or a function of it, with one or more columns of x."""

    quantity: Quantity
    function: str = ""  # "", "C", "bs", "poly", "center" or "scale"
    number: int = 0  # df of bs, degree of poly

    @property
    def name(self) -> str:
        """Return the variable's name in formulas and coefficients, such as `bs(sbp, 4)`."""
        arguments = f"{self.quantity.name}, {self.number}" if self.number else self.quantity.name
        return f"{self.function}({arguments})" if self.function else self.quantity.name


Term = tuple[Variable, ...]  # a product of variables; () is the intercept


class Random(NamedTuple):
    """Terms whose coefficients differ between the values of a column: `(1 + age | hospital)`."""

    terms: tuple[Term, ...]
    group: str
    correlated: bool  # | rather than ||

    @property
    def name(self) -> str:
        """Return the term in formula notation."""
        parts = [] if () in self.terms else ["0"]
        parts += [term_name(term) if term else "1" for term in self.terms]
        return f"({' + '.join(parts)} {'|' if self.correlated else '||'} {self.group})"


class Formula(NamedTuple):
    """A formula that was read."""

    text: str
    response: Quantity
    trials: str | int | None  # a column, or the same number for all rows
    terms: tuple[Term, ...]  # of fixed effects, by the number of their variables: the intercept () first
    random: tuple[Random, ...]
    offset: tuple[Quantity, ...]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Return the variables of all terms, each once, in the order of the terms."""
        terms = [*self.terms, *(term for random in self.random for term in random.terms)]
        return tuple(dict.fromkeys(variable for term in terms for variable in term))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of a frame that the formula reads, groups left out: the response first."""
        read = [self.response.column, *([self.trials] if isinstance(self.trials, str) else [])]
        read += [variable.quantity.column for variable in self.variables]
        return tuple(dict.fromkeys([*read, *(quantity.column for quantity in self.offset)]))


def term_name(term: Term) -> str:
    """Return a term in formula notation."""
    return ":".join(variable.name for variable in term) or INTERCEPT
