"""Enrolment: a site gets its certificate by a token, which its server's side hands over by hand, mail or telephone.

A token is text: where to enrol, the fingerprint of the authority's key, and a secret. By the fingerprint the site knows
whom it talks to before it says anything; by the secret the server knows the site, whose key, made at the site, proves
itself by signing the request. The server keeps the secret's digest only. A token has one use: whoever renames its file
has used it, and a name is bound to the key that came with it. It expires by the server's clock.

`EnrolmentServer` answers on a port of its own, where it shows the authority's certificate and asks for none.

>>> import tempfile
>>> from fedtorch.sites import Roster
>>> from fedtorch.sites.identity import identity
>>> from fedtorch.sites.enrolment import EnrolmentServer, Token, enrol, invite
>>> folder = tempfile.TemporaryDirectory()
>>> authority, roster = f"{folder.name}/authority", Roster(f"{folder.name}/roster.json")
>>> known = identity.make_authority(authority)
>>> enrolling = EnrolmentServer(authority, "127.0.0.1:0", roster)
>>> token: Token = invite(authority, "ward 7", f"127.0.0.1:{enrolling.port}", rows=1000)
>>> text = str(token)  # to be handed over
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
_MARK = "fedtorch1."  # what a token begins with, and its version
_LOG = logging.getLogger(__name__)


class Token(NamedTuple):
    """Holds all that a site needs in order to enrol."""

    address: str  # where
    name: str  # as whom
    authority: str  # fingerprint of its key
    secret: str

    @classmethod
    def read(cls, text: str) -> Token:
        """Return the token of a text.

        Raises:
            ValueError: it is none, or not all of it.
        """
        try:
            if not text.strip().startswith(_MARK):
                raise ValueError(f"it does not begin with {_MARK}")
            coded = text.strip().removeprefix(_MARK)
            token = cls(**json.loads(base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))))
            if not all(isinstance(part, str) for part in token):
                raise ValueError("its parts are no texts")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"Expected a whole token as `fedtorch invite` prints it, but got another: {error}"
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
    """Return a token for a site of this name, which expires after so many seconds.

    Args:
        authority: its folder, which `fedtorch authority` makes.
        name: of the site.
        address: host and port at which the server enrols sites.
        seconds: until it expires.
        rows: how many rows the site may say that it has, at most; None for any number.
        now: seconds since 1970.

    Raises:
        ValueError: no name for a site.
    """
    check_name(name)
    folder, token = Path(authority), secrets.token_urlsafe(32)
    files.private_folder(folder / "tokens")
    promise = {"name": name, "expires": now() + seconds, "rows": rows}
    files.write_json(_promise(folder, token), promise)
    return Token(address, name, identity.fingerprint((folder / "authority.pem").read_bytes()), token)


def enrol(token: Token, folder: Path | str, renew: bool = False) -> Identity:
    """Make a key, have it certified, and keep the identity in a folder.

    Args:
        token: of the server's side.
        folder: of the identity.
        renew: get a new certificate for the key that is in the folder.

    Raises:
        FileExistsError: the folder has an identity, and it is not to be renewed.
        FileNotFoundError: there is none that could be renewed.
        ConnectionError: nobody answers at the token's address, or somebody else does.
        PermissionError: the server does not take the token, and says why; or gives a certificate of another kind.
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
        authority: its folder, which `fedtorch authority` makes; needed while sites enrol, and not by a run.
        address: host and port to listen at; with port 0, `port` says which was free.
        roster: to which sites are added.
        limits: of attempts and of connections.
        lifetime: of sites' certificates.

    Raises:
        OSError: nothing can listen there.
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
        """Take no more sites."""
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
    """Return the certificate for a token's secret and a signing request; use up the token, and let the site in.

    A site that renews its certificate keeps the number of rows that was agreed, unless the token says another.

    Raises:
        PermissionError: no such token, or it has been used or has expired.
        ValueError: the signing request is none; the token is as it was.
    """
    promise, expected = _promise(authority, secret), "Expected a token that is new"
    try:
        agreed = files.read_json(promise)
    except FileNotFoundError:
        raise PermissionError(f"{expected}, but it has been used, or never existed; ask for another") from None
    except ValueError as error:
        _LOG.error("%s", error)  # which is not for the site
        raise PermissionError(f"{expected}, but what is known of it is damaged; ask for another") from None
    if now() > agreed["expires"]:
        promise.unlink(missing_ok=True)
        raise PermissionError(f"{expected}, but it has expired; ask for another")
    certificate = identity.sign(authority, request, agreed["name"], lifetime)
    try:
        promise.rename(promise.with_suffix(".used"))  # one of several that try succeeds
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
    """Return the authority's certificate as the server shows it, if it has the key that the token names."""
    host, _, port = token.address.rpartition(":")
    shown = ""
    with suppress(OSError, ValueError):
        shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=LIMITS.seconds)
    if not shown:
        raise ConnectionError(
            f"Expected somebody who enrols sites at {token.address}, but got no answer; ask whether it is up"
        )
    if not secrets.compare_digest(identity.fingerprint(shown.encode()), token.authority):
        raise ConnectionError(
            f"Expected the authority of the token at {token.address}, but got another: somebody else listens there. "
            "Nothing was sent; tell the server's side"
        )
    return shown.encode()
