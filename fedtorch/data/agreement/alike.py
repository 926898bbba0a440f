"""Find which of several sites say something else than the others, whoever has come first.

>>> check_alike("rows of one form", {"a": "3 columns", "b": "4 columns", "c": "3 columns"}, "bring the same columns")
Traceback (most recent call last):
fedtorch.data.agreement.alike.Unlike: Expected rows of one form at all sites, but 'b' has 4 columns, and the other 2
have 3 columns; bring the same columns
>>> check_alike("rows of one form", {"a": "3 columns", "b": "4 columns"}, "bring the same columns")
Traceback (most recent call last):
fedtorch.data.agreement.alike.Unlike: Expected rows of one form at all sites, but 'a' has 3 columns, and 'b' has 4
columns; bring the same columns
"""

from __future__ import annotations

from collections.abc import Mapping


class Unlike(ValueError):
    """Raised where sites differ.

    Attributes:
        odd: the sites that differ from more than half of all, or all sites where no such majority is alike.
    """

    def __init__(self, message: str, odd: tuple[str, ...]) -> None:
        super().__init__(message)
        self.odd = odd


def check_alike(what: str, said: Mapping[str, str], remedy: str) -> None:
    """Raise `Unlike` unless all sites have the same.

    Args:
        what: they should have alike.
        said: what each has, in words, by site.
        remedy: what to do where they differ.
    """
    groups: dict[str, list[str]] = {}
    for site, each in said.items():
        groups.setdefault(each, []).append(site)
    if len(groups) < 2:
        return
    usual = next((each for each, sites in groups.items() if 2 * len(sites) > len(said)), None)
    odd = tuple(site for site, each in said.items() if each != usual)
    parts = [_having(sites, each) for each, sites in groups.items() if each != usual]
    if usual is not None:
        many = len(groups[usual])
        parts.append(f"the other {many} have {usual}" if many > 1 else _having(groups[usual], usual))
    raise Unlike(f"Expected {what} at all sites, but {', and '.join(parts)}; {remedy}", odd)


def _having(sites: list[str], each: str) -> str:
    return f"{', '.join(map(repr, sites))} {'has' if len(sites) == 1 else 'have'} {each}"
