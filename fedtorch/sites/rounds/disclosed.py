"""The fields that a site sends besides its clients' messages: announcements, totals, scores and post-fit queries.

Names are those of the frames: a message and its fields, where `*` is any name. The fields `sequence`, `sizes`, `nodes`,
`protocol` and `again` count or number frames, and disclose nothing about rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.disclosure import CLIENT, SERVER, SITE
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.learns import EXACT, Field, Learns

NUMBERS = ("sequence", "sizes.*", "nodes", "protocol", "again", "everybody")  # fields that disclose nothing about rows
_NAMES = Learns("which clients there are, by name if each has at least `minimum` rows", helps="Policy(minimum=…)")
_COUNTS = Learns("how many rows each client has; for clients with few, their mean", helps="Policy(minimum=…)")
_SCHEMA = Learns("names, dtypes and shapes of the columns")
_WHO = Learns("which clients answered, or had NaN or Inf, and in which field; not which clients, if some have few rows")
_WORDS = Learns("nothing: words that look random, or are sealed, and keys")
_SCORES = Learns(
    "sums of metrics over at least `minimum` validation rows, by models that the server chooses: it can read single "
    "rows",
    "attacks.membership",
    "no metrics, or a server trusted not to compose models",
)
_CHOSEN = ", at parameters that the server chooses: it can read single rows"
_TRUSTED = "Policy(after_fit=()), or a server trusted not to compose questions"
_ANSWERS = {
    "effects": Learns("clients' posteriors, each of at least `minimum` rows" + _CHOSEN, helps=_TRUSTED),
    "densities": Learns("sums of log densities over at least `minimum` rows" + _CHOSEN, helps=_TRUSTED),
    "margins": Learns("sums over at least `minimum` rows of changes of the mean response" + _CHOSEN, helps=_TRUSTED),
    "checks": Learns(
        "sums of responses over at least `minimum` rows, in bins of as many, observed and drawn anew" + _CHOSEN,
        helps=_TRUSTED,
    ),
}
_COLUMN = "what at least `minimum` rows of a site have in common; of fewer, that they are there"
_AGREED = {
    "text": Learns("which columns are text"),
    "objects": Learns("which columns hold whole numbers among other things"),
    "histograms.*": Learns(_COLUMN, helps="Policy(columns=…, minimum=…)"),
    "levels.*": Learns(_COLUMN, helps="declared levels"),
    "rows": Learns("how many rows the site has"),
    "refused": Learns("why the site does not answer; no client, row or value"),
}
_MISSING = Learns("what the site does with missing cells, whether it has some or not")
_DESIGN, _REASON = Learns("by which design its rows are made, as a digest"), _AGREED["refused"]


def conversation(
    algorithm: Algorithm, carry: Carry, sites: Sequence[str], answered: Sequence[Field]
) -> Iterator[Field]:
    """Yield the fields that a site may send in a run, besides its answers to rounds.

    Args:
        algorithm: the run's algorithm.
        carry: transport of messages.
        sites: names of the sites to which envelopes are sent.
        answered: fields of its answers to rounds.
    """
    from fedtorch.inference.questions import answered as answered_after

    def sent(message: str, field: str, learns: Learns, owner: str = SITE) -> Field:
        return Field(message, field, (), owner, EXACT, SERVER, learns)

    yield sent("hello", "clients", _NAMES, CLIENT)
    yield sent("hello", "rows", _COUNTS, CLIENT)
    yield sent("hello", "schema", _SCHEMA)
    yield sent("hello", "design", _DESIGN)
    yield sent("hello", "missing", _MISSING)
    yield sent("refusal", "reason", _REASON)
    for name in ("clients", "ids", "refused.*", "info"):
        yield sent("round", name, _WHO, CLIENT)
    yield from (each._replace(message="total") for each in answered if each.field.startswith("told."))
    if algorithm.told is not None and not algorithm.exchange.additive:
        yield sent("total", "told.ids", _WHO, CLIENT)
    if carry.masks is not None:
        yield from (sent(message, "said", _WORDS) for message in ("round", "total", "phase"))
    if carry.network is not None:
        yield from (sent(message, to, _WORDS) for message in ("round", "envelopes") for to in sites)
    hidden = carry.masks is not None or carry.network is not None
    if hidden:
        yield sent("keys", "keys", _WORDS)
    if algorithm.predict is not None:
        yield sent("evaluate", "sums.*", _SCORES, CLIENT)
    if algorithm.posterior is not None and not hidden:
        for name, kind in sorted(answered_after(algorithm.posterior).items()):
            owner = CLIENT if kind.by_client else f"{SITE}'s sum"
            yield sent(f"ask {name}", "told*", _ANSWERS[kind.tells], owner)
    yield from agreement()


def agreement() -> Iterator[Field]:
    """Yield what a site may say of its frame where sites agree on a formula."""
    for name, learns in _AGREED.items():
        yield Field("agree", name, (), SITE, EXACT, SERVER, learns)
