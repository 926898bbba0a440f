"""Random terms of a formula as columns of x: which coefficients differ between clients, and whether correlated.

>>> from fedtorch.data.formulas.parsing import parse
>>> random_columns(parse("y ~ age + (1 + age | clinic)"), ("Intercept", "age"), Encoding(), "clinic")
((0, 1), True)
>>> random_columns(parse("y ~ age + (1 | clinic) + (0 + age | clinic)"), ("Intercept", "age"), Encoding(), "clinic")
((0, 1), False)
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtorch.data.formulas.coding import columns
from fedtorch.data.formulas.encoding import Encoding
from fedtorch.data.formulas.grammar import INTERCEPT, Formula

_INSTEAD = (
    ", which is there where the formula has neither 0 nor - 1: clients' intercepts differ about it, and the levels of "
    "a factor then count from its first"
)


def random_columns(
    formula: Formula, names: Sequence[str], encoding: Encoding, group: str
) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of the coefficients that differ between clients, and whether they are correlated.

    Raises:
        ValueError: terms by another column than `group`, with coefficients that have no fixed effect or are in two
            terms, or of which some but not all are correlated; the message names the term.
    """
    blocks: list[list[int]] = []
    for random in formula.random:
        if random.group != group:
            raise ValueError(
                f"Expected random terms by the column of clients, {group!r}, but got {random.name}: rows of one "
                f"{random.group} may lie at several clients; leave it out, or, where it has few levels and does not "
                f"name the persons whose rows they are, write it as a factor, C({random.group})"
            )
        inner = [column.name for column in columns(random.terms, encoding)]
        lacking = [name for name in inner if name not in names]
        if lacking or not inner:
            absent = ", ".join("1" if name == INTERCEPT else name for name in lacking) or "1"
            raise ValueError(
                f"Expected fixed effects for the coefficients of {random.name}, but got none for {lacking}; the "
                f"formula has {list(names)}: add {absent} as a fixed effect too{_INSTEAD * (INTERCEPT in lacking)}"
            )
        places = [names.index(name) for name in inner]
        blocks += [places] if random.correlated else [[place] for place in places]
    every = [place for block in blocks for place in block]
    twice = [names[place] for place in dict.fromkeys(every) if every.count(place) > 1]
    if twice:
        raise ValueError(
            f"Expected each coefficient in one random term, but got {twice} in several of "
            f"{', '.join(random.name for random in formula.random)}; write (0 + … | {group}) in the second"
        )
    large = [block for block in blocks if len(block) > 1]
    if large and len(blocks) > 1:
        raise ValueError(
            f"Expected random coefficients that are all correlated or all not, but got some of "
            f"{', '.join(random.name for random in formula.random)}; write one term (… | {group}) or (… || {group})"
        )
    return tuple(sorted(every)), bool(large)
