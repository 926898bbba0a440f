r"""Private set intersection: which rows parties share, without showing each other the rest.

The Diffie–Hellman construction on the curve P-256. An identifier is hashed to a point P, the leader has a secret a and
a member a secret b; the member sends bP of its rows, the leader aP of its own, and the member returns b(aP). The leader
computes a(bP) and compares: equal points are equal identifiers, and points of rows that the other lacks look random
(decisional Diffie–Hellman). Members then hear the places of the common rows in their own list.

- *Points* are what `cryptography` offers: a point is given by its x-coordinate, `SHA-256(context, counter, identifier)`
  with the first counter for which OpenSSL finds a point of that x (try and increment; every second x has one), and
  multiplied by ECDH, which returns the x-coordinate of the product. Both signs of a point give the same x, so that
  :math:`x(a \cdot bP) = x(b \cdot aP)`. The group has prime order, so there is no small subgroup to leak into, and
  every received x is refused unless it is on the curve. (The older construction, X25519 of a hash as u-coordinate, lets
  half of the hashes fall on the curve's twist. Its group is as hard, but which of the two a blinded point is on stays
  visible, one bit of every row, and clamping makes secrets multiples of the cofactor; it is not used here.)
- *The leader learns* how many rows each member has, and for its own rows which member has them. *A member learns* how
  many rows the leader has, which of its own rows are used, and their order. A third party learns the sizes.
- *Limits.* All follow the protocol: who puts guessed identifiers into its list learns whether the other has them, and
  no such protocol can prevent it. Secrets come from the operating system, are new in each alignment and are not
  reproducible; the result does not depend on them. Hashing takes a time that depends on the identifier.

The leader is the party with the labels, usually. Messages are `fedtorch.wire` bytes: `run_leader` and `run_member` take
any `send` and `receive`, and `intersect` runs all of it in one process.

References: Huberman, Franklin, Hogg, "Enhancing privacy and trust in electronic communities", EC 1999; Meadows, "A more
efficient cryptographic matchmaking protocol", S&P 1986.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from fedtorch import wire

__all__ = ["Intersection", "Leader", "Member", "Points", "Positions", "intersect", "run_leader", "run_member"]

_CONTEXT = b"fedtorch alignment, P-256, version 1"
_CURVE = ec.SECP256R1()
_BYTES = 32


class Points(NamedTuple):
    """Both ways: blinded identifiers, in an order that says nothing."""

    x: Tensor  # (n, 32) uint8


class Positions(NamedTuple):
    """To a member: which of its points are used, in the common order."""

    rows: Tensor  # (m,) int64, −1 for a row that the member lacks


class Intersection(NamedTuple):
    """What all know in the end."""

    rows: tuple[Tensor, ...]  # (m,) one per party: its rows in the common order, −1 for a row that it lacks
    bytes: int  # that were sent


class _Holder:
    """Identifiers, a secret, and the order in which they are sent."""

    def __init__(self, identifiers: Sequence[str], name: str) -> None:
        check_identifiers(identifiers, name)
        self.name, self.identifiers = name, list(identifiers)
        self._secret = ec.generate_private_key(_CURVE)
        self.order = list(range(len(self.identifiers)))
        secrets.SystemRandom().shuffle(self.order)

    def own_points(self) -> Points:
        """Own identifiers, hashed and blinded, in a secret order."""
        return Points(_stack(self._times(_hash_to_point(self.identifiers[row])) for row in self.order))

    def blind(self, points: Points) -> Points:
        """The other's points times one's own secret, in the order that they came in.

        Raises:
            ValueError: something that is not a point of the curve.
        """
        return Points(_stack(self._times(_decode(bytes(x.tolist()), self.name)) for x in points.x))

    def _times(self, point: ec.EllipticCurvePublicKey) -> bytes:
        return self._secret.exchange(ec.ECDH(), point)


class Member(_Holder):
    """A party that is told which of its rows are common.

    Args:
        identifiers: one per row.
        name: for error messages.

    Raises:
        ValueError: an identifier that comes twice.
    """

    def finish(self, positions: Positions) -> Tensor:
        """Own rows in the common order, −1 where there is none, `(m,)`.

        Raises:
            ValueError: a position out of range, or one twice.
        """
        rows = positions.rows
        used = rows[rows >= 0]
        if bool(((rows < -1) | (rows >= len(self.order))).any()) or len(used.unique()) < len(used):
            raise ValueError(
                f"Expected distinct positions below {len(self.order)} or −1 at {self.name!r}, but got others"
            )
        return torch.where(rows < 0, rows, torch.tensor([*self.order, -1])[rows])


class Leader(_Holder):
    """The party that compares; usually the one with the labels.

    Args:
        identifiers: one per row.
        name: for error messages.

    Raises:
        ValueError: an identifier that comes twice.
    """

    def __init__(self, identifiers: Sequence[str], name: str = "leader") -> None:
        super().__init__(identifiers, name)
        self._places: dict[str, list[int]] = {}  # of each own row in a member's list

    def compare(self, member: str, theirs: Points, returned: Points) -> None:
        """Finds a member's rows among one's own.

        Args:
            member: its name.
            theirs: what it sent of its own.
            returned: one's own points as it sent them back.

        Raises:
            ValueError: another number of points than were sent, or points that are not on the curve.
        """
        if len(returned.x) != len(self.order):
            raise ValueError(f"Expected {len(self.order)} points back from {member!r}, but got {len(returned.x)}")
        places = {bytes(x.tolist()): i for i, x in enumerate(self.blind(theirs).x)}
        found = [-1] * len(self.order)
        for row, x in zip(self.order, returned.x):
            found[row] = places.get(bytes(x.tolist()), -1)
        self._places[member] = found

    def finish(self, required: Iterable[str]) -> tuple[Tensor, dict[str, Positions]]:
        """(own rows in the common order, what each member hears).

        Args:
            required: members without which a row is left out; others may lack it.

        Raises:
            ValueError: a member that was never heard of, or no row that all required ones have.
        """
        needed = list(required)
        for name in needed:
            if name not in self._places:
                raise ValueError(f"Expected required members among {sorted(self._places)}, but got {name!r}")
        rows = [r for r in range(len(self.order)) if all(self._places[name][r] >= 0 for name in needed)]
        if not rows:
            raise ValueError(
                f"Expected rows that {self.name!r} and {needed} share, but got none; are identifiers alike?"
            )
        own = torch.tensor(rows)
        return own, {name: Positions(torch.tensor(places)[own]) for name, places in self._places.items()}


Send = Callable[[bytes, str], None]
Receive = Callable[[str], bytes]


def run_member(member: Member, leader: str, send: Send, receive: Receive) -> Tensor:
    """A member's side; returns its rows in the common order.

    Args:
        member: the member.
        leader: whom `send` and `receive` reach.
        send: takes a payload and the receiver's name.
        receive: takes the sender's name.

    Raises:
        fedtorch.wire.PayloadError: a payload that is not what was expected.
    """
    send(_encode(member.own_points()), leader)
    send(_encode(member.blind(_decode_points(receive(leader), leader))), leader)
    payload = receive(leader)
    count = _count(payload, leader)
    return member.finish(wire.decode(payload, Positions(torch.empty(count, dtype=torch.int64)), client=leader))


def run_leader(
    leader: Leader, members: Sequence[str], send: Send, receive: Receive, required: Iterable[str] | None = None
) -> Tensor:
    """The leader's side; returns its own rows in the common order.

    Args:
        leader: the leader.
        members: their names.
        send: takes a payload and the receiver's name.
        receive: takes the sender's name.
        required: members without which a row is left out; all by default.
    """
    own = _encode(leader.own_points())
    for name in members:
        send(own, name)
    for name in members:
        theirs = _decode_points(receive(name), name)
        leader.compare(name, theirs, _decode_points(receive(name), name))
    rows, positions = leader.finish(members if required is None else required)
    for name in members:
        send(wire.encode(positions[name], {"rows": len(rows)}), name)
    return rows


def intersect(
    identifiers: Mapping[str, Sequence[str]], leader: str, required: Iterable[str] | None = None
) -> Intersection:
    """All parties in one process.

    Args:
        identifiers: of every party, by name.
        leader: the name of the one that compares; the common order is that of its rows.
        required: members without which a row is left out; all by default.

    Raises:
        ValueError: an unknown leader or member, an identifier that comes twice, or no common row.

    >>> rows = intersect({"clinic": ["b", "c", "a"], "laboratory": ["a", "d", "b"]}, leader="clinic").rows
    >>> [r.tolist() for r in rows]
    [[0, 2], [2, 0]]
    """
    if leader not in identifiers:
        raise ValueError(f"Expected a leader among {list(identifiers)}, but got {leader!r}")
    head = Leader(identifiers[leader], leader)
    members = {name: Member(own, name) for name, own in identifiers.items() if name != leader}
    sent: list[int] = []

    def passed(message: Points | Positions) -> None:
        sent.append(len(_encode(message)))

    asked = head.own_points()
    for name, member in members.items():
        theirs, returned = member.own_points(), member.blind(asked)
        for message in (asked, theirs, returned):
            passed(message)
        head.compare(name, theirs, returned)
    rows, positions = head.finish(members if required is None else required)
    found = {name: member.finish(positions[name]) for name, member in members.items()} | {leader: rows}
    for heard in positions.values():
        passed(heard)
    return Intersection(tuple(found[name] for name in identifiers), sum(sent))


def check_identifiers(identifiers: Sequence[str], name: str) -> None:
    """Raises `ValueError` unless identifiers are distinct strings."""
    seen: dict[str, int] = {}
    for row, identifier in enumerate(identifiers):
        if not isinstance(identifier, str):
            raise TypeError(
                f"Expected strings as identifiers of {name!r}, but got {type(identifier).__name__} in row {row}"
            )
        if identifier in seen:
            raise ValueError(
                f"Expected distinct identifiers at {name!r}, but rows {seen[identifier]} and {row} have the same; "
                "merge them, or keep the first with `Party.distinct`"
            )
        seen[identifier] = row


def _hash_to_point(identifier: str) -> ec.EllipticCurvePublicKey:
    """The point of an identifier: the first of its hashes that is the x-coordinate of one."""
    text = identifier.encode()
    for counter in range(256):
        x = hashlib.sha256(_CONTEXT + bytes([counter]) + text).digest()
        try:
            return _point(x)
        except ValueError:
            continue
    raise RuntimeError("Expected a point among 256 hashes, but got none")  # probability 2^-256


def _point(x: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, b"\x02" + x)


def _decode(x: bytes, name: str) -> ec.EllipticCurvePublicKey:
    try:
        return _point(x)
    except ValueError:
        raise ValueError(f"Expected x-coordinates of points of P-256 at {name!r}, but got another number") from None


def _stack(points: Iterable[bytes]) -> Tensor:
    joined = b"".join(points)
    return torch.tensor(list(joined), dtype=torch.uint8).reshape(-1, _BYTES)


def _encode(message: Points | Positions) -> bytes:
    return wire.encode(message, {"rows": len(message[0])})


def _decode_points(payload: bytes, sender: str) -> Points:
    like = Points(torch.empty(_count(payload, sender), _BYTES, dtype=torch.uint8))
    return wire.decode(payload, like, client=sender)


def _count(payload: bytes, sender: str) -> int:
    """The rows that a payload says it has; `decode` compares them with the bytes that are there."""
    rows = wire.metadata(payload, client=sender).get("rows")
    if not isinstance(rows, int) or not 0 <= rows <= len(payload):
        raise wire.PayloadError(f"payload of client {sender!r}: expected a number of rows, but got {rows!r}")
    return rows
