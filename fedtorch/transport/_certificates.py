"""What a certificate says, what a site may be called, and files that only their owner may read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from fedtorch import _files as files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,62}")


def digest_of(public: bytes) -> str:
    """SHA-256 of a public key as DER, in hexadecimal."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    return digest.finalize().hex()


def common_name(certificate: x509.Certificate) -> str:
    """What a certificate calls its holder."""
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def check_name(name: str) -> None:
    """Raises ValueError unless `name` may be that of a site."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"Expected a name of 1 to 63 letters, digits, '.', '_', '-' and spaces, but got {name!r}")


def write_secret(path: Path, content: bytes) -> None:
    """Writes a file for its owner's eyes only, whole or not at all."""
    mask = os.umask(0o077)
    try:
        files.replace(path, content)
    finally:
        os.umask(mask)
