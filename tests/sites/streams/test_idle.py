"""Connections that never become a stream: how many are held, for how long, and that streams are left alone."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedtorch.sites import Hub, Roster, connect, serve
from fedtorch.sites.enrolment import LIMITS, EnrolmentServer, enrol, invite
from fedtorch.sites.identity import identity
from fedtorch.sites.streams.hub import Limits, Link
from fedtorch.sites.streams.idle import connections_to

pytest.importorskip("grpc")
LIMIT = Limits(seconds=5.0, idle_each=4, idle=6, idle_seconds=1.2)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def plain(stack: ExitStack, port: int, address: str = "127.0.0.1") -> socket.socket:
    """A connection on which nothing is said."""
    made = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0, (address, 0)))
    made.setblocking(False)
    return made


def still_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
        return False
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


def settled(connections: list[socket.socket], count: int, seconds: float) -> float:
    """The seconds after which so many are open."""
    began = time.monotonic()
    while (left := sum(map(still_open, connections))) != count and time.monotonic() - began < seconds:
        time.sleep(0.02)
    assert left == count
    return time.monotonic() - began


def member(folder: Path, limits: Limits) -> tuple[Hub, Link]:
    own, roster = identity.make_server(folder), Roster(folder / "roster.json")
    made = identity.make_site(folder, "a")
    roster.add("a", identity.fingerprint(made.certificate))
    host = serve("127.0.0.1:0", own, roster, limits)
    return host, connect(f"127.0.0.1:{host.port}", made)


def test_connections_without_a_stream_are_few_and_short(tmp_path: Path, opened: ExitStack) -> None:
    host, link = member(tmp_path, LIMIT)
    opened.callback(host.close)
    link.send(b"before")
    first = [plain(opened, host.port) for _ in range(12)]
    settled(first, 4, 1.0)
    others = [plain(opened, host.port, f"127.0.0.{k}") for k in range(2, 7)]
    settled([*first, *others], 6, 1.0)
    settled([*first, *others], 0, 3.0)
    again = plain(opened, host.port)
    assert still_open(again)
    link.send(b"after")
    assert [host.receive(5.0), host.receive(5.0)] == [("a", b"before"), ("a", b"after")]
    link.close()


def test_one_that_has_shaken_hands_and_says_no_more_is_closed(tmp_path: Path, opened: ExitStack) -> None:
    host, link = member(tmp_path, LIMIT._replace(idle_seconds=0.4))
    opened.callback(host.close)
    mine = identity.make_site(tmp_path, "a")
    mine.save(tmp_path / "site")
    context = ssl.create_default_context(cadata=mine.authority.decode())
    context.load_cert_chain(tmp_path / "site" / "certificate.pem", tmp_path / "site" / "key.pem")
    context.set_alpn_protocols(["h2"])
    raw = opened.enter_context(socket.create_connection(("127.0.0.1", host.port), 5.0))
    shaken = opened.enter_context(context.wrap_socket(raw, server_hostname=identity.SERVER))
    assert shaken.recv(1)  # the server's settings: it takes the certificate
    shaken.setblocking(False)
    assert settled([shaken], 0, 3.0) > 0.1
    time.sleep(0.6)
    assert host.connected == {"a"}
    link.close()


def test_the_port_for_enrolment_counts_too(tmp_path: Path, opened: ExitStack) -> None:
    identity.make_server(tmp_path)
    enrolling = EnrolmentServer(
        tmp_path, "127.0.0.1:0", Roster(tmp_path / "roster.json"), LIMITS._replace(idle_seconds=0.8)
    )
    opened.callback(enrolling.close)
    made = [plain(opened, enrolling.port) for _ in range(8)]
    settled(made, 4, 1.0)
    token = invite(tmp_path, "a", f"127.0.0.1:{enrolling.port}")
    settled(made, 0, 3.0)
    assert enrol(token, tmp_path / "site").name == "a"


def test_the_limits_are_those_that_are_documented() -> None:
    assert (Limits().idle_each, Limits().idle, Limits().idle_seconds) == (4, 64, 10.0)


def test_only_connections_to_the_port_are_seen(opened: ExitStack) -> None:
    listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = listening.getsockname()[1]
    client = plain(opened, port)
    accepted = opened.enter_context(listening.accept()[0])
    (seen,) = connections_to(port)
    assert seen.peer == f"ipv4:127.0.0.1:{client.getsockname()[1]}"
    seen.socket.close()
    assert accepted.fileno() > 0
    assert connections_to(1) == []
