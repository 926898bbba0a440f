"""Measure the corpus: `PYTHONPATH=tests python -m situations.results`; `--page` writes its page only.

Arguments are parts of names; none means all cases. Each case is trained and evaluated in every way on clients of 4, 7,
4, 3 and 4 rows. What came of it is kept in `results.json`, of which `docs/situations.md` is made.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from situations.case import FEDERATIONS, Case
from situations.cases import CASES, FIRST, REPEATED, THEMES
from situations.ways import WAYS, outcome

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "situations.md"
OUTCOMES = EQUAL, REFUSED, DIFFERENT = "equal", "refused", "differs"
OPEN = "–"

Results = dict[str, dict[str, str]]  # case -> way -> what came of it


def measured(case: Case) -> dict[str, str]:
    """Return what came of a case in every way; of `compile=True` only where it can be promised."""
    return {way: _measured(case, way) for way in WAYS if way != "compile=True" or case.compiles}


def _measured(case: Case, way: str) -> str:
    try:
        result = outcome(case, "mixed", way)
    except Exception as error:
        return f"{DIFFERENT}: {type(error).__name__}"
    if result.equal(case):
        return EQUAL
    return REFUSED if result.refusal else f"{DIFFERENT}: {max(result.training, result.evaluation):.0e}"


def counts(kept: Results, way: str) -> dict[str, int]:
    """Return how many cases are equal, refused and different in a way."""
    every = [each[way].partition(":")[0] for each in kept.values() if way in each]
    return {name: every.count(name) for name in OUTCOMES}


def page(kept: Results) -> str:
    """Return the page of what is kept."""
    every = {way: counts(kept, way) for way in WAYS}
    total = [
        f"| {name} | " + " | ".join(str(each[name]) for each in every.values()) + " |" for name in every["default"]
    ]
    lines = [
        HEAD.format(
            cases=len(kept),
            first=len(FIRST),
            repeated=len(REPEATED),
            clients=", ".join(map(str, FEDERATIONS["mixed"])),
        ),
        _header("outcome"),
        *total,
    ]
    for theme, cases in THEMES.items():
        lines += ["", f"## {theme[0].upper()}{theme[1:]}", "", _header("situation")]
        lines += [_row(case.name, kept[case.name]) for case in cases]
    return "\n".join(lines) + "\n"


def _header(first: str) -> str:
    names = [way if way == "default" else f"`{way}`" for way in WAYS]
    return f"| {first} | " + " | ".join(names) + " |\n| --- |" + " --- |" * len(WAYS)


def _row(name: str, result: dict[str, str]) -> str:
    return f"| {name.replace('|', '/')} | " + " | ".join(result.get(way, OPEN) for way in WAYS) + " |"


HEAD = """# Modules in awkward situations

<!-- Written by tests/situations/results.py from tests/situations/results.json. -->

{cases} modules, losses and training loops in situations that other people have reported of other packages, in our own
code; after `#` stands the report. Each is trained for a few epochs on clients of {clients} rows and evaluated on their
rows, and held against a plain loop of each client in plain PyTorch, averaged by rows. *equal*: to 1e-9 of what training
moves, in float64; *refused*: an error says why, and what to do instead; –: nobody would promise it. What is refused by
default mostly trains in `ft.lightning_fit`, whose column says where it does not.

The fast tests run {first} of them by default and with `batched=False`. The other {repeated} repeat the kind of one of
these, with another function of torch, size or setting; the slow tests run all {cases} in every way.
"""


def write(kept: Results) -> None:
    """Write results and page, of the cases that there are."""
    kept = {case.name: kept[case.name] for case in CASES if case.name in kept}
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if len(kept) == len(CASES):
        PAGE.write_text(page(kept))


def main() -> None:
    """Measure the cases whose names contain one of the arguments, or all."""
    kept: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts: list[Any] = sys.argv[1:]
    if "--page" not in parts:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        for case in CASES:
            if not parts or any(part in case.name for part in parts):
                kept[case.name] = measured(case)
    write(kept)


if __name__ == "__main__":
    main()
