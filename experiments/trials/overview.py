"""How many published figures come out: all trials counted together, every row listed.

Reads what is kept of the trials in `experiments/results/trials_*.json` and runs nothing. A figure that is published
agrees by the first rule that there is: within two published standard deviations; within two of ours over repetitions;
to the digits that are printed. Figures with a reason why they do not come out are counted apart, whatever they are.
`--page docs/trials.md` writes the page; a test compares it with what is kept.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import common, result_pages
from experiments.result_pages import Row

RULES = ("two published sd", "two sd of ours", "digits printed")
OTHERS = ("better", "worse", "differs", "with a reason")
WANTED = 25


class Verdict(NamedTuple):
    """What has become of a published figure."""

    row: Row
    word: str  # one of RULES or OTHERS


def verdict(row: Row, how: result_pages.Reading) -> Verdict:
    """By which rule it agrees, or how it does not."""
    word = result_pages.compared(row, how)
    if word != "agrees":
        return Verdict(row, word if result_pages.why(row, word, how) is None else OTHERS[-1])
    given = [row.get("published_sd"), row.get("sd")]
    return Verdict(row, next((rule for rule, sd in zip(RULES, given) if sd is not None), RULES[2]))


def trials(folder: Path = result_pages.RESULTS) -> dict[str, list[Verdict]]:
    """All published figures of all trials that have some, by the trial's file."""
    made = {}
    for file in sorted(folder.glob("trials_*.json")):
        record = json.loads(file.read_text())
        how = result_pages.reading(record["experiment"])
        rows = [row for run in record["runs"] for row in run["rows"] if "published" in row]
        if rows:
            made[file.stem] = [verdict(row, how) for row in rows]
    return made


def counts(verdicts: Sequence[Verdict]) -> list[int]:
    """How many figures there are, and how many of each word."""
    words = Counter(each.word for each in verdicts)
    return [len(verdicts), *(words[word] for word in (*RULES, *OTHERS))]


def title(trial: str) -> str:
    """A trial's name with a link to its page."""
    return f"[{trial.removeprefix('trials_')}](results/experiments_{trial}.md)"


def page(of: dict[str, list[Verdict]]) -> str:
    """The Markdown: a table of counts, and below it every figure."""
    together = [each for verdicts in of.values() for each in verdicts]
    lines = [[title(name), *map(str, counts(verdicts))] for name, verdicts in of.items()]
    by_sd, by_ours, by_digits = counts(together)[1:4]
    text = [
        "# Trials against published results",
        "",
        "Figures that others have published, and what `fedtorch` gives at their settings. A figure agrees by the first",
        "rule that there is: within two published standard deviations, within two of ours over repetitions, to the",
        "digits that are printed. Figures with a reason why they do not come out do not count, also where ours is",
        "better. Made by `python -m experiments.trials.overview --page docs/trials.md` of what is kept of the trials.",
        "",
        *result_pages.table(
            ["trial", "published figures", *(f"agree: {rule}" for rule in RULES), *OTHERS],
            [*lines, ["all", *map(str, counts(together))]],
        ),
        "",
        f"{by_sd} figures are within two published standard deviations, {by_sd + by_ours + by_digits} agree by one of "
        f"the rules.",
        "",
    ]
    for name, verdicts in of.items():
        lines = [_line(each) for each in verdicts]
        text += [
            f"## {title(name)}",
            "",
            *result_pages.table(["setting", "metric", "ours", "published", ""], lines),
            "",
        ]
    return "\n".join(text).rstrip() + "\n"


def _line(each: Verdict) -> list[str]:
    row = each.row
    form = f".{row['decimals']}f" if "decimals" in row else ".4g"
    sd = f" (sd {row['published_sd']:.2g})" if "published_sd" in row else ""
    return [row["setting"], row["metric"], f"{row['ours']:{form}}", f"{row['published']:{form}}{sd}", each.word]


def main(argv: Sequence[str] | None = None) -> None:
    """Count, and write the page where `--page` says."""
    parser = common.arguments(__doc__)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the overview as Markdown")
    options = parser.parse_args(argv)
    of = trials()
    rows = [
        common.Row(name, metric, count)
        for name, verdicts in of.items()
        for metric, count in zip(("published figures", *RULES, *OTHERS), counts(verdicts))
    ]
    common.show_rows("Published figures by trial", rows, ".0f")
    if options.page is not None:
        options.page.write_text(page(of))
        sys.stderr.write(f"page: {options.page}\n")
    common.finish("trials.overview", rows, options)


if __name__ == "__main__":
    main()
