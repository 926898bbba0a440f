"""Consent of a person at the site, before anything of a run leaves: the text that is shown, and the recorded answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedtorch.chained_log import digest
from fedtorch.learns import Field, as_frame, in_brief
from fedtorch.sites.rounds.policy import Refusal

_LOG = logging.getLogger(__name__)
_SHOWN = 12  # digits of a digest
_LONGEST = 300  # most characters of a server's value; a longer one is shortened, with its length and digest
Ask = Callable[[str], bool]
Note = Callable[..., None]


class Consent:
    """A person's answers, one for each text that was shown.

    Args:
        ask: shows a text and returns whether the person agrees; None to allow everything without asking.
        note: writes an answer into the audit record.

    >>> Consent(lambda shown: False, lambda event, **about: None).to("the run 7f", "…")
    Traceback (most recent call last):
    fedtorch.sites.rounds.policy.Refusal: the site's people have said no to the run 7f
    """

    def __init__(self, ask: Ask | None, note: Note) -> None:
        self._ask, self._note = ask, note
        self._answers: dict[str, bool] = {}  # by the text shown

    @property
    def is_asked(self) -> bool:
        """Return whether a person is asked."""
        return self._ask is not None

    def to(self, what: str, shown: str) -> None:
        """Ask once; raise `Refusal` unless the answer was yes.

        Args:
            what: subject of the question, in words.
            shown: the complete text for the person.
        """
        if self._ask is None:
            return
        if shown not in self._answers:
            text_digest = digest(shown.encode())
            _LOG.info("asking about %s: %s", what, text_digest[:_SHOWN])
            yes = self._answers[shown] = self._ask(shown)
            self._note("consent", to=what, shown=text_digest, answer="yes" if yes else "no", durable=True)
            _LOG.info("the answer about %s is %s: %s", what, "yes" if yes else "no", text_digest[:_SHOWN])
        if not self._answers[shown]:
            raise Refusal(f"the site's people have said no to {what}")


def of_run(run: str, algorithm: str, settings: Mapping[str, Any], clients: str, fields: Iterable[Field]) -> str:
    """Return the text that is shown about a run.

    Args:
        run: identity of the run.
        algorithm: name of the algorithm.
        settings: the server's settings.
        clients: the site's clients, in words.
        fields: fields that leave the site.
    """
    given = ", ".join(f"{_quoted(name)[1:-1]}={_quoted(value)}" for name, value in settings.items())
    head = [f"Run {run}", f"Algorithm: {algorithm}({given})", f"Clients: {clients}"]
    return "\n".join([*head, "What leaves this site in the run:", *_lines(fields)])


def of_formula(formula: str, columns: Iterable[str], fields: Iterable[Field]) -> str:
    """Return the text that is shown about an agreement on a formula, which reads columns of the site's frame."""
    read = ", ".join(map(_quoted, columns))
    head = [f"An agreement on the formula {_quoted(formula)}", f"Columns that it reads: {read}"]
    return "\n".join([*head, "What leaves this site for it:", *_lines(fields)])


def _lines(fields: Iterable[Field]) -> list[str]:
    lines = []
    for row in in_brief(as_frame(fields)).itertuples():
        helps = f"; what helps: {row.helps}" if row.helps else ""
        lines.append(f"  {row.message}: {row.fields} (of {row.of}, {row.exactness}, to {row.reader})")
        lines.append(f"      discloses at worst {row.learns}{helps}")
    return lines


def _quoted(value: Any) -> str:
    """Return a server's value as printable characters, shortened if it is long; different values differ."""
    text = ascii(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}… ({len(text)} characters, with the digest {digest(text.encode())})"
