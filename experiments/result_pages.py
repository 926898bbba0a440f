"""Pages of results: what runs of an experiment found, kept as JSON, and the Markdown that is made of that alone.

`python -m experiments.NAME … --results experiments/results` adds its run to a JSON file there (`fedlin_school.json` of
`fedlin.school`), in place of one with the same options but `--seeds`, and writes a page beside it. A script says in its
`READING` of which metrics less or more is better, and why a published figure does not come out. Notes below a page are
kept. `python -m experiments.result_pages` writes all pages again from what is kept.

How a figure compares with the published one: it *agrees* within two standard deviations, the published one where there
is one, else ours over repetitions; without either, if it is the same to the digits that are printed. Else it is
*better* or *worse*, or *differs* where neither more nor less is better. A figure of other data than the published one
*does not compare*, whatever its size.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
KEPT = {RESULTS, Path(__file__).parent / "benchmarks" / "results"}  # whose pages are those of whole runs
NOTES = "\n## Notes\n"
ROUNDING = 1e-9  # of a published figure, where more digits are printed than another order of summing keeps
NEVER = r"(?!)"
OTHER = "does not compare"
WIDE = 5  # columns of a table of one line, which stands upright if it has more


class Reason(NamedTuple):
    """Why figures do not come out."""

    where: str  # a pattern in "setting: metric"
    why: str
    if_better: bool = False  # whether it is said of better figures, too


class Reading(NamedTuple):
    """How a script's figures are to be read."""

    smaller: str = NEVER  # a pattern of metrics of which less is better
    larger: str = NEVER
    reasons: tuple[Reason, ...] = ()
    across: str = NEVER  # a pattern of settings that are a cell of a table, with groups `line` and `column`
    incomparable: tuple[Reason, ...] = ()  # figures of other data than the published ones
    remark: str = ""  # on how figures compare, below the rule


Row = Mapping[str, Any]  # of `common.Row`, what is None left out


def reading(name: str) -> Reading:
    """What an experiment's script says about its figures."""
    return getattr(importlib.import_module(f"experiments.{name}"), "READING", Reading())


def tolerance(row: Row) -> float:
    """How far ours may be from the published figure and agree with it."""
    sd = row.get("published_sd", row.get("sd"))
    if sd is not None:
        return 2 * sd
    if "decimals" in row:
        return 0.5 * 10.0 ** -row["decimals"] + ROUNDING * abs(row["published"])
    exponent = Decimal(repr(row["published"])).as_tuple().exponent
    return max(0.5 * 10.0 ** int(exponent), ROUNDING * abs(row["published"]))


def compared(row: Row, how: Reading) -> str:
    """Ours beside the published figure in a word."""
    if _first(how.incomparable, row) is not None:
        return OTHER
    gap = row["ours"] - row["published"]
    if abs(gap) <= tolerance(row):
        return "agrees"
    if re.search(how.smaller, row["metric"]):
        gap = -gap
    elif not re.search(how.larger, row["metric"]):
        return "differs"
    return "better" if gap > 0 else "worse"


def why(row: Row, word: str, how: Reading) -> str | None:
    """The script's reason why a figure does not come out, or does not compare, if it has one."""
    if word == OTHER:
        return _first(how.incomparable, row)
    return _first([each for each in how.reasons if word != "agrees" and (each.if_better or word != "better")], row)


def _first(reasons: Sequence[Reason], row: Row) -> str | None:
    """The first reason that is about a row."""
    place = f"{row['setting']}: {row['metric']}"
    return next((reason.why for reason in reasons if re.search(reason.where, place)), None)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (columns, *lines)]
    return [f"| {' | '.join(line)} |" for line in (cells[0], ["---"] * len(columns), *cells[1:])]


def _number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else f"{value:{form}}"


def _beside(rows: Sequence[Row], how: Reading) -> list[str]:
    """The table of what is published, and the reasons why some of it does not come out."""
    lines: list[list[str]] = []
    reasons: list[str] = []
    words: list[str] = []
    for row in rows:
        words.append(compared(row, how))
        verdict, reason = words[-1], why(row, words[-1], how)
        if reason is not None:
            reasons += [reason] if reason not in reasons else []
            word = verdict if verdict == OTHER else f"does not come out ({verdict})"
            verdict = f"{word}: reason {reasons.index(reason) + 1}"
        form = f".{row['decimals']}f" if "decimals" in row else ".4g"
        published = _number(row["published"], form) + (
            "" if "published_sd" not in row else f" (sd {row['published_sd']:.2g})"
        )
        shown = [
            _number(row["ours"], form),
            _number(row.get("sd"), ".2g"),
            str(row.get("repeats", 1)),
            published,
            verdict,
        ]
        lines.append([row["setting"], row["metric"], *shown])
    count = ", ".join(f"{word} {words.count(word)}" for word in sorted(set(words)))
    text = [*table(["setting", "metric", "ours", "sd", "repetitions", "published", "verdict"], lines), ""]
    text += [f"Of {len(rows)} published figures: {count}.", ""]
    if reasons:
        text += ["Reasons:", "", *(f"{i}. {each}" for i, each in enumerate(reasons, 1)), ""]
    return text


def _others(rows: Sequence[Row], how: Reading) -> list[str]:
    """Tables of what nothing is published of, alike lines in one."""
    lines: dict[tuple[str, str], dict[str, Row]] = {}  # by what the table is of and the line's name, a row a column
    for row in rows:
        cell = re.fullmatch(how.across, row["setting"])
        if cell is None:
            lines.setdefault(("", row["setting"]), {})[row["metric"]] = row
        else:
            lines.setdefault((row["metric"], cell["line"]), {})[cell["column"]] = row
    kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # tables by what they are of and their columns
    for of, line in lines:
        columns = dict.fromkeys(name for other in lines if of and other[0] == of for name in lines[other])
        kinds.setdefault((of, tuple(columns or lines[of, line])), []).append(line)
    text: list[str] = []
    for (of, names), those in kinds.items():
        cells = [[line, *(_shown(lines[of, line].get(name)) for name in names)] for line in those]
        if len(cells) == 1 and len(names) > WIDE:
            text += [*table([cells[0][0], ""], list(zip(names, cells[0][1:]))), ""]
        else:
            text += [*table([of, *names], cells), ""]
    return text


def _shown(row: Row | None) -> str:
    """Ours and its spread."""
    return "" if row is None else _number(row["ours"]) + (f" ± {row['sd']:.2g}" if "sd" in row else "")


def _spread(rows: Sequence[Row]) -> str:
    """What stands behind ±: repetitions, or what a column says where a script has a spread of another kind."""
    repeats = {row.get("repeats") for row in rows if "sd" in row}
    if not repeats:
        return ""
    counts = ", ".join(str(count) for count in sorted(count for count in repeats if count is not None))
    of_repeats = f"the standard deviation of {counts} repetitions" if counts else ""
    own = "what its column says" if None in repeats else ""
    return f"; ± is {' or '.join(filter(None, (of_repeats, own)))}"


def _run(run: Mapping[str, Any], how: Reading) -> list[str]:
    """What one run found, and how it was made."""
    times = (
        f"{run['seconds']:.0f} s, {run['processor_seconds']:.0f} s of processors"
        if "seconds" in run
        else "time unknown"
    )
    text = [
        f"`{run['command']}` on",
        f"{run['machine']}; {run['date']}; {times}.",
        *([run["remark"]] if "remark" in run else []),
        "",
    ]
    published = [row for row in run["rows"] if "published" in row]
    others = [row for row in run["rows"] if "published" not in row]
    if published:
        text += _beside(published, how)
    if others:
        title = "Of these nothing is published" if published else "Nothing is published of these"
        text += [f"{title}{_spread(others)}.", "", *_others(others, how)]
    return text


def page(record: Mapping[str, Any], how: Reading) -> str:
    """The Markdown of what is kept of an experiment, without notes."""
    text = [f"# {record['title']}", ""]
    if any("published" in row for run in record["runs"] for row in run["rows"]):
        text += [
            "A figure agrees with the published one within two standard deviations: the published one's, else ours",
            "over repetitions; without either, if it is the same to the digits printed.",
            *([how.remark] if how.remark else []),
            "",
        ]
    if not record["runs"]:
        command = f"python -m experiments.{record['experiment']} --results experiments/results"
        text += [f"No run is kept yet; `{command}` keeps one and writes this page."]
    for number, run in enumerate(record["runs"], 1):
        text += [f"## Run {number}", ""] if len(record["runs"]) > 1 else []
        text += _run(run, how)
    return "\n".join(text).rstrip() + "\n"


def dumps(record: Mapping[str, Any]) -> str:
    """JSON with a line for every row."""
    runs = []
    for run in record["runs"]:
        about = json.dumps({key: value for key, value in run.items() if key != "rows"}, ensure_ascii=False, indent=1)
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in run["rows"])
        runs.append(f'{about[:-2]},\n "rows": [\n{rows}\n]}}')
    about = json.dumps({key: record[key] for key in ("experiment", "title")}, ensure_ascii=False, indent=1)
    return f'{about[:-2]},\n "runs": [\n' + ",\n".join(runs) + "\n]}\n"


def options(run: Mapping[str, Any]) -> str:
    """The command, without how often it repeats and where it writes."""
    return re.sub(r" --(seeds|results|json|out)[ =]\S+", "", run["command"])


def add(folder: Path, name: str, title: str, run: Mapping[str, Any]) -> None:
    """Keep a run, in place of one with the same options, and write the page."""
    file = folder / f"{name.replace('.', '_')}.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    runs = [each for each in runs if options(each) != options(run)] + [run]
    runs.sort(key=lambda each: each["command"])
    file.write_text(dumps({"experiment": name, "title": title, "runs": runs}))
    write(file)


def write(kept: Path) -> None:
    """Write the page of what is kept in a JSON file, beside it."""
    record = json.loads(kept.read_text())
    write_results(kept.with_suffix(".md"), page(record, reading(record["experiment"])))


def check_small(smoke: bool, folder: Path | None) -> None:
    """Raise ValueError for results of `--smoke` in the place of kept ones."""
    if smoke and folder is not None and folder.resolve() in KEPT:
        raise ValueError(
            f"Expected another folder than {folder} for results of --smoke, which would stand on kept pages as if they "
            "were a whole run's; pass --results DIR"
        )


def write_results(file: Path, text: str) -> None:
    """Write Markdown, and keep the notes below that of before."""
    _, heading, notes = (file.read_text() if file.exists() else "").partition(NOTES)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + heading + notes)


if __name__ == "__main__":
    for kept in sorted(RESULTS.glob("*.json")):
        write(kept)
