"""Writers of audit records, for a site and for a server; without a record they write nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import wire
from fedtorch.chained_log import digest
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.budget import Budget
from fedtorch.learns import Field, as_frame, in_brief
from fedtorch.protocol.halves import Heard
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.fingerprint import fingerprint
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.plan import Plan
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.sites.rounds.sites import Ask, Question

_LOG = logging.getLogger(__name__)
_ASKS = ("run", "round", "sequence", "clients", "lost", "metrics", "question")  # recorded metadata of a request
_BEGINS = ("run", "algorithm", "settings", "fingerprint", "clients", "first")
_RELEASES = {"round", "evaluate", "agree", "ask"}  # kinds whose entry is on disk before the answer leaves
_GROUP, _REASON = 20, 150  # sites in an entry, and characters of each site's reason
Do = Callable[[Frame], bytes | None]
READABLE = "the server reads what every site sends"


class SiteRecording:
    """Records a site's requests and answers.

    Args:
        record: the audit record; None for none.
        configuration: the site's clients, algorithms and policy.
    """

    def __init__(self, record: AuditRecord | None, configuration: SiteConfiguration) -> None:
        self._record = record
        self._recorded: Any = None  # the run and fields of the last `leaves` entry
        if record is not None:
            rows = int(configuration.data.counts.sum())
            about: dict[str, Any] = {
                "algorithms": sorted(configuration.algorithms),
                "clients": len(configuration.data),
                "rows": rows,
            }
            record.note(
                "joined", policy=configuration.policy.described(), metrics=sorted(configuration.metrics), **about
            )

    def note(self, event: str, **about: Any) -> None:
        """Write an entry of any kind."""
        if self._record is not None:
            self._record.note(event, **about)

    def connected(self) -> None:
        """Write that the site has connected to a server with a certificate by its authority."""
        self.note("connected")

    def check_server(self, begin: Frame) -> str | None:
        """Return the fingerprint of the server's key if it has signed `begin`; None without a signature or a record.

        Raises:
            Refusal: the signature is of another content or by another key.
        """
        statement = begin.about.get("server")
        if self._record is None or statement is None:
            return None
        try:
            about = {name: value for name, value in begin.about.items() if name not in ("kind", "server")}
            return self._record.server_of(about, statement if isinstance(statement, dict) else {})
        except ValueError as error:
            raise Refusal(str(error)) from None

    def begin(self, frame: Frame, server: str | None, refused: str | None) -> None:
        """Write that a run has begun, or why the site refuses it."""
        if self._record is not None:
            about = {name: frame.about[name] for name in _BEGINS if name in frame.about}
            about |= {"server": server, **({} if refused is None else {"refused": refused})}
            self._record.note("begin", digest=digest(frame.payload), durable=True, **about)

    def around(self, do: Do, budget: Callable[[], Budget | None], leaves: Callable[[], list[Field]]) -> Do:
        """Return a function like `do` that also records the request and the answer.

        Args:
            do: answers a request.
            budget: returns the run's budget, after the answer.
            leaves: returns the fields that leave the site in rounds; new fields are recorded before their first answer.
        """
        return do if self._record is None else partial(self._answered, self._record, do, budget, leaves)

    def _answered(
        self,
        record: AuditRecord,
        do: Do,
        budget: Callable[[], Budget | None],
        leaves: Callable[[], list[Field]],
        frame: Frame,
    ) -> bytes | None:
        asked = {name: frame.about[name] for name in _ASKS if name in frame.about}
        record.note("request", kind=frame.kind, digest=digest(frame.payload), **asked)
        answer = do(frame)
        run = frame.about.get("run")
        if frame.kind == "round" and (fields := leaves()) and (run, fields) != self._recorded:
            self._recorded = (run, fields)
            brief = in_brief(as_frame(fields))
            record.note("leaves", run=run, fields=brief[["fields", "of", "exactness", "reader"]].values.tolist())
        about: dict[str, Any] = {"kind": frame.kind, "run": run}
        if answer is not None:
            metadata = wire.metadata(answer)
            about |= {"digest": digest(answer), "bytes": len(answer)}
            about |= {"clients": metadata["clients"]} if "clients" in metadata else {}
        about |= _spent(budget())
        record.note("answer", durable=frame.kind in _RELEASES, **about)
        return answer

    def refuse(self, payload: bytes, reason: str) -> None:
        """Write a refusal with its reason."""
        if self._record is not None:
            try:
                self._record.note("refusal", request=digest(payload), reason=ascii(reason)[1:-1][:1000])
            except (OSError, ValueError):
                _LOG.exception("this refusal could not be recorded")

    def over(self, frame: Frame) -> None:
        """Write that the server has ended the run."""
        if self._record is not None:
            self._record.note("over", run=frame.about.get("run"), digest=digest(frame.payload), durable=True)


class ServerRecording:
    """Records a server's requests and the sites' answers.

    Args:
        plan: the population's plan, with its record.
        algorithm: the run's algorithm.
    """

    def __init__(self, plan: Plan, algorithm: Algorithm) -> None:
        self._record, self._plan, self._algorithm = plan.record, plan, algorithm
        self._run = ""  # the last run whose beginning is recorded

    def begin(self, site: str, about: dict[str, Any], tensors: Any) -> bytes:
        """Return the frame that begins a run at a site, and record it; it is signed if there is a record."""
        if self._record is None:
            return frames.encode("begin", tensors, **about)
        frame = frames.encode("begin", tensors, server=self._record.statement(about), **about)
        self._record.note("begin", run=about["run"], digests={site: digest(frame)})
        return frame

    def around(self, ask: Ask) -> Ask:
        """Return a function like `ask` that also records requests, answers, and reasons for missing ones."""
        return ask if self._record is None else partial(self._asked, self._record, ask)

    def _asked(self, record: AuditRecord, ask: Ask, question: Question) -> Heard:
        digests: dict[str, str] = {}
        if question.requests:
            self._write_asked(record, question.run, {site: send.message for site, send in question.requests.items()})
            _keep_digests(question, digests)
        return _ask(record, ask, question, digests)

    def left_out(self, run: str, reasons: Mapping[str, str]) -> None:
        """Write the sites whose answers are not in a sum, with reasons."""
        if self._record is not None:
            for group in _groups(reasons):
                self._record.note("left out", run=run, reasons=_short(group))

    def over(self, run: str, requests: Mapping[str, bytes]) -> None:
        """Write that the end of the run is sent to sites."""
        if self._record is not None:
            self._write_asked(self._record, run, requests)
            self._record.sync()

    def withdrawn(self, run: str, site: str) -> None:
        """Write that a site's contributions were withdrawn from the run."""
        if self._record is not None:
            self._record.note("withdrawn", run=run, site=site, durable=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number and hash of the last entry; empty without a record."""
        head = b"" if self._record is None else self._record.head.encode()
        return {"record": torch.tensor(list(head), dtype=torch.uint8)} if head else {}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the record has the entry of a checkpoint."""
        if "record" not in flat:
            return
        if self._record is None:
            raise ValueError("Expected record=, because the checkpoint's run was recorded, but got none; pass it")
        self._record.expect(bytes(flat["record"].tolist()).decode())

    def _write_asked(self, record: AuditRecord, run: str, requests: Mapping[str, bytes]) -> None:
        if run != self._run:
            self._write_run(record, run)
        asked = frames.read(next(iter(requests.values())), "the server").about
        about = {name: asked[name] for name in ("kind", "round", "sequence", "metrics", "question") if name in asked}
        for group in _groups(requests):
            counts = {site: wire.metadata(request).get("clients") for site, request in group.items()}
            clients: dict[str, Any] = {} if None in counts.values() else {"clients": counts}
            record.note("asked", run=run, digests=_digests(group), **about, **clients, **_spent(self._algorithm.budget))

    def _write_run(self, record: AuditRecord, run: str) -> None:
        plan, self._run = self._plan, run
        about = fingerprint(self._algorithm, plan.carry)
        asked: dict[str, Any] = {"algorithm": plan.algorithm, "settings": dict(plan.settings), "quorum": plan.quorum}
        known: dict[str, Any] = {"fingerprint": about, "messages": about.get("messages", READABLE)}
        claim = getattr(getattr(self._algorithm.budget, "ledger", None), "claim", None)
        privacy: dict[str, Any] = {} if claim is None else {"privacy": claim._asdict()}
        record.note("run", run=run, **asked, **known, **privacy, sites=len(plan.sites.names))
        for group in _groups(dict(zip(plan.sites.names, plan.counts))):
            record.note("sites", run=run, clients=group)


def agreeing(record: AuditRecord | None, ask: Ask) -> Ask:
    """Return a function like `ask`, for agreements on a design, that also records questions and answers.

    Args:
        record: the audit record; None for none.
        ask: asks sites.
    """
    return ask if record is None else partial(_agreed, record, ask)


def _agreed(record: AuditRecord, ask: Ask, question: Question) -> Heard:
    digests: dict[str, str] = {}
    payloads = {site: send.message for site, send in question.requests.items()}
    metadata = frames.read(next(iter(payloads.values())), "the server").about
    for group in _groups(payloads):
        about = {name: metadata[name] for name in ("kind", "sequence", "question")}
        record.note("asked", run=question.run, digests=_digests(group), **about)
    _keep_digests(question, digests)
    return _ask(record, ask, question, digests)


def _keep_digests(question: Question, digests: dict[str, str]) -> None:
    """Make a question's answers store their digests, by site, in `digests`."""
    read = partial(_read_with_digest, question.wanted.like, digests)
    question.wanted = question.wanted._replace(like=read)


def _ask(record: AuditRecord, ask: Ask, question: Question, digests: Mapping[str, str]) -> Heard:
    """Ask sites, and record the answers, and reasons for missing ones."""
    answers, number = ask(question), next((send.sequence for send in question.requests.values()), 0)
    for group in _groups(digests):
        record.note("answered", run=question.run, sequence=number, digests=group)
    for group in _groups(answers.missing):
        record.note("missing", run=question.run, sequence=number, reasons=_short(group))
    return answers


def _read_with_digest(read: Callable[[str, Frame], Any], digests: dict[str, str], site: str, frame: Frame) -> Any:
    answer = read(site, frame)
    digests[site] = digest(frame.payload)
    return answer


def _digests(payloads: Mapping[str, bytes]) -> dict[str, str]:
    return {site: digest(payload) for site, payload in payloads.items()}


def _short(reasons: Mapping[str, str]) -> dict[str, str]:
    return {site: ascii(reason)[1:-1][:_REASON] for site, reason in reasons.items()}


def _spent(budget: Budget | None) -> dict[str, Any]:
    report = {} if budget is None else budget.report()
    return {"epsilon": float(report["epsilon"])} if "epsilon" in report else {}


def _groups(by_site: Mapping[str, Any]) -> list[dict[str, Any]]:
    sites = list(by_site.items())
    return [dict(sites[first : first + _GROUP]) for first in range(0, len(sites), _GROUP)]
