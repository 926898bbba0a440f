"""Who a process is: a key of its own, a certificate that an authority has made for it, and that authority.

The server's folder has an authority, which makes one certificate for serving and one for each site. Sites take no
server with a certificate of anybody else, nor one that was made for a site. Keys are of the curve P-256, which
every TLS library speaks; they never leave the folder in which they were made.

>>> import tempfile
>>> from fedtorch.transport import identity
>>> folder = tempfile.TemporaryDirectory()
>>> server = identity.make_server(folder.name)
>>> identity.read(folder.name) == server, identity.make_site(folder.name, "ward 7")  # a site on the same machine
(True, Identity('ward 7'))

A site elsewhere makes its own key, and sends no more than a request; a renewed certificate has the same fingerprint:

>>> key = identity.new_key()
>>> asked = identity.request(key, "ward 8")
>>> certificate, renewed = (identity.sign(folder.name, asked, "ward 8") for _ in range(2))
>>> identity.fingerprint(certificate) == identity.fingerprint(renewed)
True
>>> identity.Identity(key, certificate, server.authority)
Identity('ward 8')
>>> folder.cleanup()
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtorch.transport._certificates import check_name, common_name, digest_of, write_secret

SERVER = "server.fedtorch"  # the name in the certificate of every server, wherever it listens
YEARS = timedelta(days=5 * 365)
_SKEW = timedelta(hours=1)  # by which clocks may differ when a certificate is new
_KEY, _CERTIFICATE, _AUTHORITY = "key.pem", "certificate.pem", "authority.pem"
_AUTHORITY_KEY = "authority.key.pem"


class Identity(NamedTuple):
    """PEM bytes; the key in it is a secret."""

    key: bytes
    certificate: bytes
    authority: bytes  # whose certificates are believed

    @property
    def name(self) -> str:
        """What the certificate calls its holder."""
        return common_name(x509.load_pem_x509_certificate(self.certificate))

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"

    def save(self, folder: Path | str) -> None:
        """Writes the three files; the key is for its owner's eyes only."""
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in ((_KEY, self.key), (_CERTIFICATE, self.certificate), (_AUTHORITY, self.authority)):
            write_secret(Path(folder) / name, content)

    def check_clock(self, now: datetime | None = None) -> None:
        """Raises ValueError where the certificate is not valid at the time of this machine's clock."""
        certificate = x509.load_pem_x509_certificate(self.certificate)
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        now = datetime.now(UTC) if now is None else now
        if not first <= now <= last:
            raise ValueError(
                f"Expected a time between {first:%Y-%m-%d %H:%M} and {last:%Y-%m-%d %H:%M} UTC, when the certificate "
                f"of {self.name!r} is valid, but this machine's clock says {now:%Y-%m-%d %H:%M}; set the clock, or "
                "enrol anew"
            )


def read(folder: Path | str) -> Identity:
    """What `Identity.save` wrote.

    Raises:
        FileNotFoundError: there is no identity.
    """
    try:
        return Identity(*((Path(folder) / name).read_bytes() for name in (_KEY, _CERTIFICATE, _AUTHORITY)))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Expected an identity in {folder}, but {Path(error.filename).name} is not there; make one with "
            "`fedtorch enrol`"
        ) from None


def make_server(folder: Path | str, lifetime: timedelta = YEARS) -> Identity:
    """An authority, and the identity of a server under it, in a folder that has none yet.

    Raises:
        FileExistsError: there is an authority already, which sites may know.
    """
    folder = Path(folder)
    if (folder / _AUTHORITY_KEY).exists():
        raise FileExistsError(
            f"Expected a folder without an authority, but {folder} has one; keep it, or choose another"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([_attribute("fedtorch authority")])
    builder = _builder(name, name, key.public_key(), lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER)]), critical=False)
    authority = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    write_secret(folder / _AUTHORITY_KEY, _pem(key))
    (folder / _AUTHORITY).write_bytes(authority)
    own = new_key()
    made = Identity(own, sign(folder, request(own, SERVER), SERVER, lifetime), authority)
    made.save(folder)
    return made


def make_site(authority: Path | str, name: str, lifetime: timedelta = YEARS) -> Identity:
    """A site's identity where authority and site are in one hand, as on one machine; else see `enrolment`."""
    key = new_key()
    certificate = sign(authority, request(key, name), name, lifetime)
    return Identity(key, certificate, (Path(authority) / _AUTHORITY).read_bytes())


def new_key() -> bytes:
    """A private key as PEM."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def request(key: bytes, name: str) -> bytes:
    """A signing request, which proves that whoever asks has the key."""
    check_name(name)
    private = serialization.load_pem_private_key(key, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([_attribute(name)]))
    return builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def sign(authority: Path | str, request: bytes, name: str, lifetime: timedelta = YEARS) -> bytes:
    """The certificate of whoever made the signing request, as `name`, whatever name the request says.

    Raises:
        ValueError: it is no request, or not signed with its key, or of another kind of key; or no name for a site.
    """
    check_name(name)
    try:
        asked = x509.load_pem_x509_csr(request)
        key = asked.public_key()
        fine = asked.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    except Exception as error:
        raise ValueError(f"Expected a signing request, but got something else: {error}") from None
    if not fine or not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("Expected a signing request of a P-256 key, signed with it, but got another")
    own = serialization.load_pem_private_key((Path(authority) / _AUTHORITY_KEY).read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((Path(authority) / _AUTHORITY).read_bytes())
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    serves = ExtendedKeyUsageOID.SERVER_AUTH if name == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _builder(x509.Name([_attribute(name)]), issuer.subject, key, lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([serves]), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(_names(name)), critical=False)
    return builder.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of the public key in a PEM certificate, in hexadecimal: the same when the certificate is renewed."""
    public = x509.load_pem_x509_certificate(certificate).public_key()
    return digest_of(public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))


def _names(name: str) -> Sequence[x509.GeneralName]:
    return [x509.DNSName(name) if name == SERVER else x509.UniformResourceIdentifier("fedtorch:site")]


def _attribute(name: str) -> x509.NameAttribute:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + lifetime)


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
