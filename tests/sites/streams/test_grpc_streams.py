"""Streams over gRPC with TLS on both sides, on this machine."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fedtorch.sites import Roster, connect, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.identity.roster import Member
from fedtorch.sites.streams import grpc_settings, grpc_streams
from fedtorch.sites.streams.hub import LIMITS, Limits, Link

grpc = pytest.importorskip("grpc")
QUICK = Limits(seconds=1.0)


class Place:
    """A server that listens, and sites that it knows."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.folder, self.limits = folder, limits
        self.identity = identity.make_server(folder / "server")
        self.roster = Roster(folder / "roster.json")
        self.host = serve("127.0.0.1:0", self.identity, self.roster, limits)
        self.address = f"127.0.0.1:{self.host.port}"

    def site(self, name: str) -> Identity:
        made = identity.make_site(self.folder / "server", name)
        self.roster.add(name, identity.fingerprint(made.certificate))
        return made

    def link(self, name: str) -> Link:
        return connect(self.address, self.site(name), self.limits)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.host.close()


def echo(link: Link) -> None:
    with contextlib.suppress(OSError):
        while True:
            link.send(link.receive(10.0))


def test_frames_come_from_whom_the_certificate_says(place: Place) -> None:
    links = {name: place.link(name) for name in ("a", "b")}
    for name, link in links.items():
        link.send(name.encode())
    assert sorted(place.host.receive(5.0) for _ in links) == [("a", b"a"), ("b", b"b")]
    assert place.host.connected == {"a", "b"}
    place.host.send("a", b"back")
    assert links["a"].receive(5.0) == b"back"
    links["a"].close()
    links["b"].close()


@pytest.mark.parametrize("size", [0, 1, 100_000, 5_000_000])
def test_frames_of_any_size_come_back_as_they_went(place: Place, size: int) -> None:
    link = place.link("a")
    thread = threading.Thread(target=echo, args=(link,), daemon=True)
    thread.start()
    link.send(b"")
    assert place.host.receive(5.0) == ("a", b"")
    frames = [bytes([k]) * size for k in range(6)]
    came = []
    for first, second in zip(frames[::2], frames[1::2]):
        place.host.send("a", first), place.host.send("a", second)
        came += [place.host.receive(10.0)[1] for _ in range(2)]
    assert came == frames
    link.close()
    thread.join(5.0)


def test_a_site_that_nobody_reads_is_held_up_by_the_stream(tmp_path: Path) -> None:
    place = Place(tmp_path, Limits(frame=2**20, ahead=1, seconds=0.5))
    link = place.link("flood")
    with pytest.raises(TimeoutError):  # noqa: PT012
        for _ in range(200):
            link.send(bytes(2**20))
    link.close()
    place.host.close()


def test_who_is_not_in_the_roster_hears_so(place: Place) -> None:
    stranger = connect(place.address, identity.make_site(place.folder / "server", "stranger"))
    with pytest.raises(PermissionError, match="'stranger' is not in it; enrol first"):
        stranger.receive(5.0)
    stranger.close()


def test_a_key_that_was_replaced_or_revoked(place: Place) -> None:
    old = place.site("a")
    link = place.link("a")
    replaced = connect(place.address, old)
    with pytest.raises(PermissionError, match="but got another; enrol anew"):
        replaced.receive(5.0)
    link.send(b"fine")
    assert place.host.receive(5.0) == ("a", b"fine")
    place.roster.revoke("a", "stolen")
    link.send(b"not so fine")
    with pytest.raises(TimeoutError):
        place.host.receive(0.3)
    with pytest.raises(PermissionError, match="has been revoked: stolen"):
        link.receive(5.0)
    replaced.close()
    link.close()


def test_a_site_of_another_authority_is_not_let_in(place: Place, tmp_path: Path) -> None:
    identity.make_server(tmp_path / "other")
    stranger = identity.make_site(tmp_path / "other", "a")._replace(authority=place.identity.authority)
    place.site("a")
    with pytest.raises(  # noqa: PT012
        ConnectionError, match="the server answers, but ends every connection, as if it did not accept"
    ):
        for _ in range(3):  # a handshake of TLS 1.3 is over for the site before the server has seen its certificate
            with contextlib.suppress(ConnectionResetError):
                connect(place.address, stranger, QUICK).receive(5.0)
    with pytest.raises(TimeoutError):
        place.host.receive(0.1)


def test_a_site_whose_clock_is_wrong_hears_of_it_before_it_connects(place: Place) -> None:
    stale = identity.make_site(place.folder / "server", "a", timedelta(seconds=-1))
    with pytest.raises(ValueError, match=r"this machine's clock says .*; set the clock, or renew"):
        connect(place.address, stale)


def test_a_server_without_the_certificate_is_not_believed(place: Place, tmp_path: Path) -> None:
    mine = place.site("a")
    identity.make_server(tmp_path / "other")
    with pytest.raises(ConnectionError, match="the server that enrolled this site"):
        connect(place.address, mine._replace(authority=(tmp_path / "other" / "authority.pem").read_bytes()), QUICK)


def test_a_certificate_is_for_one_end_only(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end takes the other's, whoever says so and whatever its name is."""
    with pytest.raises(PermissionError, match=r"certificate for serverAuth, but got one for \['clientAuth'\]"):
        serve("127.0.0.1:0", place.site("a"), place.roster)
    with pytest.raises(PermissionError, match=r"certificate for clientAuth, but got one for \['serverAuth'\]"):
        connect(place.address, place.identity)
    monkeypatch.setattr(grpc_streams, "check_site_certificate", lambda certificate: None)
    place.roster.sites  # noqa: B018
    place.roster._sites[identity.SERVER] = Member(identity.fingerprint(place.identity.certificate))
    monkeypatch.setattr(Identity, "check_site", Identity.check_clock)
    with pytest.raises(ConnectionError, match=r"did not accept the certificate of 'server\.fedtorch'"):  # noqa: PT012
        for _ in range(3):
            with contextlib.suppress(ConnectionResetError):
                connect(place.address, place.identity, QUICK).receive(5.0)


def test_a_server_that_goes_away_is_not_a_certificate_that_is_not_believed(place: Place) -> None:
    mine = place.site("a")
    link = connect(place.address, mine, QUICK)
    place.host.close()
    with pytest.raises(ConnectionError) as ended:
        link.receive(5.0)
    with pytest.raises(ConnectionError, match="refused; check whether the server runs") as none:
        connect(place.address, mine, QUICK)
    for error in (ended, none):
        assert "certificate" not in str(error.value)


def test_a_server_of_another_version_is_told_from_a_cut(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_streams, "_METHOD", "Join")
    link = place.link("a")
    with pytest.raises(PermissionError, match="install the same version of fedtorch on both sides"):
        link.receive(5.0)
    link.close()


def test_both_ends_warn_of_a_certificate_that_ends_soon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, roster = identity.make_server(tmp_path / "authority"), Roster(tmp_path / "roster.json")
    made = identity.make_site(tmp_path / "authority", "a", timedelta(days=3))
    roster.add("a", identity.fingerprint(made.certificate))
    host = serve("127.0.0.1:0", own, roster)
    assert "ends in" not in caplog.text
    link = connect(f"127.0.0.1:{host.port}", made)
    assert "the certificate of 'a' ends in 2 days" in caplog.text
    link.send(b"1")
    assert host.receive(5.0) == ("a", b"1")
    assert caplog.text.count("fedtorch enrol TOKEN --renew") == 2
    link.close()
    host.close()


def test_a_site_cannot_play_the_server(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    thief, mine = place.site("thief"), place.site("a")
    monkeypatch.setattr(Identity, "check_server", Identity.check_clock)
    pretended = serve("127.0.0.1:0", thief, place.roster)
    with pytest.raises(ConnectionError, match="the server that enrolled this site"):
        connect(f"127.0.0.1:{pretended.port}", mine, QUICK)
    pretended.close()


def test_without_a_certificate_nothing_is_heard(place: Place) -> None:
    context = ssl.create_default_context(cadata=place.identity.authority.decode())
    context.set_alpn_protocols(["h2"])
    heard = b""
    with socket.create_connection(("127.0.0.1", place.host.port), 5.0) as plain, contextlib.suppress(OSError):  # noqa: SIM117
        with context.wrap_socket(plain, server_hostname=identity.SERVER) as stream:
            heard = stream.recv(1)  # a server that had let it in would send its settings
    assert heard == b""


def test_nobody_listens_and_ports_that_are_taken(place: Place) -> None:
    mine, address = place.site("a"), place.address
    with pytest.raises(OSError, match="choose another port"):
        serve(address, place.identity, place.roster)
    place.host.close()
    with pytest.raises(ConnectionError, match=r"within 1 s, but got no connection"):
        connect(address, mine, QUICK)


def test_a_site_that_leaves_and_comes_back(place: Place) -> None:
    mine = place.site("a")
    first = connect(place.address, mine)
    first.send(b"1")
    assert place.host.receive(5.0) == ("a", b"1")
    first.close()
    second = connect(place.address, mine)
    second.send(b"2")
    assert place.host.receive(5.0) == ("a", b"2")
    assert place.host.connected == {"a"}
    second.close()


def test_a_site_that_hears_of_the_server_s_end(place: Place) -> None:
    link = place.link("a")
    link.send(b"1")
    place.host.receive(5.0)
    place.host.close()
    with pytest.raises(ConnectionError):
        link.receive(5.0)
    link.close()


class _ClosedBeforeItWasSeen:
    """A channel whose first connection is made and closed between two looks at it."""

    def __init__(self) -> None:
        self.asked = 0
        self.callbacks: list[Callable[[Any], None]] = []

    def subscribe(self, callback: Callable[[Any], None], try_to_connect: bool = False) -> None:
        self.asked += try_to_connect
        self.callbacks.append(callback)
        callback(grpc.ChannelConnectivity.IDLE if self.asked < 2 else grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.remove(callback)


def test_a_channel_that_was_closed_before_it_was_seen_to_be_ready_connects_again() -> None:
    channel = _ClosedBeforeItWasSeen()
    assert grpc_settings.is_ready(channel, 5.0)
    assert (channel.asked, channel.callbacks) == (2, [])
    never = _ClosedBeforeItWasSeen()
    assert not grpc_settings.is_ready(never, 0.05)


FAILS = """
import sys
from fedtorch.sites import Roster, connect, serve
from fedtorch.sites.identity import identity

server, site = identity.make_server(sys.argv[1]), identity.make_site(sys.argv[1], "a")
roster = Roster(sys.argv[1] + "/roster.json")
roster.add("a", identity.fingerprint(site.certificate))
with serve("127.0.0.1:0", server, roster) as host:
    link = connect(f"127.0.0.1:{host.port}", site)
    link.send(b"hello")
    host.receive(30.0)
    raise RuntimeError("a mistake of the program")
"""


def test_a_program_ends_with_the_error_in_the_block_of_its_server(tmp_path: Path) -> None:
    """A supervisor starts it again only then; workers of open streams would keep its process."""
    ended = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("RuntimeError: a mistake of the program")
