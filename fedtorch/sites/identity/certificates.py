"""Fields of certificates, and checks of sites' names."""

from __future__ import annotations

import re

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

SERVER = "server.fedtorch"  # the name in the certificate of every server, wherever it listens
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,62}")


def digest_of(public: bytes) -> str:
    """Return SHA-256 of a public key as DER, in hexadecimal."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    return digest.finalize().hex()


def common_name(certificate: x509.Certificate) -> str:
    """Return the name of a certificate's holder."""
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def check_name(name: str) -> None:
    """Raise ValueError unless `name` may be that of a site."""
    if name.casefold().strip(" .") == SERVER:
        raise ValueError(
            f"Expected the name of a site, but got {name!r}, which is that of every server; choose another"
        )
    if not _NAME.fullmatch(name):
        raise ValueError(f"Expected a name of 1 to 63 letters, digits, '.', '_', '-' and spaces, but got {name!r}")


def check_usage(certificate: bytes, usage: x509.ObjectIdentifier) -> None:
    """Raise PermissionError unless a PEM certificate was made for this usage alone, a server's or a site's."""
    try:
        extension = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
            x509.ExtendedKeyUsage
        )
        usages = list(extension.value)
    except x509.ExtensionNotFound:
        usages = []
    if usages != [usage]:
        raise PermissionError(
            f"Expected a certificate for {usage._name}, but got one for {[each._name for each in usages]}; "
            "`fedtorch enrol` gets a site's, `fedtorch authority` a server's"
        )
