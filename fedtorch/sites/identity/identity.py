"""The identity of a process: its key, a certificate by an authority, and the authority's certificate.

An authority has its own folder with its key. Neither servers nor sites need that key: keep the folder elsewhere. It
makes certificates for servers and for sites; the kind does not depend on the name. A site accepts only a server with a
server's certificate by its authority, and a server only sites with a site's certificate. Keys are on the curve P-256,
which every TLS library supports; they never leave the folder in which they were made.

>>> import tempfile
>>> from fedtorch.sites.identity import identity
>>> folder = tempfile.TemporaryDirectory()
>>> authority = f"{folder.name}/authority"
>>> server = identity.make_server(authority)
>>> server.save(f"{folder.name}/server")  # on the server's machine, without the authority's key
>>> identity.read(f"{folder.name}/server")
Identity('server.fedtorch')
>>> identity.make_site(authority, "ward 7")  # a site on the same machine
Identity('ward 7')

A site elsewhere makes its own key, and sends only a request; a renewed certificate has the same fingerprint:

>>> key = identity.new_key()
>>> asked = identity.request(key, "ward 8")
>>> certificate, renewed = (identity.sign(authority, asked, "ward 8") for _ in range(2))
>>> identity.fingerprint(certificate) == identity.fingerprint(renewed)
True
>>> identity.check_site_certificate(certificate)
>>> identity.check_site_certificate(server.certificate)
Traceback (most recent call last):
PermissionError: Expected a certificate for clientAuth, but got one for ['serverAuth']; ...
>>> site = identity.Identity(key, certificate, server.authority)
>>> site, site.ends - server.ends < identity.YEAR
(Identity('ward 8'), True)
>>> folder.cleanup()
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtorch import _files as files
from fedtorch.sites.identity.certificates import (
    SERVER as SERVER,
    check_name,
    check_usage,
    common_name,
    digest_of,
)

YEAR = timedelta(days=365)
SOON = timedelta(days=30)  # remaining lifetime of a certificate below which to warn
_AUTHORITY_LIFETIME = 10 * YEAR
_SKEW = timedelta(hours=1)  # tolerated difference of clocks for new certificates
_KEY, _CERTIFICATE, _AUTHORITY = "key.pem", "certificate.pem", "authority.pem"
_AUTHORITY_KEY = "authority.key.pem"
_SERVES, _JOINS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_LOG = logging.getLogger(__name__)


class Identity(NamedTuple):
    """A secret key and its certificates, as PEM bytes."""

    key: bytes
    certificate: bytes
    authority: bytes  # certificate of the trusted authority
    folder: Path | None = None  # folder from which it was read, which also stores records of its runs

    @property
    def name(self) -> str:
        """Return the name in the certificate."""
        return common_name(x509.load_pem_x509_certificate(self.certificate))

    @property
    def ends(self) -> datetime:
        """Return the time at which the certificate ends."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"

    def save(self, folder: Path | str) -> None:
        """Write the three files, readable only by their owner."""
        files.private_folder(folder)
        for name, content in ((_KEY, self.key), (_CERTIFICATE, self.certificate), (_AUTHORITY, self.authority)):
            files.replace(Path(folder) / name, content, private=True)

    def check_server(self) -> None:
        """Raise PermissionError unless this is a server's identity, and ValueError if it is not valid now."""
        check_usage(self.certificate, _SERVES)
        self.check_clock()

    def check_site(self) -> None:
        """Raise PermissionError unless this is a site's identity, and ValueError if it is not valid now."""
        check_usage(self.certificate, _JOINS)
        self.check_clock()

    def check_clock(self, now: datetime | None = None) -> None:
        """Raise ValueError if the certificate is not valid by this machine's clock; warn if it expires soon."""
        first, last = x509.load_pem_x509_certificate(self.certificate).not_valid_before_utc, self.ends
        now = datetime.now(UTC) if now is None else now
        if not first <= now <= last:
            raise ValueError(
                f"Expected a time between {first:%Y-%m-%d %H:%M} and {last:%Y-%m-%d %H:%M} UTC, when the certificate "
                f"of {self.name!r} is valid, but this machine's clock says {now:%Y-%m-%d %H:%M}; set the clock, or "
                f"renew the certificate {_how_to_renew(self.name)}"
            )
        warn_of_end(self.certificate, now)


def warn_of_end(certificate: bytes, now: datetime | None = None) -> str:
    """Warn that a PEM certificate expires within thirty days; return the warning, or "" if there was none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     authority = make_authority(folder)
        ...     made = make_site(folder, "ward 7", timedelta(days=3))
        >>> warn_of_end(made.certificate).partition(", on")[0]
        "the certificate of 'ward 7' ends in 2 days"
    """
    parsed = x509.load_pem_x509_certificate(certificate)
    left = parsed.not_valid_after_utc - (datetime.now(UTC) if now is None else now)
    if left > SOON:
        return ""
    name = common_name(parsed)
    warning = (
        f"the certificate of {name!r} ends in {max(left.days, 0)} days, on {parsed.not_valid_after_utc:%Y-%m-%d %H:%M} "
        f"UTC; renew it {_how_to_renew(name)}"
    )
    _LOG.warning("%s", warning)
    return warning


def read(folder: Path | str) -> Identity:
    """Return the identity that `Identity.save` has written.

    Raises:
        FileNotFoundError: there is no identity.
        ValueError: the files do not belong together, for example because one is damaged.
    """
    try:
        key, certificate, authority = ((Path(folder) / name).read_bytes() for name in (_KEY, _CERTIFICATE, _AUTHORITY))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Expected an identity in {folder}, but {Path(error.filename).name} is not there; make one with "
            "`fedtorch enrol`"
        ) from None
    if not _belong_together(key, certificate, authority):
        raise ValueError(
            f"Expected an identity in {folder}, but {_KEY}, {_CERTIFICATE} and {_AUTHORITY} do not belong together: "
            "one of them is damaged or of another identity; restore a copy, or enrol again with another folder"
        )
    return Identity(key, certificate, authority, Path(folder))


def _belong_together(key: bytes, certificate: bytes, authority: bytes) -> bool:
    """Return whether an authority has made a certificate for a key."""
    try:
        private = serialization.load_pem_private_key(key, None)
        holder, issuer = (x509.load_pem_x509_certificate(each) for each in (certificate, authority))
        issuer.verify_directly_issued_by(issuer)
        holder.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return private.public_key() == holder.public_key()


def make_authority(folder: Path | str, lifetime: timedelta = _AUTHORITY_LIFETIME) -> bytes:
    """Make an authority in a folder that has none yet; return its certificate.

    Raises:
        FileExistsError: there is an authority already, and sites may know it.
    """
    folder = Path(folder)
    if (folder / _AUTHORITY_KEY).exists():
        raise FileExistsError(
            f"Expected a folder without an authority, but {folder} has one; keep it, or choose another"
        )
    files.private_folder(folder)
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([_attribute("fedtorch authority")])
    builder = _builder(name, name, key.public_key(), datetime.now(UTC) + lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER)]), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    files.replace(folder / _AUTHORITY_KEY, _pem(key), private=True)
    files.replace(folder / _AUTHORITY, certificate, private=True)
    return certificate


def make_server(authority: Path | str, lifetime: timedelta = YEAR) -> Identity:
    """Make the identity of a server by the authority in a folder; make the authority if there is none.

    The identity is not written there: `save` it on the server's machine, and keep the authority's folder elsewhere.
    """
    if not (Path(authority) / _AUTHORITY_KEY).exists():
        make_authority(authority)
    key = new_key()
    certificate = _certify(authority, _request(key, SERVER), SERVER, lifetime, _SERVES, x509.DNSName(SERVER))
    return Identity(key, certificate, (Path(authority) / _AUTHORITY).read_bytes())


def make_site(authority: Path | str, name: str, lifetime: timedelta = YEAR) -> Identity:
    """Make a site's identity on the authority's own machine; for sites elsewhere see `enrolment`."""
    key = new_key()
    certificate = sign(authority, request(key, name), name, lifetime)
    return Identity(key, certificate, (Path(authority) / _AUTHORITY).read_bytes())


def new_key() -> bytes:
    """Return a new private key as PEM."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def request(key: bytes, name: str) -> bytes:
    """Return a site's signing request, which proves possession of the key."""
    check_name(name)
    return _request(key, name)


def sign(authority: Path | str, request: bytes, name: str, lifetime: timedelta = YEAR) -> bytes:
    """Return a site's certificate for a signing request, with `name` in place of the request's own name.

    Raises:
        ValueError: the request is malformed, not signed with its key, or has another kind of key; `name` is not valid
            for a site; or the authority's own certificate has expired.
    """
    check_name(name)
    return _certify(authority, request, name, lifetime, _JOINS, x509.UniformResourceIdentifier("fedtorch:site"))


def check_site_certificate(certificate: bytes) -> None:
    """Raise PermissionError unless a PEM certificate was made for a site; warn if it expires soon."""
    check_usage(certificate, _JOINS)
    warn_of_end(certificate)


def _certify(
    authority: Path | str,
    request: bytes,
    name: str,
    lifetime: timedelta,
    usage: x509.ObjectIdentifier,
    known_as: x509.GeneralName,
) -> bytes:
    """Return a certificate for one usage, which expires with the authority's at the latest."""
    try:
        asked = x509.load_pem_x509_csr(request)
        key = asked.public_key()
        valid = (
            asked.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
        )
    except Exception as error:
        raise ValueError(f"Expected a signing request, but got something else: {error}") from None
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("Expected a signing request of a P-256 key, signed with it, but got another")
    private = serialization.load_pem_private_key((Path(authority) / _AUTHORITY_KEY).read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((Path(authority) / _AUTHORITY).read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    if issuer.not_valid_after_utc < datetime.now(UTC):
        raise ValueError(
            f"Expected an authority that is valid, but that in {authority} ended on "
            f"{issuer.not_valid_after_utc:%Y-%m-%d}; make another with `fedtorch authority`, and have all sites enrol"
        )
    ends = min(datetime.now(UTC) + lifetime, issuer.not_valid_after_utc)
    builder = _builder(x509.Name([_attribute(name)]), issuer.subject, key, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key())
    builder = builder.add_extension(known, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([known_as]), critical=False)
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _request(key: bytes, name: str) -> bytes:
    private = serialization.load_pem_private_key(key, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([_attribute(name)]))
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _how_to_renew(name: str) -> str:
    if name == SERVER:
        return "with `fedtorch authority DIR --server DIR --renew`"
    return "with a token of `fedtorch invite` at the server's side and `fedtorch enrol TOKEN --renew` at the site"


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of the public key in a PEM certificate, in hexadecimal; it is the same after renewal."""
    public = x509.load_pem_x509_certificate(certificate).public_key()
    return digest_of(public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))


def _attribute(name: str) -> x509.NameAttribute:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, ends: datetime
) -> x509.CertificateBuilder:
    first = min(datetime.now(UTC), ends) - _SKEW
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(first).not_valid_after(ends)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
