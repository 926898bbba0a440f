"""Sites' keys for messages to each other in a run, signed so that the server cannot replace them by its own.

For a run a process makes two keys, for signing and for sealing, and signs them with the key of its site's enrolment.
The server passes on a *directory*: the announcements of all sites, and the roster signed by the authority. A site that
reads it trusts only the authority of its own enrolment. The authority's key is on the server's side, and whoever steals
it can invent sites: keep it elsewhere (`fedtorch admit` needs it, a run does not), and let sites require a least
number of sites.

>>> import tempfile
>>> from fedtorch.sites import Roster
>>> from fedtorch.sites.identity import key_directory, identity
>>> folder = tempfile.TemporaryDirectory()
>>> authority, site = identity.make_server(folder.name).authority, identity.make_site(folder.name, "ward 7")
>>> roster = Roster(f"{folder.name}/roster.json")
>>> roster.add("ward 7", identity.fingerprint(site.certificate))
>>> keys = key_directory.RunKeys(site, "run 1", first=0, clients=3)  # at the site
>>> announcement, signed = keys.announcement(epoch=0), key_directory.sign_roster(folder.name, roster)
>>> speaker: key_directory.Speaker = key_directory.speaker(announcement, signed, "run 1")  # at the server
>>> speaker.name, speaker.clients, speaker.sealing == keys.sealing.public_key().public_bytes_raw()
('ward 7', 3, True)
>>> written = key_directory.write(signed, [announcement])  # by the server
>>> directory: key_directory.KeyDirectory = key_directory.read(written, authority, "run 1")  # at another site
>>> directory.speakers == (speaker,)
True
>>> folder.cleanup()
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedtorch.sites.identity.certificates import digest_of
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.identity.roster import Roster

_KEY = 32  # bytes of a public key
_ROSTER, _WORD = b"fedtorch roster 1 ", b"fedtorch announcement 1 "
MOST_SITES = 10_000


class Speaker(NamedTuple):
    """A site's announcement of itself in a run."""

    name: str
    first: int  # number of its first client
    clients: int
    signing: bytes  # public Ed25519 key
    sealing: bytes  # public X25519 key


class KeyDirectory(NamedTuple):
    """The sites with announced keys, in the order of their clients, and the time of the roster's signature."""

    speakers: tuple[Speaker, ...]
    issued: float  # seconds since 1970


class RunKeys:
    """The secret keys of this process in a run, which never leave it, and the announcement of their public keys.

    Args:
        identity: the site's identity.
        run: identity of the run.
        first: number of the site's first client.
        clients: number of its clients.
    """

    def __init__(self, identity: Identity, run: str, first: int, clients: int) -> None:
        self._identity, self._about = identity, {"run": run, "first": first, "clients": clients}
        self.epoch: int | None = None

    def announcement(self, epoch: int) -> bytes:
        """Return the site's signed announcement of its keys; each epoch has new keys."""
        if epoch != self.epoch:
            self.epoch, self.signing, self.sealing = epoch, Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
            site = serialization.load_pem_private_key(self._identity.key, None)
            assert isinstance(site, ec.EllipticCurvePrivateKey)
            public = [key.public_key().public_bytes_raw().hex() for key in (self.signing, self.sealing)]
            coded = site.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            about = {**self._about, "name": self._identity.name, "signing": public[0], "sealing": public[1]}
            self._announcement = _signed(_WORD, {**about, "key": coded.hex()}, site)
        return self._announcement


def sign_roster(authority: Path | str, roster: Roster, now: Callable[[], float] = time.time) -> bytes:
    """Return a roster's sites that are not revoked, with their keys, signed by the authority in a folder."""
    key = serialization.load_pem_private_key((Path(authority) / "authority.key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    sites = {name: site.key for name, site in roster.sites.items() if not site.revoked}
    return _signed(_ROSTER, {"issued": now(), "sites": sites}, key)


def write(roster: bytes, announcements: Sequence[bytes]) -> bytes:
    """Return a directory from a signed roster and announcements in the order of the clients."""
    return json.dumps([part.decode() for part in (roster, *announcements)]).encode()


def speaker(word: bytes, roster: bytes, run: str) -> Speaker:
    """Return the site of an announcement, by the server's own roster, whose signature is not checked.

    Raises:
        ValueError: the announcement is not signed by a site of the roster, or is for another run.
    """
    try:
        return _speaker(word, json.loads(json.loads(roster)["said"])["sites"], run)
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"Expected keys that a site of the roster has signed, but got others: {error}") from None


def read(directory: bytes, authority: bytes, run: str) -> KeyDirectory:
    """Return a directory, after checking all signatures.

    Args:
        directory: the bytes from the server.
        authority: certificate of the authority that enrolled this site.
        run: identity of the run.

    Raises:
        ValueError: the directory is malformed, has a wrong signature, or is for another run.
    """
    try:
        roster, *announcements = [part.encode() for part in json.loads(directory)]
        if len(announcements) > MOST_SITES:
            raise ValueError(f"it has more than {MOST_SITES} sites")
        known = _verified(_ROSTER, roster, x509.load_pem_x509_certificate(authority).public_key(), "the authority")
        speakers = tuple(_speaker(word, known["sites"], run) for word in announcements)
        ends = [0, *(each.first + each.clients for each in speakers)]
        if any(each.first < end or each.clients < 1 for each, end in zip(speakers, ends)):
            raise ValueError("sites have each other's clients")
        if len({each.name for each in speakers}) < len(speakers):
            raise ValueError("a site is there twice")
        return KeyDirectory(speakers, float(known["issued"]))
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(
            f"Expected a signed key directory that the roster's sites have signed, but got another: {error}"
        ) from None


def _speaker(word: bytes, sites: dict[str, str], run: str) -> Speaker:
    """Return the site of an announcement, if the roster lists it with the key of the signature."""
    statement = json.loads(json.loads(word)["said"])
    name, coded = statement["name"], bytes.fromhex(statement["key"])
    if name not in sites:
        raise ValueError(f"{str(name)[:100]!r} is not in the roster, or not any more")
    if digest_of(coded) != sites[name]:
        raise ValueError(f"{name!r} has another key in the roster")
    about = _verified(_WORD, word, serialization.load_der_public_key(coded), repr(name))
    if about["run"] != run:
        raise ValueError(f"{name!r} has announced itself for another run")
    keys = [bytes.fromhex(about[kind]) for kind in ("signing", "sealing")]
    numbers = [about[kind] for kind in ("first", "clients")]
    if [len(key) for key in keys] != [_KEY, _KEY] or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{name!r} has announced malformed keys")
    return Speaker(name, *numbers, *keys)


def _signed(kind: bytes, about: dict[str, Any], key: ec.EllipticCurvePrivateKey) -> bytes:
    content = json.dumps(about)
    signature = key.sign(kind + content.encode(), ec.ECDSA(hashes.SHA256()))
    return json.dumps({"said": content, "signature": base64.b64encode(signature).decode()}).encode()


def _verified(kind: bytes, word: bytes, key: Any, who: str) -> dict[str, Any]:
    """Return the signed content, if `who` has signed it."""
    parts = json.loads(word)
    try:
        key.verify(base64.b64decode(parts["signature"]), kind + parts["said"].encode(), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise ValueError(f"{who} has not signed it") from None
    return json.loads(parts["said"])
