"""A site gets its certificate by a token: once, in time, and from nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from fedtorch.sites import Roster, connect, enrolment, serve
from fedtorch.sites.enrolment import EnrolmentServer, Token
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity

pytest.importorskip("grpc")


class Place:
    """A server where sites enrol."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, folder / "authority"
        self.identity = identity.make_server(self.authority)
        self.roster = Roster(folder / "roster.json")
        self.enrolling = EnrolmentServer(self.authority, "127.0.0.1:0", self.roster)
        self.address = f"127.0.0.1:{self.enrolling.port}"

    def invite(self, name: str = "ward 7", **more: float) -> Token:
        return enrolment.invite(self.authority, name, self.address, **more)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.enrolling.close()


def test_whoever_enrols_is_let_in(place: Place) -> None:
    token = enrolment.Token.read(f" {place.invite(rows=40)}\n")
    made = enrolment.enrol(token, place.folder / "site")
    assert isinstance(made, Identity)
    assert made.name == "ward 7"
    assert place.roster.name_of(made.certificate) == "ward 7"
    assert place.roster.rows == {"ward 7": 40}
    host = serve("127.0.0.1:0", place.identity, place.roster)
    link = connect(f"127.0.0.1:{host.port}", identity.read(place.folder / "site"))
    link.send(b"here")
    assert host.receive(5.0) == ("ward 7", b"here")
    link.close()
    host.close()
    with pytest.raises(FileExistsError, match="has one; renew its certificate with --renew, or choose"):
        enrolment.enrol(place.invite(), place.folder / "site")


def test_a_renewed_certificate_is_of_the_same_key_and_keeps_what_was_agreed(place: Place) -> None:
    first = enrolment.enrol(place.invite(rows=40), place.folder / "site")
    enrolling = EnrolmentServer(place.authority, "127.0.0.1:0", place.roster, lifetime=timedelta(days=3))
    token = place.invite()._replace(address=f"127.0.0.1:{enrolling.port}")
    again = enrolment.enrol(token, place.folder / "site", renew=True)
    assert again.key == first.key
    assert again.ends < first.ends - timedelta(days=300)
    assert identity.read(place.folder / "site") == again
    assert place.roster.rows == {"ward 7": 40}
    assert place.roster.name_of(again.certificate) == "ward 7"
    with pytest.raises(FileNotFoundError, match="Expected an identity in"):
        enrolment.enrol(place.invite(), place.folder / "elsewhere", renew=True)
    enrolling.close()


def test_a_token_has_one_use_and_its_secret_is_nowhere(place: Place) -> None:
    token = place.invite()
    enrolment.enrol(token, place.folder / "site")
    with pytest.raises(PermissionError, match="it has been used, or never existed; ask for another"):
        enrolment.enrol(token, place.folder / "thief")
    kept = [path.read_text() for path in (place.authority / "tokens").iterdir()]
    assert len(kept) == 1
    assert token.secret not in kept[0]
    assert json.loads(kept[0])["name"] == "ward 7"


def test_one_of_many_that_try_at_once_has_it(place: Place) -> None:
    token, found = place.invite(), []

    def attempt(number: int) -> None:
        request = identity.request(identity.new_key(), "ward 7")
        try:
            found.append(enrolment.admit(place.authority, place.roster, token.secret, request))
        except PermissionError as error:
            found.append(error)

    threads = [threading.Thread(target=attempt, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (certificate,) = (each for each in found if isinstance(each, bytes))
    assert place.roster.name_of(certificate) == "ward 7"


def test_a_token_expires_by_the_server_s_clock(place: Place) -> None:
    token = place.invite(seconds=-1.0)
    with pytest.raises(PermissionError, match="it has expired; ask for another"):
        enrolment.enrol(token, place.folder / "site")
    assert place.roster.sites == {}


def test_a_request_that_is_none_does_not_use_the_token(place: Place) -> None:
    token = place.invite()
    with pytest.raises(ValueError, match="Expected a signing request"):
        enrolment.admit(place.authority, place.roster, token.secret, b"nothing")
    enrolment.enrol(token, place.folder / "site")


def test_nothing_is_sent_to_somebody_else(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    token = place.invite()._replace(address=other.address)
    with pytest.raises(ConnectionError, match=r"somebody else listens there\. Nothing was sent"):
        enrolment.enrol(token, place.folder / "site")
    assert not (place.folder / "site").exists()
    other.enrolling.close()
    with pytest.raises(ConnectionError, match="got no answer; ask whether it is running"):
        enrolment.enrol(token, place.folder / "site")


def test_a_site_that_enrols_anew_has_a_new_key_and_the_old_one_is_out(place: Place) -> None:
    first = enrolment.enrol(place.invite(), place.folder / "first")
    second = enrolment.enrol(place.invite(), place.folder / "second")
    assert place.roster.name_of(second.certificate) == "ward 7"
    with pytest.raises(PermissionError, match="but got another; enrol anew"):
        place.roster.name_of(first.certificate)


@pytest.mark.parametrize(
    "text", ["", "hello", "fedtorch1.", "fedtorch1.e30", "fedtorch1.W10", "fedtorch1.!!!", "fedtorch2.e30"]
)
def test_tokens_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="Expected a complete token as printed by `fedtorch invite`"):
        enrolment.Token.read(text)


def test_a_token_that_lacks_its_end(place: Place) -> None:
    text = str(place.invite())
    for end in range(1, 40):
        with pytest.raises(ValueError, match="Expected a complete token"):
            enrolment.Token.read(text[:-end])


def test_a_token_does_not_show_its_secret() -> None:
    assert repr(Token("h:1", "a", "f", "s")) == "Token('a' at h:1)"
