"""How often peers may connect and enrol: what is let through, who is shut out, and what is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtorch.protocol.rates import Bucket, Gate, Rate, address_of
from fedtorch.sites import Roster, connect, enrolment, serve
from fedtorch.sites.enrolment import EnrolmentServer
from fedtorch.sites.identity import identity
from fedtorch.sites.streams.hub import Limits


class Clock:
    """Seconds that pass when they are told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_no_more_than_the_burst_and_the_rate_pass() -> None:
    """In any stretch of time, whenever they come."""
    bucket, taken, now = Bucket(Rate(5, 0.5)), [], 0.0
    for k in range(200):
        now += (k * 37 % 11) / 10
        if bucket.take(1, now) == 0:
            taken.append(now)
    for i, first in enumerate(taken):
        assert all(j - i + 1 <= 5 + 0.5 * (last - first) + 1e-9 for j, last in enumerate(taken[i:], i))
    assert len(taken) >= 0.5 * now


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(Rate(1, 1.0))
    assert bucket.take(1, 100.0) == 0
    assert bucket.take(1, 50.0) == 1.0
    assert bucket.take(1, 50.5) == 0.5


def test_one_address_does_not_shut_out_another() -> None:
    clock = Clock()
    gate = Gate(Rate(2, 0.1), Rate(5, 1.0), clock)
    for _ in range(2):
        gate.enter("ipv4:10.0.0.1:5000")
    for port in range(50):
        with pytest.raises(ConnectionRefusedError, match=r"try again in 10\.0 s"):
            gate.enter(f"ipv4:10.0.0.1:{port}")
    for last in (2, 3, 4):
        gate.enter(f"ipv4:10.0.0.{last}:5000")
    with pytest.raises(ConnectionRefusedError, match=r"try again in 1\.0 s"):
        gate.enter("ipv4:10.0.0.5:5000")
    clock.now += 10.0
    gate.enter("ipv4:10.0.0.1:5000")


def test_addresses_take_bounded_memory_and_all_together_a_bounded_rate() -> None:
    gate, let_in = Gate(Rate(1, 1e-3), Rate(100, 1.0), Clock()), 0
    for k in range(6000):
        try:
            gate.enter(f"ipv4:10.{k >> 16}.{k >> 8 & 255}.{k & 255}:1")
            let_in += 1
        except ConnectionRefusedError:
            pass
    assert let_in == 100
    assert len(gate._buckets) == 4096


def test_addresses() -> None:
    assert address_of("ipv4:127.0.0.1:5000") == "127.0.0.1"
    assert address_of("ipv6:%5B2001:db8:0:1:2::3%5D:5000") == "2001:db8:0:1::/64"
    assert address_of("ipv6:[fe80::1%eth0]:5000") == "fe80::/64"
    assert len(address_of("unix:" + "x" * 1000)) == 200


def test_a_server_takes_so_many_streams_of_an_address(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    own, roster = identity.make_server(tmp_path / "server"), Roster(tmp_path / "roster.json")
    made = identity.make_site(tmp_path / "server", "a")
    roster.add("a", identity.fingerprint(made.certificate))
    hub = serve("127.0.0.1:0", own, roster, Limits(each=Rate(2, 1e-3)))
    links = [connect(f"127.0.0.1:{hub.port}", made) for _ in range(2)]
    links[1].send(b"here")
    assert hub.receive(5.0) == ("a", b"here")
    third = connect(f"127.0.0.1:{hub.port}", made)
    with pytest.raises(ConnectionError, match=r"Expected fewer attempts to connect; try again in (99\d|1000)\.\d s"):
        third.receive(5.0)
    links[1].send(b"still")  # who is there is not disturbed
    assert hub.receive(5.0) == ("a", b"still")
    for link in (*links, third):
        link.close()
    hub.close()


def test_tokens_are_tried_so_often(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    limits = enrolment.LIMITS._replace(each=Rate(3, 1e-3))
    identity.make_server(tmp_path / "server")
    enrolling = EnrolmentServer(tmp_path / "server", "127.0.0.1:0", Roster(tmp_path / "server" / "roster.json"), limits)
    token = enrolment.invite(tmp_path / "server", "a", f"127.0.0.1:{enrolling.port}")
    for _ in range(3):
        with pytest.raises(PermissionError, match="never existed"):
            enrolment.enrol(token._replace(secret="guessed"), tmp_path / "site")
    with pytest.raises(ConnectionError, match="Expected fewer attempts to connect; try again in"):
        enrolment.enrol(token, tmp_path / "site")
    enrolling.close()
