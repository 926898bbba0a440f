"""Keys and certificates, and the roster of who may come."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from fedtorch.sites import Roster, enrolment
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.certificates import common_name


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    identity.make_authority(tmp_path / "authority")
    return tmp_path / "authority"


def test_a_site_is_certified_by_the_authority_under_its_name(authority: Path) -> None:
    made = identity.make_site(authority, "ward 7")
    certificate, issuer = (x509.load_pem_x509_certificate(pem) for pem in (made.certificate, made.authority))
    certificate.verify_directly_issued_by(issuer)
    assert made.name == "ward 7"
    assert repr(made) == "Identity('ward 7')"
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]


def test_strict_libraries_take_the_certificates(authority: Path, tmp_path: Path) -> None:
    """As Python does from 3.13 on: RFC 5280, with identifiers of the keys of authority and holder."""
    sides = []
    for made, purpose in (
        (identity.make_server(authority), ssl.Purpose.CLIENT_AUTH),
        (identity.make_site(authority, "ward 7"), ssl.Purpose.SERVER_AUTH),
    ):
        made.save(tmp_path / made.name)
        context = ssl.create_default_context(purpose, cadata=made.authority.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_cert_chain(tmp_path / made.name / "certificate.pem", tmp_path / made.name / "key.pem")
        sides.append(context)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = sides[0].wrap_bio(up, down, server_side=True)
    site = sides[1].wrap_bio(down, up, server_hostname=identity.SERVER)
    for end in (site, server, site, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert site.getpeercert()
    assert server.getpeercert()


def test_keys_are_for_their_owner_and_come_back_from_the_folder(authority: Path, tmp_path: Path) -> None:
    made = identity.make_site(authority, "ward 7")
    made.save(tmp_path / "site")
    assert identity.read(tmp_path / "site") == made._replace(folder=tmp_path / "site")
    for path in (tmp_path / "site" / "key.pem", authority / "authority.key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError, match=r"key\.pem is not there; make one with `fedtorch enrol`"):
        identity.read(tmp_path / "nowhere")


def test_an_authority_is_not_made_twice(authority: Path) -> None:
    with pytest.raises(FileExistsError, match="has one; keep it"):
        identity.make_authority(authority)
    assert identity.make_server(authority).authority == (authority / "authority.pem").read_bytes()


def test_whose_clock_is_wrong_hears_of_it(authority: Path) -> None:
    made = identity.make_site(authority, "ward 7", timedelta(days=30))
    made.check_clock()
    for wrong in (-1, 31):
        with pytest.raises(ValueError, match=r"this machine's clock says .* set the clock, or renew"):
            made.check_clock(datetime.now(UTC) + timedelta(days=wrong))


@pytest.mark.parametrize("name", ["", " a", "a/b", "../a", "a" * 64, "a\nb"])
def test_names_that_are_none(authority: Path, name: str) -> None:
    with pytest.raises(ValueError, match="Expected a name of 1 to 63"):
        identity.make_site(authority, name)


@pytest.mark.parametrize("name", ["server.fedtorch", "Server.FEDTORCH", "server.fedtorch."])
def test_no_site_has_the_name_of_servers(authority: Path, tmp_path: Path, name: str) -> None:
    asked = identity.request(identity.new_key(), "a")
    for refuse in (
        lambda: identity.make_site(authority, name),
        lambda: identity.request(identity.new_key(), name),
        lambda: identity.sign(authority, asked, name),
        lambda: enrolment.invite(authority, name, "h:1"),
        lambda: Roster(tmp_path / "roster.json").add(name, "key"),
    ):
        with pytest.raises(ValueError, match="which is that of every server"):
            refuse()


def test_what_a_certificate_is_for_does_not_come_from_its_name(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "check_name", lambda name: None)
    made = identity.make_site(authority, identity.SERVER)
    certificate = x509.load_pem_x509_certificate(made.certificate)
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == []
    with pytest.raises(PermissionError, match="Expected a certificate for serverAuth"):
        made.check_server()
    with pytest.raises(PermissionError, match="Expected a certificate for clientAuth"):
        identity.make_server(authority).check_site()


def test_certificates_end_after_a_year_and_with_their_authority(tmp_path: Path) -> None:
    now, authority = datetime.now(UTC), tmp_path / "short"
    for made in (identity.make_server(tmp_path / "long"), identity.make_site(tmp_path / "long", "a")):
        assert timedelta(364) < made.ends - now < timedelta(366)
    identity.make_authority(authority, timedelta(days=10))
    assert identity.make_site(authority, "a").ends == identity.make_server(authority).ends < now + timedelta(days=11)
    identity.make_authority(tmp_path / "ended", timedelta(seconds=-2))
    with pytest.raises(ValueError, match="Expected an authority that is valid, but"):
        identity.make_site(tmp_path / "ended", "a")


def test_the_end_of_a_certificate_is_warned_of_in_time(authority: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = identity.make_server(authority)
    for days, said in ((31, ""), (29, "'server.fedtorch' ends in 29 days"), (0.5, "'server.fedtorch' ends in 0 days")):
        caplog.clear()
        made.check_clock(made.ends - timedelta(days=days))
        assert (said in caplog.text) if said else not caplog.records
    assert "renew it with `fedtorch authority DIR --server DIR --renew`" in caplog.text


def test_the_name_is_the_authority_s_to_give(authority: Path) -> None:
    asked = identity.request(identity.new_key(), "the director")
    made = identity.sign(authority, asked, "ward 7")
    assert common_name(x509.load_pem_x509_certificate(made)) == "ward 7"


def test_requests_that_are_none(authority: Path) -> None:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    other = x509.CertificateSigningRequestBuilder().subject_name(subject)
    wrong_key = other.sign(ed25519.Ed25519PrivateKey.generate(), None)
    wrong_curve = other.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    good = x509.load_pem_x509_csr(identity.request(identity.new_key(), "a"))
    coded = bytearray(good.public_bytes(serialization.Encoding.DER))
    coded[-1] ^= 1
    unsigned = x509.load_der_x509_csr(bytes(coded))
    for request in (wrong_key, wrong_curve, unsigned):
        with pytest.raises(ValueError, match="of a P-256 key, signed with it"):
            identity.sign(authority, request.public_bytes(serialization.Encoding.PEM), "a")
    with pytest.raises(ValueError, match="Expected a signing request"):
        identity.sign(authority, b"hello", "a")


def test_a_roster_knows_names_keys_and_who_was_revoked(authority: Path, tmp_path: Path) -> None:
    first, second = identity.make_site(authority, "a"), identity.make_site(authority, "a")
    roster = Roster(tmp_path / "roster.json")
    assert roster.sites == {}
    with pytest.raises(PermissionError, match="'a' is not in it; enrol first"):
        roster.name_of(first.certificate)
    roster.add("a", identity.fingerprint(first.certificate), rows=10)
    assert roster.name_of(first.certificate) == "a"
    with pytest.raises(PermissionError, match="but got another; enrol anew"):
        roster.name_of(second.certificate)
    Roster(tmp_path / "roster.json").revoke("a", "stolen")
    with pytest.raises(PermissionError, match="has been revoked: stolen"):
        roster.name_of(first.certificate)
    with pytest.raises(ValueError, match=r"Expected one of \['a'\], but got 'b'"):
        roster.revoke("b", "")
    roster.add("a", identity.fingerprint(second.certificate))
    assert roster.name_of(second.certificate) == "a"


@pytest.mark.parametrize("content", ["", "[]", '{"sites": {"a": 3}}', '{"sites": {"a": {"lock": "1"}}}', "{}"])
def test_a_damaged_roster_lets_nobody_in(tmp_path: Path, content: str) -> None:
    (tmp_path / "roster.json").write_text(content)
    with pytest.raises(ValueError, match="Expected a roster in"):
        Roster(tmp_path / "roster.json").check("a", "")
