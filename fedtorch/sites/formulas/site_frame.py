"""A site's frame: its answers to a server about columns, and its rows by the design on which sites have agreed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtorch import _files as files
from fedtorch.data import Design, from_frame
from fedtorch.data.agreement.disclosure import Disclosure, Refused
from fedtorch.data.agreement.site import Answers, complete
from fedtorch.data.bad_clients import without_rows
from fedtorch.data.formulas.parsing import parse
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.past_sums import PastSums
from fedtorch.sites.rounds.policy import Refusal

if TYPE_CHECKING:
    from fedtorch.sites.rounds.configuration import SiteConfiguration

_LOG = logging.getLogger(__name__)
_FILE = "design.json"
DESCRIBE, CONFIRM = "describe", "confirm"  # steps before a design, between which sites may fall silent
ONE_WAY = "set missing='impute' at all sites where cells are missing, or missing='drop' at all of them"


class SiteFrame:
    """The frame of a site, if it has one.

    Args:
        configuration: the site's configuration.
        folder: folder of its states, which stores the agreed design; None to store none.
        in_order: returns a configuration with its clients in the order in which the site numbers them.
        past: the site's record of the sites with which it has agreed.

    Attributes:
        configuration: the configuration, with rows by the agreed design if there is one.
    """

    def __init__(
        self,
        configuration: SiteConfiguration,
        folder: Path | None,
        in_order: Callable[[SiteConfiguration], SiteConfiguration],
        past: PastSums,
    ) -> None:
        self._in_order, self._whole, self._past = in_order, configuration, past
        self.configuration, policy = configuration, configuration.policy
        self._masks = False  # whether all sites of a run, including this one, keep missing cells
        self._path = None if folder is None else folder / _FILE
        self._answers: Answers | None = None
        if configuration.frame is not None:
            limits = Disclosure(policy.minimum, policy.columns, policy.designs, policy.person, configuration.client)
            self._answers = Answers(configuration.frame, limits, folder, drop=configuration.missing == "drop")
            if self._path is not None and self._path.exists():
                stored = files.read_json(self._path)
                self._masks = stored.get("masks", False)
                try:
                    self._make(Design.from_json(stored["design"]))
                except Refused as error:  # for example because missing= has changed
                    _LOG.warning("cannot make rows by the stored design: %s", error)

    def answer(self, frame: Frame) -> bytes:
        """Answer a question about the frame; if it contains a design, make rows by it.

        Raises:
            Refusal: the site has no frame, or does not agree with these sites.
        """
        if self._answers is None:
            raise Refusal("the site has rows, but no frame for a formula")
        question = frame.names("question")
        if question.get("step") in (DESCRIBE, CONFIRM):
            answer = self._describe(question, self._answers)
        else:
            answer = self._answers.answer(question)
        if question.get("step") == "make" and "refused" not in answer:
            self._masks = question.get("masks") is True
            answer = self._take(self._answers.agreed, answer)
        return frames.encode("agree", sequence=frame.integer("sequence", 1), answer=answer)

    def _describe(self, question: Mapping[str, Any], answers: Answers) -> dict[str, Any]:
        """Describe columns to the server, or confirm that a design may follow from the sites' descriptions."""
        describing = {**question, "step": DESCRIBE}
        try:
            columns = answers.told(describing)
        except Exception:  # the answer gives the reason
            return answers.answer(describing)
        sites, confirmed = question.get("sites"), question["step"] == CONFIRM
        if not isinstance(sites, list) or not sites or not all(isinstance(site, str) for site in sites):
            raise Refusal("expected the names of the sites whose answers determine the design")
        self._past.of_agreement(columns, frozenset(sites), confirmed=confirmed)
        return {} if confirmed else answers.answer(question)

    def _take(self, design: Design | None, answer: dict[str, Any]) -> dict[str, Any]:
        """Make rows by a design and store it; return `answer`, or the reason why rows cannot be made."""
        try:
            assert design is not None
            self._make(design)
        except Refused as error:
            _LOG.warning("refused: %s", error)
            return {"refused": str(error)}
        except Exception as error:  # whose message may name rows
            _LOG.exception("this site could not make rows")
            return {"refused": without_rows(error, "the site could not make rows, ")}
        _LOG.info("rows have %d columns, by the agreed design of %r", len(design.columns), design.formula)
        whole, rows = len(self._whole.frame), int(self.configuration.data.counts.sum())
        if rows < whole:
            _LOG.info("%d of %d rows lack a cell, and are left out", whole - rows, whole)
        if self._path is not None:
            files.write_json(self._path, {"design": design.to_json(), "masks": self._masks})
        return answer

    def _make(self, design: Design) -> None:
        assert self._answers is not None
        made = self._with_rows(design)
        self._answers.leave_out(design.reads if self._whole.missing == "drop" else ())
        self.configuration = made

    def _with_rows(self, design: Design) -> SiteConfiguration:
        table, missing = self._whole.frame, self._whole.missing
        stay = complete(table, design.reads)
        if not stay.all() and missing == "refuse":
            column = next(column for column in design.reads if bool(table[column].isna().any()))
            remedy = "leave such rows out, missing='drop' in its file, or impute them, missing='impute'"
            raise Refused(f"the site's column {column!r} has missing cells; {remedy}")
        if self._masks and missing == "drop":
            raise Refused(f"the site leaves out rows that lack a cell, and others keep theirs; {ONE_WAY}")
        if design.group != self._whole.client:
            raise Refused(f"the site's column of clients is {self._whole.client!r}, not {design.group!r}")
        how = "impute" if self._masks else missing
        data = from_frame(table, client=design.group, design=design, missing=how)
        return self._in_order(replace(self._whole, data=data, frame=table[stay] if missing == "drop" else table))

    def beside(self, text: str | None) -> SiteConfiguration:
        """Return the configuration with the rows of another run, by a design as JSON.

        Raises:
            Refusal: the site has not made rows by this design, or leaves out other rows for it.
        """
        if text is None:
            return self.configuration
        if self._answers is None or not self._answers.has_made(text):
            raise Refusal("the site has not made rows by the design of another model; begin with sites.agree(...)")
        design, current = Design.from_json(text), self.configuration.data.design
        table, drops = self._whole.frame, self._whole.missing == "drop"
        if drops and (current is None or bool((complete(table, design.reads) != complete(table, current.reads)).any())):
            raise Refusal(
                "models are compared on the same rows, and the site leaves out other rows for one formula than for the "
                "other; take columns that are complete, or let its side impute, missing='impute'"
            )
        return self._with_rows(design)


def formula_of(question: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """Return (the formula of a question, the columns that it reads); None for a question that is refused anyway."""
    try:
        if question.get("step") == "make":
            design = Design.from_json(question["design"])
            return design.formula, tuple(sorted(design.reads))
        columns = {*parse(question["formula"]).columns, *question.get("offset", []), *question.get("beside", [])}
        return question["formula"], tuple(sorted(map(str, columns)))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def by_design(configuration: SiteConfiguration) -> dict[str, str]:
    """Return a site's announcement about its frame; empty without a frame.

    It contains a digest of the design of its rows, "" before there is one, and the treatment of missing cells.
    """
    design = configuration.data.design
    if configuration.frame is None:
        return {}
    made = "" if design is None else hashlib.sha256(design.to_json().encode()).hexdigest()
    return {"design": made, "missing": configuration.missing}
