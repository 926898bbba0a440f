"""The keys with which sites speak to each other in a run, through a server that could otherwise put in its own.

A process makes two keys for a run, one to sign and one to seal with, and signs them with its site's key, which it
enrolled with. A *directory* is what the server passes on: everybody's announcement, and the roster as the authority has
signed it. Whoever reads it believes the authority that it was enrolled by, and nobody else. The authority's key is on
the server's side, so that whoever steals it can invent sites: keep it elsewhere (`fedtorch admit` needs it, a run does
not), and let a site say how many there have to be.

>>> import tempfile
>>> from fedtorch.sites import Roster
>>> from fedtorch.sites.identity import key_directory, identity
>>> folder = tempfile.TemporaryDirectory()
>>> authority, site = identity.make_server(folder.name).authority, identity.make_site(folder.name, "ward 7")
>>> roster = Roster(f"{folder.name}/roster.json")
>>> roster.add("ward 7", identity.fingerprint(site.certificate))
>>> keys = key_directory.RunKeys(site, "run 1", first=0, clients=3)  # at the site
>>> word, signed = keys.announcement(epoch=0), key_directory.sign_roster(folder.name, roster)
>>> heard: key_directory.Speaker = key_directory.speaker(word, signed, "run 1")  # at the server
>>> heard.name, heard.clients, heard.sealing == keys.sealing.public_key().public_bytes_raw()
('ward 7', 3, True)
>>> written = key_directory.write(signed, [word])  # by the server
>>> passed_on: key_directory.KeyDirectory = key_directory.read(written, authority, "run 1")  # at another site
>>> passed_on.speakers == (heard,)
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
    """A site in a run, as it has announced itself."""

    name: str
    first: int  # the number of its first client
    clients: int
    signing: bytes  # its public Ed25519 key
    sealing: bytes  # its public X25519 key


class KeyDirectory(NamedTuple):
    """The sites that can be spoken to, in the order of their clients, and when the roster was signed."""

    speakers: tuple[Speaker, ...]
    issued: float  # seconds since 1970


class RunKeys:
    """The secret keys of this process in a run, which never leave it, and what it announces of them.

    Args:
        identity: of the site.
        run: the run.
        first: the number of its first client.
        clients: how many it has.
    """

    def __init__(self, identity: Identity, run: str, first: int, clients: int) -> None:
        self._identity, self._about = identity, {"run": run, "first": first, "clients": clients}
        self.epoch: int | None = None

    def announcement(self, epoch: int) -> bytes:
        """Return the site's signed announcement of its keys, which are made anew in every epoch."""
        if epoch != self.epoch:
            self.epoch, self.signing, self.sealing = epoch, Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
            site = serialization.load_pem_private_key(self._identity.key, None)
            assert isinstance(site, ec.EllipticCurvePrivateKey)
            public = [key.public_key().public_bytes_raw().hex() for key in (self.signing, self.sealing)]
            coded = site.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            about = {**self._about, "name": self._identity.name, "signing": public[0], "sealing": public[1]}
            self._said = _signed(_WORD, {**about, "key": coded.hex()}, site)
        return self._said


def sign_roster(authority: Path | str, roster: Roster, now: Callable[[], float] = time.time) -> bytes:
    """Return the sites of a roster that are not revoked, and their keys, signed by the authority in a folder."""
    key = serialization.load_pem_private_key((Path(authority) / "authority.key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    sites = {name: site.key for name, site in roster.sites.items() if not site.revoked}
    return _signed(_ROSTER, {"issued": now(), "sites": sites}, key)


def write(roster: bytes, announcements: Sequence[bytes]) -> bytes:
    """Return a directory, of a signed roster and announcements in the order of the clients."""
    return json.dumps([part.decode() for part in (roster, *announcements)]).encode()


def speaker(word: bytes, roster: bytes, run: str) -> Speaker:
    """Return the site that an announcement is of, by a roster of one's own that need not be believed.

    Raises:
        ValueError: nobody of the roster, or not for this run.
    """
    try:
        return _speaker(word, json.loads(json.loads(roster)["said"])["sites"], run)
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"Expected keys that a site of the roster has signed, but got others: {error}") from None


def read(directory: bytes, authority: bytes, run: str) -> KeyDirectory:
    """Return a directory that can be believed.

    Args:
        directory: what the server has passed on.
        authority: its certificate, as the site was enrolled with.
        run: the run.

    Raises:
        ValueError: it is none, or something in it is not signed by whom it should be, or of another run.
    """
    try:
        roster, *said = [part.encode() for part in json.loads(directory)]
        if len(said) > MOST_SITES:
            raise ValueError(f"it has more than {MOST_SITES} sites")
        known = _verified(_ROSTER, roster, x509.load_pem_x509_certificate(authority).public_key(), "the authority")
        speakers = tuple(_speaker(word, known["sites"], run) for word in said)
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
    """Return the site that an announcement is of, if the roster has it with the key that has signed."""
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
        raise ValueError(f"{name!r} has announced no keys")
    return Speaker(name, *numbers, *keys)


def _signed(kind: bytes, about: dict[str, Any], key: ec.EllipticCurvePrivateKey) -> bytes:
    said = json.dumps(about)
    signature = key.sign(kind + said.encode(), ec.ECDSA(hashes.SHA256()))
    return json.dumps({"said": said, "signature": base64.b64encode(signature).decode()}).encode()


def _verified(kind: bytes, word: bytes, key: Any, who: str) -> dict[str, Any]:
    """Return the signed content, if `who` has signed it."""
    parts = json.loads(word)
    try:
        key.verify(base64.b64decode(parts["signature"]), kind + parts["said"].encode(), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise ValueError(f"{who} has not signed it") from None
    return json.loads(parts["said"])
