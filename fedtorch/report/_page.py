"""The page of a run: the content of its sections, rendered by templates that escape every value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedtorch.plots.charts import Chart, Series, chart, number, size
from fedtorch.plots.history_charts import in_words
from fedtorch.report import _history_charts as charts
from fedtorch.report._convergence import COLUMNS, propagation
from fedtorch.report._intervals import posterior
from fedtorch.report._pictures import Picture, network, picture
from fedtorch.report._words import Words, visible
from fedtorch.trust.record import Check

if TYPE_CHECKING:
    import pandas as pd

_WORST = 10  # clients listed in a table
_LONGEST_TEXT = 400  # the most characters of a sentence that are shown
_KNOWN = ("round", "asked", "answered", *charts.FAULTS, "round_bytes_up", "round_bytes_down", "bytes_up", "bytes_down")


class Story(NamedTuple):
    """A run's history and its other facts."""

    table: pd.DataFrame  # a row per round, see `History.frame`
    losses: pd.DataFrame  # `round`, `client`, `train_loss`
    about: dict[str, Any]  # see `fedtorch.report._about`
    records: list[tuple[str, list[Check]]]  # files of records, and the checks of each


def page(story: Story) -> str:
    """Return the HTML of a report."""
    table, about = story.table, story.about
    privacy = about["privacy"]
    clients = about["clients"] or sorted(set(story.losses["client"]))
    losses, shared = joined(story.losses, about["organisations"])
    last = _last_losses(losses)
    convergence = propagation(table)
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=about["title"] or about["settings"].get("algorithm", "A federated run"),
            subtitle=" · ".join(filter(None, (about["settings"].get("algorithm", ""), about["written"]))),
            about=about,
            versions=[*about["versions"].items(), *([("machine", about["machine"])] if about["machine"] else [])],
            tiles=_tiles(story, len(clients)),
            curves=charts.losses(table),
            others=charts.others(
                table, dict.fromkeys((*_KNOWN, "seconds", "epsilon", "delta", *(COLUMNS if convergence else ())))
            ),
            convergence=convergence,
            missing=_missing(about["missing"]),
            disclosure=about["disclosure"],
            organisations=organisations(about["organisations"], shared, about["absences"]),
            shared=shared,
            client_charts=_client_charts(last, about["scores"]),
            client_tables=_client_tables(losses, last, about),
            network=_network(about, last),
            posteriors=[posterior(one) for one in about["posteriors"]],
            traffic=charts.traffic(table),
            privacy=charts.privacy(table, None if privacy is None else privacy["budget"]),
            claim=None if privacy is None else privacy["claim"],
            answers=charts.answers(table),
            faults=_faults(table),
            seconds=charts.seconds(table),
            records=story.records,
        )
    )


@cache
def _templates() -> Environment:
    """Return the templates, which escape every value."""
    made = Environment(
        loader=PackageLoader("fedtorch.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"picture": picture, "name": visible, "text": partial(visible, longest=_LONGEST_TEXT)}
    return made


def _tiles(story: Story, clients: int) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page: (label, value, remark)."""
    table, about = story.table, story.about
    so_far = "" if about["goal"] is None else f"of {about['goal']:,}, still running"
    tiles = [("rounds", f"{len(table):,}", about["ended"] or so_far), ("clients", f"{clients:,}", "")]
    if not len(table):
        return tiles
    last = lambda name: float(table[name].dropna().iloc[-1]) if table[name].notna().any() else math.nan
    if "train_loss" in table:
        tiles.append(("training loss", number(last("train_loss")), f"{number(table['train_loss'].iloc[0])} at first"))
    for name in table:
        if name.startswith("val_") and f"{name}_mean" in table:
            span = f"clients {number(last(f'{name}_min'))} to {number(last(f'{name}_max'))}"
            without = last(f"{name}_undefined") if f"{name}_undefined" in table else 0.0
            span += f", undefined of {without:.0f}" if without > 0 else ""
            tiles.append((in_words(name), number(last(name)), span))
    for name, score in about["scores"].items():
        if f"{name}_mean" not in table:  # otherwise a tile of the history has the score
            known = [value for value in score["clients"] if value is not None]
            span = f"clients {number(min(known))} to {number(max(known))}" if known else ""
            span += f", NaN of {score['failed']}" if score.get("failed") else ""
            span += f", undefined of {score['undefined']}" if score.get("undefined") else ""
            tiles.append((in_words(name), number(math.nan if score["overall"] is None else score["overall"]), span))
    sent = [size(float(table[name].iloc[-1])) for name in ("bytes_up", "bytes_down")]
    tiles.append(("sent up", sent[0], f"{sent[1]} down"))
    if "epsilon" in table:
        delta = f"at δ = {number(last('delta'))}" if "delta" in table else ""
        tiles.append(("ε spent", number(last("epsilon")), delta))
    requests = int(table["asked"].sum())
    missing = requests - int(table["answered"].sum())
    tiles.append(("answers missing", f"{100 * missing / max(requests, 1):.3g} %", f"{missing:,} of {requests:,}"))
    total = float(table["seconds"].sum())
    tiles.append(("time in rounds", _duration(total), f"{number(1000 * total / len(table))} ms a round"))
    return tiles


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _last_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """Return each client's last `round` and `train_loss`, and how often it `answered`, by decreasing loss."""
    groups = losses.groupby("client", sort=False)
    last = groups.last()
    last["answered"] = groups.size()
    return last.sort_values("train_loss", ascending=False, kind="stable")


def _client_charts(last: pd.DataFrame, scores: dict[str, Any]) -> list[Chart]:
    """Return charts of the clients' last losses and scores, each sorted."""
    values = {"Last training loss": last["train_loss"].to_numpy(dtype=np.float64)}
    values |= {in_words(name): np.array(score["clients"], dtype=np.float64) for name, score in scores.items()}
    made = []
    for name, column in values.items():
        known = np.sort(column[np.isfinite(column)])
        if len(known) > 1:
            share = np.linspace(0, 100, len(known))
            title = f"{name[0].upper()}{name[1:]} of every client, sorted"
            made.append(chart(title, "clients, %", share, [Series(name, known)]))
    return [each for each in made if each is not None]


def _client_tables(losses: pd.DataFrame, last: pd.DataFrame, about: dict[str, Any]) -> list[Words]:
    """Return tables of the clients with the worst losses and scores."""
    tables = []
    if len(last):
        rows = [
            [str(name), number(row.train_loss), f"{int(row.round):,}", f"{int(row.answered):,}"]
            for name, row in zip(last.index[:_WORST], last[:_WORST].itertuples())
        ]
        tables.append(Words("Largest last training loss", ["client", "loss", "in round", "times answered"], rows))
    for name, score in about["scores"].items():
        scores = np.array(score["clients"], dtype=np.float64)
        order = [i for i in scores.argsort(kind="stable") if np.isfinite(scores[i])]
        best = score["largest_is_best"]
        if best is None:
            parts = {"Lowest": order[: _WORST // 2], "Highest": order[::-1][: _WORST // 2]}
        else:
            parts = {"Worst": order[:: 1 if best else -1][:_WORST]}
        for word, ends in parts.items():
            rows = [[about["clients"][i] if i < len(about["clients"]) else str(i), number(scores[i])] for i in ends]
            tables.append(Words(f"{word} {in_words(name)}", ["client", "score"], rows))
    return tables


def _missing(shares: dict[str, Any] | None) -> Words | None:
    """Return the table of missing cells, in per cent."""
    if shares is None:
        return None
    rows = [[name, f"{int(n):,}", *(f"{100 * share:.3g} %" for share in each)] for name, n, *each in shares["rows"]]
    return Words("Missing cells", ["client", *shares["columns"]], rows)


def _network(about: dict[str, Any], last: pd.DataFrame) -> Picture | None:
    """Return a picture of the network, with nodes shaded by their last losses."""
    if about["network"] is None:
        return None
    names = about["clients"]
    losses = dict(zip(last.index, last["train_loss"]))
    values = [losses.get(name, math.nan) for name in names] if losses else None
    return network(about["network"], names, values, "graph")


def _faults(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the kinds of faults, and how often each occurred."""
    if not len(table):
        return []
    counts = {words: int(table[name].sum()) for name, words in charts.FAULTS.items()}
    return [(words, f"{count:,}") for words, count in counts.items() if count]


def joined(losses: pd.DataFrame, organisations: Mapping[str, Sequence[str]]) -> tuple[pd.DataFrame, set[str]]:
    """Replace the losses of clients whose organisation sends their mean by one line; return also such organisations.

    A site that does not let its clients be told apart sends their mean in place of each client's loss: in every round
    the same number for all of its clients.

    Args:
        losses: `round`, `client`, `train_loss`.
        organisations: clients by organisation.
    """
    losses, shared = losses.copy(), set()
    for name, clients in organisations.items():
        inside = losses["client"].isin(list(clients))
        rounds = losses[inside].groupby("round")["train_loss"]
        if len(clients) < 2 or not inside.any() or rounds.size().max() < 2 or rounds.nunique(dropna=False).max() > 1:
            continue
        shared.add(name)
        losses.loc[inside, "client"] = f"{name}: mean of {len(clients)} clients"
    return losses.drop_duplicates(["round", "client"], ignore_index=True), shared


def organisations(
    clients: Mapping[str, Sequence[str]], shared: set[str], absences: Mapping[str, str]
) -> list[list[str]]:
    """Return a line for each organisation: its name, its clients, the kind of its numbers, and its absences.

    >>> organisations({"north": ["a", "b"], "south": ["c"]}, {"north"}, {"south": "late 2 times"})
    [['north', '2: a, b', 'the mean of 2 clients', ''], ['south', '1: c', "each client's own", 'late 2 times']]
    """
    lines = []
    for name, members in clients.items():
        few = ", ".join(members[:4]) + ", …" * (len(members) > 4)
        numbers = f"the mean of {len(members)} clients" if name in shared else "each client's own"
        lines.append([name, f"{len(members):,}: {few}", numbers, absences.get(name, "")])
    return lines
