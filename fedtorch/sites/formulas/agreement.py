"""The server's part of an agreement of connected sites on a design.

Each site gets the names of the sites that are asked, and answers about its columns (`describe`). The design follows
from the answers that arrive, and the server sends their sites the names of these sites (`confirm`), which each records.
At both steps a site refuses if it has taken part in another design of a column with other sites: see `past_sums`, also
for the adversary. Only then the design leaves the server (`make`). A site that falls silent after its answer stays in
the design, because a design without it would be another one.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fedtorch import expected
from fedtorch.data import Design
from fedtorch.data.agreement.alike import Unlike, check_alike
from fedtorch.data.agreement.server import Request, check_answers, conversation
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.audit.recording import agreeing
from fedtorch.sites.formulas.site_frame import CONFIRM, DESCRIBE, ONE_WAY
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.sites import Sites, at_least, reasons
from fedtorch.sites.streams.hub import Hub

_LOG = logging.getLogger(__name__)


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
    quorum: float = 1.0,
    timeout: float = 60.0,
    troubles: dict[str, str] | None = None,
    record: AuditRecord | None = None,
) -> Design:
    """Let sites agree on the levels, knots, means and scales of a formula, by which each makes rows of its own frame.

    No rows leave a site, and no number from fewer rows than the minimum, or than its policy's if that is larger: a site
    refuses instead. The page "What is private and what is not" lists what the server learns about each site.

    A site that was late, or refused, is not in the agreement, as a log message says. It makes rows by the design later,
    `agree(host, [name], design)`, and sends nothing about its columns for that. Sites refuse a new agreement on a
    column together with it: the difference of the two designs would disclose its answers to the other sites.

    Args:
        host: where sites connect.
        sites: names of the sites.
        formula: such as `"death ~ age + C(sex) + (1 | ward)"`; or an agreed design, for sites that come later.
        client: the column of clients in the sites' frames.
        minimum: least rows behind any number or name that a site sends, or persons, if its policy counts these.
        levels: declared levels of factors, column -> values, the reference first; sites send those of other factors.
        other: level of a factor for rows whose own level is too rare to be sent, column -> name.
        bounds: the outer knots of splines, column -> (lower, upper).
        scales: declared means and sds of columns about which sites may send too little, by column or `"log(column)"`:
            `{"nyha": (2, 1)}`.
        standardise, offset, weights, trials: see `ft.data.from_frame`.
        seconds: longest wait for answers.
        quorum: fraction of the sites that must take part; a whole number is their number. If several sites are asked
            for an agreement, it needs at least two: a design from one site's answers would disclose these.
        timeout: longest wait for sites to connect; after it, a quorum goes on without the others.
        troubles: a dict to fill with the sites that are not in the agreement, by name, with reasons.
        record: log of requests and answers.

    Raises:
        ValueError: an invalid formula or declaration; sites refuse, and the others are fewer than the quorum; a site
            has agreed on a column with other sites before; or the sites' answers are not enough. The message names site
            and column.
        TimeoutError: sites did not connect or answer in time, and the others are fewer than the quorum.

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
    least = _least(quorum, len(sites), alone=isinstance(formula, Design))
    asked = Sites(host, sites, alike=False)
    asked.meet(timeout, least)
    run, missing = secrets.token_hex(16), asked.absent
    ways = {name: asked.bring[name].missing for name in asked.names if name not in missing}
    masks = "impute" in ways.values()
    try:
        if masks:
            treatments = {name: f"missing={way!r}" for name, way in ways.items() if way in ("drop", "impute")}
            check_alike("one way with missing cells", treatments, f"no estimate follows from both; {ONE_WAY}")
        half = _half(_Asking(asked, run, request.formula, least, seconds, missing), list(ways), request, masks)
        design: Design = asked.drive(half, run, None, agreeing(record, asked.ask))[0]
    except Unlike as error:
        asked.turn_away(error.odd, str(error))
        raise
    if missing:
        what = f"{len(sites) - len(missing)} of {len(sites)} sites have agreed on {design.formula!r}"
        _LOG.warning("%s, without %s", what, reasons(missing))
        for name, why in missing.items():
            remedy = f"the server's side can have it make rows by their design, agree(host, [{name!r}], design)"
            asked.turn_away([name], f"sites have agreed on {design.formula!r} without {name!r}: {why}; {remedy}")
    if troubles is not None:
        troubles.clear()
        troubles.update(missing)
    return design


def _least(quorum: float, asked: int, alone: bool) -> int:
    """Return the number of sites that must take part.

    Args:
        quorum: a fraction of them, or their number.
        asked: number of all sites.
        alone: whether one of several may be enough, because sites send nothing about their columns.

    >>> _least(0.5, 5, alone=False), _least(4, 5, alone=False), _least(1.0, 1, alone=False)
    (3, 4, 1)
    """
    number = type(quorum) is int
    if not (1 <= quorum <= asked if number else 0 < quorum <= 1):
        raise ValueError(f"Expected a quorum above 0 and at most 1, or 1 to {asked} sites, but got {quorum}")
    least = int(quorum) if number else math.ceil(quorum * asked)
    if least < min(2, asked) and not alone:
        raise ValueError(
            f"Expected a quorum of at least 2 of {asked} sites, because a design from one site's answers discloses "
            f"them, but got {quorum}, which is 1 site; use 1.0 for all sites"
        )
    return least


class _Asking(NamedTuple):
    """The requests to the sites of an agreement."""

    sites: Sites
    run: str  # identity of the conversation
    formula: str
    least: int  # least number of sites that must answer
    seconds: float  # longest wait for answers
    missing: dict[str, str]  # sites that are not in the agreement so far, with reasons

    def ask(self, names: Sequence[str], question: Mapping[str, Any], *, refusing: bool = True) -> Half:
        """Return the answers to a question by name, without those of sites that refuse or are late.

        Args:
            names: names of the sites to ask.
            question: the question to all of them.
            refusing: whether the others go on without a site that refuses.

        Raises:
            ValueError: a site refuses, and the others are too few, or do not go on without it.
            TimeoutError: too few sites have answered in time.
        """
        number, refused = self.sites.next_sequence(), dict[str, str]()
        payload = frames.encode("agree", run=self.run, sequence=number, question=question)
        for name in names:
            yield Send(name, payload, sequence=number)
        read = partial(_answer_or_refusal, refused)
        received = yield Receive(tuple(names), read, least=self.least, seconds=self.seconds)
        for name in names:
            self.missing.pop(name, None)
        declined = {
            name: str(answer["refused"])[:1000] for name, answer in received.messages.items() if "refused" in answer
        }
        self.missing.update({**received.missing, **declined})
        answers = {name: answer for name, answer in received.messages.items() if name not in declined}
        if len(answers) >= self.least and (refusing or not (refused or declined)):
            return answers
        every = at_least(self.least, len(self.sites.names))
        if refused:
            why = refused if self.least == len(names) else received.missing
            raise ValueError(f"Expected answers of {every}, but some refuse: {reasons(why)}")
        check_answers(received.messages, self.formula)
        raise TimeoutError(f"Expected answers of {every} within {self.seconds:g} s, but got {reasons(self.missing)}")


def _half(asking: _Asking, names: Sequence[str], request: Request | Design, masks: bool) -> Half:
    """Ask sites, and return the design on which they have agreed.

    Args:
        asking: the requests to sites.
        names: names of the connected sites.
        request: subject of the agreement, or an agreed design.
        masks: whether some sites keep missing cells, so that rows of all sites have a mask.
    """
    talk = conversation(request)
    question = next(talk)
    if question["step"] == DESCRIBE:
        answers = yield from asking.ask(names, {**question, "sites": list(names)})
        names, made = list(answers), talk.send(answers)
        yield from asking.ask(names, {**question, "step": CONFIRM, "sites": names}, refusing=False)
        question = made
    answers = yield from asking.ask(names, {**question, "masks": True} if masks else question)
    try:
        talk.send(answers)
    except StopIteration as done:
        return done.value
    raise AssertionError("Expected a design once sites have made rows by it")


def _answer_or_refusal(refused: dict[str, str], site: str, came: bytes | Frame) -> dict[str, Any]:
    """Return a site's answer; store the reason of a refusal in `refused`."""
    frame = came if isinstance(came, Frame) else frames.read(came, site)
    if frame.kind == "refusal":
        refused[site] = frame.text("reason")[:1000]
    return frames.reading(_read)(site, frame)


def _read(site: str, frame: Frame) -> dict[str, Any]:
    return frame.names("answer")
