"""The agreement on a design as a conversation of halves: in one process, over ranks, over streams.

Questions and answers are defined in `fedtorch.data.agreement`; here they are transported, as JSON. If every rank has a
frame, rank 0 asks, and answers for its own:

    half = site_half(sites[rank]) if rank else server_half(request, [1, 2], {0: sites[0]})
    design, traffic = over_ranks(half, rank, 3)  # of `fedtorch.protocol.ranks`

(`ft.Distributed` has the same data on every rank, and so the same design.) `fedtorch.sites.agree` asks sites that have
a frame and later run by the design.

>>> import pandas
>>> from fedtorch.data.agreement.server import Request, agreed
>>> from fedtorch.data.agreement.site import Answers
>>> from fedtorch.protocol.halves import together
>>> frames = {j: pandas.DataFrame({"age": [30.0 + i + j for i in range(60)], "y": [0.0, 1.0] * 30}) for j in (1, 2)}
>>> request, sites = Request("y ~ scale(age)"), {j: Answers(frame) for j, frame in frames.items()}
>>> results, traffic = together({0: server_half(request, [1, 2]), **{j: site_half(sites[j]) for j in (1, 2)}})
>>> results[0] == results[1] == results[2] == agreed(request, sites)
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedtorch.data.agreement.server import Request, conversation
from fedtorch.data.agreement.site import Answers
from fedtorch.data.formulas.design import Design
from fedtorch.protocol.halves import Half, Name, Receive, Send
from fedtorch.wire import PayloadError

LONGEST = 2**24  # bytes of a question or an answer


def server_half(request: Request, sites: Sequence[Name], local: Mapping[Name, Answers] = MappingProxyType({})) -> Half:
    """Ask all sites, and return the agreed design.

    Args:
        request: settings of the agreement.
        sites: their names, or numbers of ranks.
        local: sites whose frames are in this process, such as rank 0's.

    Raises:
        ValueError: a site refuses, or the answers do not suffice; all sites are notified.
    """
    talk = conversation(request)
    question = next(talk)
    while True:
        for site in sites:
            yield Send(site, encoded(question))
        answers = {str(site): decoded(str(site), encoded(each.answer(question))) for site, each in local.items()}
        for site in sites:
            answers[str(site)] = yield Receive(site, decoded)
        try:
            question = talk.send(answers)
        except (StopIteration, ValueError) as end:
            over = isinstance(end, StopIteration)
            for site in sites:
                yield Send(site, encoded({"step": "over"} if over else {"step": "failed", "why": str(end)[:2000]}))
            if isinstance(end, ValueError):
                raise
            return end.value


def site_half(site: Answers, server: Name = 0) -> Half:
    """Answer a server until all have agreed; return the design.

    Raises:
        ValueError: there is no agreement; the message has the reason.
    """
    while True:
        question = yield Receive(server, decoded)
        if question.get("step") == "failed":
            raise ValueError(f"Expected an agreement of sites, but the server sent: {str(question.get('why'))[:2000]}")
        if question.get("step") == "over":
            return _design(site)
        yield Send(server, encoded(site.answer(question)))


def encoded(value: Any) -> bytes:
    """Return a question or an answer as bytes."""
    return json.dumps(value, allow_nan=False, sort_keys=True).encode()


def decoded(sender: str, payload: bytes) -> dict[str, Any]:
    """Decode the question or the answer of a payload.

    Raises:
        PayloadError: it is neither.

    >>> decoded("ward 7", encoded({"step": "over"}))
    {'step': 'over'}
    """
    try:
        value = json.loads(payload) if len(payload) <= LONGEST else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PayloadError(
            f"payload of {sender!r}: expected JSON by name, but got {len(payload)} bytes of something else"
        )
    return value


def _design(site: Answers) -> Design:
    if site.agreed is None:
        raise ValueError("Expected a design before the agreement is over, but the server sent none")
    return site.agreed
