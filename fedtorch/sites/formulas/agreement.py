"""The server's part: sites that are connected agree on a design."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedtorch import expected
from fedtorch.data import Design
from fedtorch.data.agreement.alike import Unlike, check_alike
from fedtorch.data.agreement.server import Request, conversation
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.audit.recording import agreeing
from fedtorch.sites.formulas.site_frame import ONE_WAY
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.sites import Sites, reasons
from fedtorch.sites.streams.hub import Hub


def agree(
    host: Hub,
    sites: Sequence[str],
    formula: str | Design,
    *,
    client: str = "",
    minimum: int = 10,
    levels: Mapping[str, Sequence[Any]] | None = None,
    other: Mapping[str, str] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    scales: Mapping[str, tuple[float, float]] | None = None,
    standardise: bool = True,
    offset: str | None = None,
    weights: str | None = None,
    trials: str | None = None,
    seconds: float = 60.0,
    timeout: float = 60.0,
    record: AuditRecord | None = None,
) -> Design:
    """Let sites agree on the levels, knots, means and scales of a formula; each then makes rows of its own frame by it.

    No rows leave a site, and nothing of fewer rows than the minimum, or than its policy's if that is larger: then it
    refuses. What the server learns of each site is on the page "What is private and what is not".

    Args:
        host: where sites connect.
        sites: their names.
        formula: such as `"death ~ age + C(sex) + (1 | ward)"`; or the design that others have agreed on, for sites that
            come later.
        client: the column of clients in the sites' frames.
        minimum: rows that are behind any number or name that a site tells, or persons, where its policy counts these.
        levels: declared levels of factors, column -> values, the reference first; sites tell those of others.
        other: the level of a factor as which rows count whose own is too rare to be told, column -> name.
        bounds: the outer knots of splines, column -> (lower, upper).
        scales: declared means and sds of columns of which sites tell too little, by column or `"log(column)"`:
            `{"nyha": (2, 1)}`.
        standardise, offset, weights, trials: see `ft.data.from_frame`.
        seconds: the longest wait for answers.
        timeout: the longest wait for sites to connect.
        record: what sites are asked, and who answers, is appended to it.

    Raises:
        ValueError: a formula or a declaration that is none; a site refuses, or the sites tell too little. The message
            names site and column.
        TimeoutError: a site did not come, or did not answer in time.

    Example:
        >>> import threading, pandas, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> from fedtorch.sites import Hub, SiteConfiguration, agree, join
        >>> from fedtorch.sites.streams import memory
        >>> host, algorithms = Hub(), {"regression": lambda design: ft.ep(hierarchical.regression(design))}
        >>> frame = pandas.DataFrame({"ward": "7", "age": [30.0 + i for i in range(60)], "score": [0.5, 1.5] * 30})
        >>> configuration = SiteConfiguration.of_frame(frame, "ward", algorithms)
        >>> dial = lambda: memory.link(host, "clinic")
        >>> site = threading.Thread(target=join, args=(dial, configuration), daemon=True)
        >>> site.start()
        >>> design = agree(host, ["clinic"], "score ~ age + (1 | ward)", client="ward")
        >>> design.columns, design.encoding.standard["age"].mean
        (('Intercept', 'age'), 57.6)
    """
    expected.positive(seconds=seconds, timeout=timeout)
    request: Request | Design = formula if isinstance(formula, Design) else Request(
        formula, minimum, client, levels or {}, other or {}, bounds or {}, scales or {}, standardise, offset, weights,
        trials,
    )  # fmt: skip
    asked = Sites(host, sites, alike=False)
    asked.meet(timeout)
    run = secrets.token_hex(16)
    ways = {name: asked.bring[name].missing for name in asked.names}
    masks = "impute" in ways.values()
    try:
        if masks:
            said = {name: f"missing={way!r}" for name, way in ways.items() if way in ("drop", "impute")}
            check_alike("one way with missing cells", said, f"no estimate follows from both; {ONE_WAY}")
        half = _half(asked, request, run, seconds, masks)
        return asked.drive(half, run, None, agreeing(record, asked.ask))[0]
    except Unlike as error:
        asked.turn_away(error.odd, str(error))
        raise


def _half(sites: Sites, request: Request | Design, run: str, seconds: float, masks: bool) -> Half:
    """Ask all sites, and return the design that they have agreed on.

    Args:
        sites: that are asked.
        request: what they are to agree on.
        run: the conversation's identity.
        seconds: the longest wait for answers.
        masks: whether some keep missing cells, so that all have rows with a mask of what is there.
    """
    talk, names = conversation(request), sites.names
    question = next(talk)
    while True:
        number = sites.next_sequence()
        question = {**question, "masks": True} if masks and question["step"] == "make" else question
        payload = frames.encode("agree", run=run, sequence=number, question=question)
        for name in names:
            yield Send(name, payload, sequence=number)
        refused: dict[str, str] = {}
        read = partial(_answer_or_refusal, refused)
        heard = yield Receive(names, read, least=len(names), seconds=seconds)
        if refused:
            raise ValueError(f"Expected answers of all sites, but some refuse: {reasons(refused)}")
        if heard.missing:
            raise TimeoutError(f"Expected answers of all sites within {seconds:g} s, but got {reasons(heard.missing)}")
        try:
            question = talk.send(heard.messages)
        except StopIteration as done:
            return done.value


def _answer_or_refusal(refused: dict[str, str], site: str, came: bytes | Frame) -> dict[str, Any]:
    """Return a site's answer; of one that refuses keep why."""
    frame = came if isinstance(came, Frame) else frames.read(came, site)
    if frame.kind == "refusal":
        refused[site] = frame.text("reason")[:1000]
    return frames.reading(_read)(site, frame)


def _read(site: str, frame: Frame) -> dict[str, Any]:
    return frame.names("answer")
