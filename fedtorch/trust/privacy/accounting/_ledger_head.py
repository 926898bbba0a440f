"""The length of a ledger in a file beside it, which reveals a ledger that was cut or copied back.

`LEDGER.head` says how many entries there were and the digest of the last one. It is written after every entry, so that
the ledger may be one entry ahead of it after a kill, and never behind. Where both are brought back together, as from a
backup, nothing beside them knows; a later checkpoint of the run does, see `Ledger.expect`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from fedtorch import _files as files

_LOG = logging.getLogger(__name__)


def note(ledger: Path, identity: bytes, digests: Sequence[str]) -> None:
    """Write down the last entry."""
    content = {"ledger": identity.hex(), "entries": len(digests), "last": digests[-1] if digests else ""}
    files.write_json(_head(ledger), content)


def check(ledger: Path, identity: bytes, digests: Sequence[str]) -> None:
    """Raise ValueError unless the ledger has the entries that were noted; notes those of one that has no head."""
    head = _head(ledger)
    if not head.exists():
        if digests:
            _LOG.warning(
                "no %s beside the ledger: its %d entries are taken for all that there were", head, len(digests)
            )
        note(ledger, identity, digests)
        return
    known = files.read_json(head)
    if known["ledger"] != identity.hex():
        raise ValueError(
            f"Expected the ledger {known['ledger']} in {ledger}, by {head.name} beside it, but got {identity.hex()}; "
            f"bring back the file that belongs there, or remove {head.name} if another ledger was put there on purpose"
        )
    check_entries(digests, known["entries"], known["last"], f"{ledger}, by {head.name} beside it")


def check_entries(digests: Sequence[str], entries: int, last: str, where: str) -> None:
    """Raise ValueError unless a ledger has so many entries, and this one at that place."""
    if len(digests) < entries:
        raise ValueError(
            f"Expected a ledger of at least {entries} rounds in {where}, but got one of {len(digests)}: it was cut, or "
            "an old copy was put in its place. Without the others nobody can say what was released; bring back the "
            "newest copy, and count what is missing as spent"
        )
    if entries and last and digests[entries - 1] != last:
        raise ValueError(
            f"Expected round {entries} of the ledger in {where} to be the one that was written, but got another: two "
            "copies of one ledger have grown apart, and what was released is the sum of both. Keep to one file, and "
            "make a new ledger with a budget that leaves out what both have spent"
        )


def check_not_lost(ledger: Path) -> None:
    """Raise ValueError where a ledger is not there that had entries."""
    head = _head(ledger)
    if not ledger.exists() and head.exists() and (known := files.read_json(head))["entries"]:
        raise ValueError(
            f"Expected the ledger {ledger}, of which {head.name} knows {known['entries']} rounds, but it is lost; "
            f"bring it back, or remove {head.name} to begin a ledger that knows nothing of them"
        )


def _head(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.head")
