"""The key that has signed a record, and the certificates that vouch for it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedtorch import chained_log as log
from fedtorch.sites.identity.identity import Identity, fingerprint
from fedtorch.sites.identity.roster import Roster


def certificate_in(first: log.Entry) -> bytes | None:
    """Return the certificate in a record's first entry, None if there is none."""
    certificate = str(first.content.get("certificate", "")).encode()
    try:
        key_of(certificate)
    except ValueError:
        return None
    return certificate


def name_in(certificate: bytes) -> str:
    """Return the name of a certificate's holder."""
    return Identity(b"", certificate, b"").name


def stranger(signer: bytes, certificate: bytes | None, roster: Path | str | None) -> str | None:
    """Return why a signer's name cannot be trusted; None if a certificate or roster vouches for it."""
    name, key = name_in(signer), fingerprint(signer)
    if certificate is None and roster is None:
        return f"nobody vouches for the key {key[:16]} of the name {name!r}: pass a certificate or a roster"
    if certificate is not None and (fingerprint(certificate) == key or issued(signer, certificate)):
        return None
    site = None if roster is None else Roster(roster).sites.get(name)
    if site is not None and site.key == key:
        return None
    return f"signed by another key: {key[:16]}, of the name {name!r}, is not the expected one"


def issued(certificate: bytes, authority: bytes) -> bool:
    """Return whether an authority has made a certificate."""
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)
        return issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False


def key_of(certificate: bytes) -> Any:
    """Return the public key in a certificate."""
    return x509.load_pem_x509_certificate(certificate).public_key()


def fits(key: Any, content: bytes, signature: str) -> bool:
    """Return whether a key has made a signature of `content`."""
    try:
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(base64.b64decode(signature), content, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, AssertionError):
        return False
    return True


def is_server(certificate: bytes, authority: bytes) -> bool:
    """Return whether a certificate is a server's, by an authority."""
    try:
        checked = x509.load_pem_x509_certificate(certificate)
        usage = checked.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        return issued(certificate, authority) and ExtendedKeyUsageOID.SERVER_AUTH in usage
    except (ValueError, x509.ExtensionNotFound):
        return False
