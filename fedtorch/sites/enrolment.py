"""Enrolment: a site gets its certificate with a token, which the server's side delivers by hand, mail or telephone.

A token is text: the address, the fingerprint of the authority's key, and a secret. The fingerprint identifies the
server before the site sends anything. The secret identifies the site, and the request is signed with the key that the
site has made. The server stores only the secret's digest. A token works once, because using it renames its file, and
its name is bound to the key of that request. It expires by the server's clock.

`EnrolmentServer` answers on its own port, with the authority's certificate and without asking for one.

>>> import tempfile
>>> from fedtorch.sites import Roster
>>> from fedtorch.sites.identity import identity
>>> from fedtorch.sites.enrolment import EnrolmentServer, Token, enrol, invite
>>> folder = tempfile.TemporaryDirectory()
>>> authority, roster = f"{folder.name}/authority", Roster(f"{folder.name}/roster.json")
>>> known = identity.make_authority(authority)
>>> enrolling = EnrolmentServer(authority, "127.0.0.1:0", roster)
>>> token: Token = invite(authority, "ward 7", f"127.0.0.1:{enrolling.port}", rows=1000)
>>> text = str(token)  # to be delivered to the site
>>> enrol(Token.read(text), f"{folder.name}/site")
Identity('ward 7')
>>> enrolling.close()
>>> roster.rows
{'ward 7': 1000}
>>> folder.cleanup()
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedtorch import _files as files, wire
from fedtorch._lazy import only
from fedtorch.protocol.rates import Gate, Rate
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.certificates import check_name
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.identity.roster import Roster
from fedtorch.sites.streams.grpc_settings import dial, library, listen, listening
from fedtorch.sites.streams.hub import Limits
from fedtorch.sites.streams.idle import IdleConnections

__all__ = ["EnrolmentServer", "Token", "enrol", "invite"]
__dir__ = only(__all__)

DAY = 86_400.0
_METHOD, _SERVICE = "Enrol", "fedtorch.Enrolment"
LIMITS = Limits(frame=2**16, seconds=20.0, each=Rate(20, 1 / 30), all=Rate(200, 1.0))
_AT_ONCE = 4
_MARK = "fedtorch1."  # prefix of a token, with its version
_LOG = logging.getLogger(__name__)


class Token(NamedTuple):
    """An invitation with which a site can enrol."""

    address: str  # host and port of the server
    name: str  # the site's name
    authority: str  # fingerprint of the authority's key
    secret: str

    @classmethod
    def read(cls, text: str) -> Token:
        """Return the token from its text.

        Raises:
            ValueError: the text is not a complete token.
        """
        try:
            if not text.strip().startswith(_MARK):
                raise ValueError(f"it does not begin with {_MARK}")
            coded = text.strip().removeprefix(_MARK)
            token = cls(**json.loads(base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))))
            if not all(isinstance(part, str) for part in token):
                raise ValueError("its parts are not texts")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"Expected a complete token as printed by `fedtorch invite`, but got another text: {error}"
            ) from None
        return token

    def __str__(self) -> str:
        return _MARK + base64.urlsafe_b64encode(json.dumps(self._asdict()).encode()).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"Token({self.name!r} at {self.address})"


def invite(
    authority: Path | str,
    name: str,
    address: str,
    *,
    seconds: float = 3 * DAY,
    rows: int | None = None,
    now: Callable[[], float] = time.time,
) -> Token:
    """Return a token for a site.

    Args:
        authority: the authority's folder, made by `fedtorch authority`.
        name: name of the site.
        address: host and port at which the server enrols sites.
        seconds: time until the token expires.
        rows: most rows that the site may report; None for no limit.
        now: returns seconds since 1970.

    Raises:
        ValueError: the name is not valid for a site.
    """
    check_name(name)
    folder, token = Path(authority), secrets.token_urlsafe(32)
    files.private_folder(folder / "tokens")
    promise = {"name": name, "expires": now() + seconds, "rows": rows}
    files.write_json(_promise(folder, token), promise)
    return Token(address, name, identity.fingerprint((folder / "authority.pem").read_bytes()), token)


def enrol(token: Token, folder: Path | str, renew: bool = False) -> Identity:
    """Make a key, get a certificate for it, and save the identity in a folder.

    Args:
        token: the token from the server's side.
        folder: folder for the identity.
        renew: get a new certificate for the key in the folder.

    Raises:
        FileExistsError: the folder has an identity, and `renew` is False.
        FileNotFoundError: there is no identity to renew.
        ConnectionError: nobody answers at the token's address, or not the token's authority.
        PermissionError: the server rejects the token, with a reason; or returns a certificate of another kind.
    """
    if not renew and (Path(folder) / "certificate.pem").exists():
        raise FileExistsError(
            f"Expected a folder without an identity, but {folder} has one; renew its certificate with --renew, or "
            "choose another folder"
        )
    key = identity.read(folder).key if renew else identity.new_key()
    authority = _authority(token)
    about = {"secret": token.secret, "request": identity.request(key, token.name).decode()}
    grpc, channel = library(), dial(token.address, authority, None, LIMITS)
    try:
        reply = wire.metadata(channel.unary_unary(f"/{_SERVICE}/{_METHOD}")(wire.encode(None, about), timeout=20.0))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            raise PermissionError(error.details()) from None
        raise ConnectionError(f"Expected to enrol at {token.address}, but got {error.details()}") from None
    finally:
        channel.close()
    made = Identity(key, str(reply["certificate"]).encode(), authority)
    made.check_site()
    made.save(folder)
    return identity.read(folder)


class EnrolmentServer:
    """Enrols sites until it is closed.

    Args:
        authority: the authority's folder, made by `fedtorch authority`; enrolment needs it, and a run does not.
        address: host and port to listen at; with port 0, the attribute `port` is the chosen one.
        roster: roster to which sites are added.
        limits: limits on attempts and connections.
        lifetime: lifetime of sites' certificates.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        authority: Path | str,
        address: str,
        roster: Roster,
        limits: Limits = LIMITS,
        lifetime: timedelta = identity.YEAR,
    ) -> None:
        grpc, folder = library(), Path(authority)
        workers = ThreadPoolExecutor(_AT_ONCE, "fedtorch-enrolment")
        options = listening(limits, streams=0)
        self._server = grpc.server(workers, options=options, maximum_concurrent_rpcs=_AT_ONCE)
        handler = grpc.unary_unary_rpc_method_handler(
            partial(_answer, partial(admit, folder, roster, lifetime=lifetime), Gate(limits.each, limits.all), grpc)
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        certificate = (folder / "authority.pem").read_bytes()
        issuer = Identity((folder / "authority.key.pem").read_bytes(), certificate, certificate)
        self.port = listen(self._server, address, issuer, both=False)
        self._connections = IdleConnections(self.port, limits)
        self._server.start()

    def close(self) -> None:
        """Stop enrolling sites."""
        self._connections.close()
        self._server.stop(1.0).wait(LIMITS.seconds)


def admit(
    authority: Path,
    roster: Roster,
    secret: str,
    request: bytes,
    now: Callable[[], float] = time.time,
    lifetime: timedelta = identity.YEAR,
) -> bytes:
    """Return the certificate for a token's secret and a signing request; use up the token, and admit the site.

    A site that renews its certificate keeps the agreed number of rows, unless the token has another.

    Raises:
        PermissionError: no such token, or it has been used or has expired.
        ValueError: the signing request is malformed; the token can still be used.
    """
    promise, expected = _promise(authority, secret), "Expected a token that is new"
    try:
        agreed = files.read_json(promise)
    except FileNotFoundError:
        raise PermissionError(f"{expected}, but it has been used, or never existed; ask for another") from None
    except ValueError as error:
        _LOG.error("%s", error)  # only for the server's own log
        raise PermissionError(f"{expected}, but its file at the server is damaged; ask for another") from None
    if now() > agreed["expires"]:
        promise.unlink(missing_ok=True)
        raise PermissionError(f"{expected}, but it has expired; ask for another")
    certificate = identity.sign(authority, request, agreed["name"], lifetime)
    try:
        promise.rename(promise.with_suffix(".used"))  # only one of several attempts can succeed
    except FileNotFoundError:
        raise PermissionError(f"{expected}, but it has just been used; if not by you, tell the server's side") from None
    name, key = agreed["name"], identity.fingerprint(certificate)
    before, rows = roster.sites.get(name), agreed["rows"]
    roster.add(name, key, before.rows if rows is None and before is not None and before.key == key else rows)
    files.write_json(promise.with_suffix(".used"), {"name": agreed["name"], "used": now()})
    return certificate


def _answer(admit: Callable[[str, bytes], bytes], gate: Gate, grpc: Any, payload: bytes, context: Any) -> bytes:
    """Return the reply to a site's request to enrol."""
    try:
        gate.enter(context.peer())
        about = wire.metadata(payload)
        certificate = admit(str(about.get("secret")), str(about.get("request")).encode())
    except ConnectionRefusedError as error:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except (PermissionError, ValueError) as error:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
    return wire.encode(None, {"certificate": certificate.decode()})


def _promise(folder: Path, secret: str) -> Path:
    return folder / "tokens" / f"{hashlib.sha256(secret.encode()).hexdigest()}.json"


def _authority(token: Token) -> bytes:
    """Return the authority's certificate from the server, if its key has the token's fingerprint."""
    host, _, port = token.address.rpartition(":")
    shown = ""
    with suppress(OSError, ValueError):
        shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=LIMITS.seconds)
    if not shown:
        raise ConnectionError(
            f"Expected an enrolment server at {token.address}, but got no answer; ask whether it is running"
        )
    if not secrets.compare_digest(identity.fingerprint(shown.encode()), token.authority):
        raise ConnectionError(
            f"Expected the authority of the token at {token.address}, but got another: somebody else listens there. "
            "Nothing was sent; tell the server's side"
        )
    return shown.encode()
