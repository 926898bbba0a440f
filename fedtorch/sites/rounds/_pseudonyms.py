"""The secret of a site, for pseudonyms of its clients and for keys of its own draws.

A name is often a value of a column, such as a patient's number. If some client of a site has fewer rows than the site's
minimum, all names are replaced by pseudonyms, because patients with many rows are patients too. A pseudonym is a keyed
digest of the name, with the site's secret. The first alias of a name, itself or a pseudonym, stays for ever, so that
later runs and restarts have the same clients.

Clients draw with keys of the server, which could compute the draws: the rows in a minibatch, or the uniform numbers
behind a response that is drawn anew. A site whose policy has a minimum above one derives other keys with its secret,
see `SiteSession`: the same request has the same draws, to the bit, and nobody else can compute them.

The secret and the aliases are in `names.json` in the site's folder. A name is looked up and stored in one step under
the file's lock, so that two processes of a site use the same alias.

>>> names = Pseudonyms(None)
>>> aliases = names.aliases(("ward 7", "ward 8"), hidden=False)
>>> aliases, len(names.aliases(("ward 7", "B-1807"), hidden=True)[1])
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
_SECONDS = 30.0  # longest wait for another process of the site


class Pseudonyms:
    """The aliases under which the server knows a site's clients, and the site's secret.

    Args:
        folder: the site's folder, in which both are stored; None to keep them as long as this object exists.

    Raises:
        ValueError: the stored file is damaged.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._secret, self._aliases = secrets.token_hex(32), dict[str, str]()
        self._read()

    def aliases(self, names: Sequence[str], hidden: bool) -> tuple[str, ...]:
        """Return the aliases of clients' names; with `hidden`, names without an alias get a pseudonym."""
        if any(name not in self._aliases for name in names):
            with self._lock():
                self._read()
                new = [name for name in names if name not in self._aliases]
                self._aliases.update({name: self._pseudonym(name) if hidden else name for name in new})
                if new and self._path is not None:
                    files.write_json(self._path, {"secret": self._secret, "told": self._aliases})
        return tuple(self._aliases[name] for name in names)

    def key(self, purpose: str, asked: bytes) -> Tensor:
        """Return a random key `()`, derived from the secret, a purpose and the content of a request.

        It is 64 bits of an HMAC, by another function than that of the pseudonyms, which the server knows.
        """
        of_purpose = hmac.digest(bytes.fromhex(self._secret), purpose.encode(), hashlib.sha512)
        return random.key(int.from_bytes(hmac.digest(of_purpose, asked, hashlib.sha512)[:8], "big", signed=True))

    def _lock(self) -> AbstractContextManager[Any]:
        if self._path is None:
            return nullcontext()
        files.private_folder(self._path.parent)
        return files.private_lock(f"{self._path}.lock", _SECONDS)

    def _read(self) -> None:
        """Read the file, which another process may have changed."""
        if self._path is not None and self._path.exists():
            stored = files.read_json(self._path)
            self._secret, self._aliases = stored["secret"], stored["told"]

    def _pseudonym(self, name: str) -> str:
        digest = hmac.new(bytes.fromhex(self._secret), name.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return f"client {digest.hexdigest()[:_DIGITS]}"
