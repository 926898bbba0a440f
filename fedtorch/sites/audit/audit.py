"""The audit record of requests and answers: who asked, when, under which policy, and why something was refused.

A site and a server each append to their own file. Every entry has the hash of the previous one and a signature by the
identity's key (ECDSA, P-256). An entry contains digests, counts and reasons, but no rows, models or messages. `verify`
finds entries that were changed, removed or moved, and records of another key. `compare` finds contradictions between
the server's record and a site's, including entries removed at the end.

The holder of the key can forge a whole new record. But it will not agree with the record of the other side, or with a
last entry (`AuditRecord.head`) that was noted elsewhere.

>>> import tempfile, threading, torch, fedtorch as ft
>>> from fedtorch.sites import AuditRecord, Policy, SiteConfiguration, join
>>> from fedtorch.sites.audit import audit
>>> from fedtorch.sites import Hub
>>> from fedtorch.sites.identity import identity
>>> from fedtorch.sites.streams import memory
>>> folder = tempfile.TemporaryDirectory()
>>> server, ward = identity.make_server(folder.name), identity.make_site(folder.name, "ward 7")
>>> records = [f"{folder.name}/{name}.jsonl" for name in ("server", "ward")]
>>> averaging = lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
>>> rows = ft.data.from_tensors([(torch.eye(2), torch.ones(2))])
>>> host, configuration = Hub(), SiteConfiguration(rows, {"averaging": averaging}, Policy(minimum=1))
>>> settings = {"identity": ward, "record": AuditRecord(records[1], ward)}
>>> site = threading.Thread(target=join, args=(lambda: memory.link(host, "ward 7"), configuration), kwargs=settings)
>>> site.start()
>>> sites = ft.Remote(host, ["ward 7"], "averaging", record=AuditRecord(records[0], server))
>>> sites.finish(ft.run(averaging(), sites, rounds=2))
>>> site.join()
>>> verdict: audit.Verdict = audit.verify(records[1], certificate=server.authority)
>>> print(verdict.message)
OK: ... entries, 2..., signed by 'ward 7'
>>> [entry["event"] for entry in AuditRecord.entries(records[1])][:5]
['opened', 'joined', 'connected', 'begin', 'request']
>>> [audit.serves(path) for path in records if audit.is_record(path)], audit.compare(*records).problems
([True, False], ())
>>> folder.cleanup()
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtorch import _files as files, chained_log as log
from fedtorch.sites.audit import _signers as signers
from fedtorch.sites.identity.identity import Identity, fingerprint

_MOST = 8192  # most bytes of a field as JSON; a longer one is replaced by its digest
_STATEMENT = b"fedtorch begin 1\n"


class AuditRecord:
    """An audit record of a server or a site.

    Args:
        path: path of the file; an existing record of the same key is continued. Several processes may append to it.
        identity: identity whose key signs the entries.

    Raises:
        ValueError: the file is not a record, or is one of another key; or the identity's key and certificate differ.

    Example:
        >>> import tempfile
        >>> from fedtorch.sites.identity import identity
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     server = identity.make_server(folder)
        ...     record = AuditRecord(f"{folder}/record.jsonl", server)
        ...     record.note("approved", by="the ethics board")
        ...     head = record.head  # note it elsewhere
        ...     verify(record.path, certificate=server.certificate, head=head).holds
        True
    """

    def __init__(self, path: Path | str, identity: Identity) -> None:
        key = serialization.load_pem_private_key(identity.key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        if key.public_key() != signers.key_of(identity.certificate):
            raise ValueError(f"Expected the key of the certificate of {identity.name!r}, but got another; enrol anew")
        self._key, self.identity = key, identity
        first = {
            "event": "opened",
            "format": 1,
            "certificate": identity.certificate.decode(),
            "authority": fingerprint(identity.authority),
        }
        files.private_folder(Path(path).parent)
        self._log = log.ChainedLog(path, first, self._sign)
        self.path = self._log.path
        signer = signers.certificate_in(next(log.read(self.path)))
        if signer is None or fingerprint(signer) != fingerprint(identity.certificate):
            raise ValueError(
                f"Expected a record that the key of {identity.name!r} has signed in {self.path}, but got one of "
                "another key; begin another file, and keep this one"
            )

    @property
    def head(self) -> str:
        """Return the number and hash of the last entry, joined by a colon."""
        return f"{self._log.entries}:{self._log.head}"

    def note(self, event: str, *, durable: bool = False, **about: Any) -> None:
        """Append an entry, flushed to disk if `durable`; a field that is too long becomes its digest.

        Raises:
            OSError: the entry cannot be written.
        """
        self._log.append({"event": event, **{name: _bounded(value) for name, value in about.items()}})
        if durable:
            self._log.sync()

    @staticmethod
    def entries(path: Path | str) -> Iterator[dict[str, Any]]:
        """Yield the content of a record's entries, without verification."""
        yield from (entry.content for entry in log.read(path) if entry.content)

    def expect(self, head: str) -> None:
        """Raise ValueError unless the record has the entry of an earlier `head`."""
        if problem := _lacks(self.path, head):
            raise ValueError(f"Expected the record {self.path} to continue that of a checkpoint, but {problem}")

    def sync(self) -> None:
        """Flush all entries to disk."""
        self._log.sync()

    def statement(self, about: Mapping[str, Any]) -> dict[str, str]:
        """Return a server's certificate and its signature of the content `about` with which it begins a run."""
        signature = self._sign(_STATEMENT + log.canonical(about))
        return {"certificate": self.identity.certificate.decode(), "signature": signature}

    def server_of(self, about: Mapping[str, Any], statement: Mapping[str, Any]) -> str:
        """Return the fingerprint of the server's key, if a server of the same authority has signed the statement.

        Raises:
            ValueError: another key has signed it, or the certificate is not a server's.
        """
        certificate, signature = (str(statement.get(name, "")).encode() for name in ("certificate", "signature"))
        content = _STATEMENT + log.canonical(about)
        certified = signers.is_server(certificate, self.identity.authority)
        if not certified or not signers.fits(signers.key_of(certificate), content, signature.decode()):
            raise ValueError("the server has not signed the content with which it begins the run")
        return fingerprint(certificate)

    def _sign(self, content: bytes) -> str:
        return base64.b64encode(self._key.sign(content, ec.ECDSA(hashes.SHA256()))).decode()


class Verdict(NamedTuple):
    """The result of `verify` and `compare`."""

    message: str  # begins with OK or FAILED
    problems: tuple[str, ...]  # empty if the result is OK
    remarks: tuple[str, ...] = ()  # observations that are no contradictions

    @property
    def holds(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems


def verify(
    path: Path | str, *, certificate: bytes | None = None, roster: Path | str | None = None, head: str | None = None
) -> Verdict:
    """Return whether a record is unchanged since its signer wrote it, and the signer.

    Missing entries at the end are detected only by `head`, or by `compare` with the record of the other side.

    Args:
        path: path of the record.
        certificate: PEM certificate of the signer or of its authority.
        roster: the server's roster, with the site's key; `certificate` or `roster` has to vouch for the signer.
        head: number and hash of an entry that must be in the record, see `AuditRecord.head`.

    Raises:
        OSError: the file cannot be read.
    """
    first = next(log.read(path), log.NONE)
    signer = signers.certificate_in(first)
    if signer is None:
        return _verdict(["the file does not begin with the certificate of its signer"])
    name = signers.name_in(signer)
    problems = [] if (problem := signers.stranger(signer, certificate, roster)) is None else [problem]
    public = signers.key_of(signer)
    count, last, partial = 0, "", False

    def counted() -> Iterator[log.Entry]:
        nonlocal count, last, partial
        for entry in log.read(path):
            count, last = count + bool(entry.content), entry.content.get("time", last)
            partial = partial or log.is_partial(entry)
            yield entry

    problems += log.faults(counted(), lambda content, signature: signers.fits(public, content, signature))
    if head is not None and (problem := _lacks(path, head)):
        problems.append(problem)
    message = f"{count} entries, {first.content['time'][:16]} to {last[:16]} UTC, signed by {name!r}"
    half = ("the last line is incomplete, which the next entry will repair",) if partial else ()
    return _verdict(problems, message, half)


def compare(path: Path | str, other: Path | str) -> Verdict:
    """Return whether a server's record and a site's agree on their common runs; verify both records before.

    A frame that was sent but not received is a remark. A frame that was received but not sent, according to the other
    record, is a problem; so are missing entries at the end.

    Raises:
        OSError: a file cannot be read.
        ValueError: they are not the records of a server and of a site.
    """
    sides = [_Side.of(each) for each in (path, other)]
    if [side.serves for side in sides].count(True) != 1:
        raise ValueError(f"Expected the records of a server and of a site, but got {[side.name for side in sides]}")
    server, site = sorted(sides, key=lambda side: not side.serves)
    asked, answered = ({run: sent.get(site.name, {}) for run, sent in part.items()} for part in server.traffic)
    shared, problems, lost = sorted(asked.keys() & site.traffic[0].keys()), list[str](), [0, 0]
    for run in shared:
        requests, answers = site.traffic[0][run][site.name], site.traffic[1].get(run, {}).get(site.name, {})
        for number in [number for digest, number in requests.items() if digest not in asked[run]]:
            problems.append(f"entry {number} of {site.name!r} is a request that {server.name!r} has no record of")
        for number in [number for digest, number in answered.get(run, {}).items() if digest not in answers]:
            problems.append(f"entry {number} of {server.name!r} is an answer that {site.name!r} has no record of")
        lost[0] += len(asked[run].keys() - requests.keys())
        lost[1] += len(answers.keys() - answered.get(run, {}).keys())
    if not shared:
        problems.append(f"{server.name!r} and {site.name!r} have no run in common")
    remarks = [f"{lost[0]} requests did not reach {site.name!r}"] if lost[0] else []
    remarks += [f"{lost[1]} answers of {site.name!r} were late or lost"] if lost[1] else []
    only = [(each.name, len(each.traffic[0].keys() - set(shared))) for each in (server, site)]
    remarks += [f"{count} runs are only in the record of {name!r}" for name, count in only if count]
    both = f"{server.name!r} and {site.name!r}"
    return _verdict(problems, f"{both} agree on {len(shared)} runs and agreements", tuple(remarks))


def is_record(path: Path | str) -> bool:
    """Return whether a file begins as an audit record does."""
    return Path(path).is_file() and next(log.read(path), log.NONE).content.get("event") == "opened"


def serves(path: Path | str) -> bool:
    """Return whether a record is a server's, by its events."""
    return any(entry["event"] in ("run", "asked") for entry in AuditRecord.entries(path))


class _Side(NamedTuple):
    """A record's content for `compare`."""

    name: str
    serves: bool
    # (requests, answers): run -> site -> digest -> number of the entry
    traffic: tuple[dict[str, dict[str, dict[str, int]]], dict[str, dict[str, dict[str, int]]]]

    @classmethod
    def of(cls, path: Path | str) -> _Side:
        """Read a record."""
        signer = signers.certificate_in(next(log.read(path), log.NONE))
        name = "" if signer is None else signers.name_in(signer)
        requests: dict[str, dict[str, dict[str, int]]] = {}
        answers: dict[str, dict[str, dict[str, int]]] = {}
        sent = dict.fromkeys(("asked", "begin", "request", "over"), requests)
        kinds = {**sent, **dict.fromkeys(("answered", "answer"), answers)}
        for entry in AuditRecord.entries(path):
            if entry["event"] in kinds and "run" in entry:
                digests = entry.get("digests", {name: entry.get("digest", "")})
                by_site = kinds[entry["event"]].setdefault(entry["run"], {})
                for site, digest in digests.items():
                    by_site.setdefault(site, {})[digest] = entry["entry"]
        return cls(name, serves(path), (requests, answers))


def _verdict(problems: list[str], message: str = "", remarks: tuple[str, ...] = ()) -> Verdict:
    if not problems:
        return Verdict(f"OK: {message}", (), remarks)
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    return Verdict(f"FAILED: {problems[0]}{more}", tuple(problems), remarks)


def _lacks(path: Path | str, head: str) -> str | None:
    """Return the problem if an entry noted elsewhere is not in a record; None if it is."""
    number, _, wanted = head.partition(":")
    last = 0
    for entry in log.read(path):
        last = max(last, entry.number)
        if number == str(entry.number) and entry.digest == wanted and wanted:
            return None
    if number.isdecimal() and int(number) > last:
        return f"entries {last + 1} to {number} are missing at the end"
    return f"entry {number} is not the one noted, with hash {wanted[:16]}"


def _bounded(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return (
        value if len(text) <= _MOST else {"sha256": log.digest(text.encode()), "bytes": len(text), "begins": text[:200]}
    )
