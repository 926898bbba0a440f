"""The secret of a site: by it clients have pseudonyms, where one has too few rows, and draws are the site's own.

A name is often a value of a column, such as a patient's number. Where one client of a site has fewer rows than the
site's minimum, the names of all are pseudonyms, for patients with many rows are patients too. A pseudonym is a keyed
digest of the name, by a secret of the site. What a name was told as first it is told as for good, so that runs that
come later, and restarts, have the same clients.

Clients draw by keys of the server's, which knows what follows from them: which rows are in a minibatch, and which
uniform numbers decide a response that is drawn anew. A site that counts rows makes other keys of them by its secret,
see `SiteSession`: the same question has the same draws, to the bit, and nobody else can compute them.

The secret and what names were told as are `names.json` in the site's folder. To look a name up and to write it down is
one step under the file's lock, so that two processes of a site tell one name as the same.

>>> names = Pseudonyms(None)
>>> told = names.told(("ward 7", "ward 8"), hidden=False)
>>> told, len(names.told(("ward 7", "B-1807"), hidden=True)[1])
(('ward 7', 'ward 8'), 23)
>>> names.key("a round", b"1").equal(names.key("a round", b"1")), names.key("a round", b"1").equal(names.key("", b"1"))
(True, False)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtorch import _files as files, random

FILE = "names.json"
_DIGITS = 16
_SECONDS = 30.0  # for another process of the site


class Pseudonyms:
    """What the names of a site's clients are told as.

    Args:
        folder: of the site, in which it is kept; None for as long as this object is there.

    Raises:
        ValueError: what was kept is damaged.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._secret, self._told = secrets.token_hex(32), dict[str, str]()
        self._read()

    def told(self, names: Sequence[str], hidden: bool) -> tuple[str, ...]:
        """Return what names are told as; `hidden` says whether those that were not told yet get pseudonyms."""
        if any(name not in self._told for name in names):
            with self._lock():
                self._read()
                new = [name for name in names if name not in self._told]
                self._told.update({name: self._pseudonym(name) if hidden else name for name in new})
                if new and self._path is not None:
                    files.write_json(self._path, {"secret": self._secret, "told": self._told})
        return tuple(self._told[name] for name in names)

    def key(self, purpose: str, asked: bytes) -> Tensor:
        """Return a key of randomness `()`, which follows from what is asked for a purpose and from the secret.

        It is 64 bits of an HMAC, by another function than that of the pseudonyms, which are told.
        """
        of_purpose = hmac.digest(bytes.fromhex(self._secret), purpose.encode(), hashlib.sha512)
        return random.key(int.from_bytes(hmac.digest(of_purpose, asked, hashlib.sha512)[:8], "big", signed=True))

    def _lock(self) -> AbstractContextManager[Any]:
        if self._path is None:
            return nullcontext()
        files.private_folder(self._path.parent)
        return files.private_lock(f"{self._path}.lock", _SECONDS)

    def _read(self) -> None:
        """Take in what was written down, by another process too."""
        if self._path is not None and self._path.exists():
            kept = files.read_json(self._path)
            self._secret, self._told = kept["secret"], kept["told"]

    def _pseudonym(self, name: str) -> str:
        digest = hmac.new(bytes.fromhex(self._secret), name.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return f"client {digest.hexdigest()[:_DIGITS]}"
