r"""Private set intersection: parties find the rows that they share, and do not show each other the others.

This is the Diffie–Hellman construction on the curve P-256. An identifier is hashed to a point P; the leader has a
secret a and a member a secret b. The member sends bP for each of its rows, the leader aP for each of its own, and the
member returns b(aP). The leader computes a(bP) and compares: equal points are equal identifiers, and points of rows
that the other lacks look random (decisional Diffie–Hellman). The leader then sends each member the positions of the
common rows in the member's own list.

- *Points* are computed with `cryptography`. A point is given by its x-coordinate,
  `SHA-256(context, counter, identifier)`, with the first counter for which OpenSSL finds a point of that x (try and
  increment; every second x has one). ECDH multiplies it and returns the x-coordinate of the product. Both signs of a
  point give the same x, so that :math:`x(a \cdot bP) = x(b \cdot aP)`. The group has prime order, so no small subgroup
  leaks anything, and every received x is refused unless it is on the curve. (An older construction takes X25519 of a
  hash as u-coordinate. Half of its hashes fall on the curve's twist. The twist's group is as hard, but on which of the
  two a blinded point lies stays visible, one bit of every row, and clamping makes secrets multiples of the cofactor.
  It is not used here.)
- *The leader learns* how many rows each member has, and which members have each of its own rows. *A member learns* how
  many rows the leader has, how many of these all required members have too, and which of its own rows are among them.
  Whoever carries messages learns all sizes. With two parties the leader learns of no rows but the common ones. With
  more parties, a row that one member has and another lacks is left out, and the leader knows who has it. Protocols that
  hide this compare all lists at once, by oblivious programmable pseudorandom functions (Kolesnikov, Matania, Pinkas,
  Rosulek, Trieu, CCS 2017: 72 s for five parties of 2²⁰ rows), which `cryptography` does not have; and `required=`
  depends on this knowledge.
- *The common order* is not that of the leader's table, which may be sorted by the label. Where all members are
  required, rows are sorted by identifier, and all parties know all these identifiers. Otherwise the sorted order would
  show a member between which of its identifiers the ones lie that it lacks. So the order is then drawn from the
  system's entropy; `intersect`, which holds all parties' data in one process, restores the sorted order. A server that
  is not the leader sees rows in the common order, too.
- *Identifiers* are compared in Unicode's normal form C, so that "é" is the same as "e" with an accent after it, which
  two systems may write for one name. Nothing else is normalised, neither case nor blanks.
- *Limits.* A holder multiplies at most `most` points of others in all requests together, and, by `limit`, at most so
  many a day whoever asks and however often, because every point that it multiplies is a guess that the other party can
  test. A leader that violates the protocol may send sums of points, each of which confirms several identifiers of a
  small domain. A message with more points is refused before it is read. Apart from this the protocol trusts the
  parties to follow it. A party that puts guessed identifiers into its list learns whether the other has them, and no
  such protocol can prevent it. Secrets come from the operating system, are new in each alignment and are not
  reproducible; which rows are common does not depend on them. The time of hashing depends on the identifier.

The leader is usually the party with the labels. `Holder.leading` and `Holder.following` are the halves of the protocol
for any driver of `fedtorch.protocol.halves`, and `intersect` runs all of it in one process.

References: Huberman, Franklin, Hogg, "Enhancing privacy and trust in electronic communities", EC 1999; Meadows, "A more
efficient cryptographic matchmaking protocol", S&P 1986.
"""

from __future__ import annotations

import hashlib
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from fedtorch._representation import without_rows
from fedtorch.learns import Learns, tells
from fedtorch.progress import tracked
from fedtorch.protocol.halves import Half, Receive, Send, together
from fedtorch.vfl.rows.daily_limit import DailyLimit

_CONTEXT = b"fedtorch alignment, P-256, version 1"
_CURVE = ec.SECP256R1()
_BYTES = 32
_BLINDING = "Blinding identifiers"


@tells(
    Learns(
        "how many rows the sender has; to the leader, which of its own rows each member has, whether or not the others "
        "have them; and of guessed identifiers whether they are there",
        helps="DailyLimit: so many points a day, each of which may test several guesses",
    )
)
@without_rows
class Points(NamedTuple):
    """Both ways: blinded identifiers in random order."""

    x: Tensor  # (n, 32) uint8


@tells(Learns("how many rows the leader and all required members have, and which of the member's own are among them"))
@without_rows
class Positions(NamedTuple):
    """To a member: which of its points are used, in the common order."""

    rows: Tensor  # (m,) int64, −1 for a row that the member lacks


_POINTS = Points(torch.empty(0, _BYTES, dtype=torch.uint8))
_POSITIONS = Positions(torch.empty(0, dtype=torch.int64))


@without_rows
class Intersection(NamedTuple):
    """Rows of all parties in the common order, and the bytes that were sent."""

    rows: tuple[Tensor, ...]  # (m,) one per party: its rows in the common order, −1 for a row that it lacks
    bytes: int  # that were sent


class Holder:
    """A party's identifiers in an alignment, with its secret and the order in which it sends them.

    Args:
        identifiers: one per row.
        name: for error messages.
        most: how many points of others are multiplied by the secret at most, in all requests together.
        limit: of points a day, over all alignments; None for no limit.

    Raises:
        ValueError: an identifier that comes twice, or is no Unicode text.

    >>> clinic, laboratory = Holder(["ann", "bob"], "clinic"), Holder(["bob"], "laboratory")
    >>> sent = clinic.own_points()  # what the laboratory sees of the clinic's list: a `Points`
    >>> sent.x.shape
    torch.Size([2, 32])
    >>> clinic.places("laboratory", laboratory.own_points(), laboratory.blind(sent)).tolist()
    [-1, 0]
    >>> laboratory.rows(Positions(torch.tensor([0])))
    tensor([0])
    >>> laboratory.blind(Points(torch.zeros(1, 32, dtype=torch.uint8) + 255))
    Traceback (most recent call last):
    ValueError: Expected x-coordinates of points of P-256 at 'laboratory', but got another number
    """

    def __init__(
        self, identifiers: Sequence[str], name: str, most: int = 10_000_000, limit: DailyLimit | None = None
    ) -> None:
        self.name, self.identifiers, self.most = name, _normalised(identifiers, name), most
        self.limit = limit
        self._secret = ec.generate_private_key(_CURVE)
        self.order = list(range(len(self.identifiers)))
        secrets.SystemRandom().shuffle(self.order)

    def own_points(self) -> Points:
        """Return this party's identifiers, hashed and blinded, in a secret order."""
        rows = tracked(self.order, _BLINDING, unit="row")
        return Points(_stack(self._times(_hash_to_point(self.identifiers[row])) for row in rows))

    def blind(self, points: Points) -> Points:
        """Multiply the other party's points by this party's secret, in the order received.

        Raises:
            ValueError: coordinates that are not of points of the curve, or more points than the limits still allow.
        """
        if len(points.x) > self.most:
            raise ValueError(
                f"Expected at most {self.most} more points at {self.name!r}, but got {len(points.x)}; raise most= if "
                "the lists are that long"
            )
        if self.limit is not None:
            self.limit.take(len(points.x), self.name)
        self.most -= len(points.x)
        rows = tracked(_each(points), _BLINDING, len(points.x), unit="row")
        return Points(_stack(self._times(_decode(x, self.name)) for x in rows))

    def places(self, member: str, theirs: Points, returned: Points) -> Tensor:
        """Return the position of each of the leader's rows in a member's list, −1 where the member lacks it, `(n,)`.

        Args:
            member: its name.
            theirs: the member's blinded points.
            returned: the leader's points as the member sent them back.

        Raises:
            ValueError: another number of points than was sent, a point twice, or points that are not on the curve.
        """
        if len(returned.x) != len(self.order):
            raise ValueError(f"Expected {len(self.order)} points back from {member!r}, but got {len(returned.x)}")
        known = {x: i for i, x in enumerate(_each(self.blind(theirs)))}
        for sent, count in ((theirs, len(known)), (returned, len(set(_each(returned))))):
            if count < len(sent.x):
                raise ValueError(f"Expected distinct points of {member!r}, but got {len(sent.x) - count} twice")
        positions = torch.empty(len(self.order), dtype=torch.int64)
        positions[self.order] = torch.tensor([known.get(x, -1) for x in _each(returned)], dtype=torch.int64)
        return positions

    def rows(self, positions: Positions) -> Tensor:
        """Return this member's rows in the common order, −1 for rows that it lacks, `(m,)`.

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

    def digest(self, rows: Tensor) -> bytes:
        """Return a hash of the identifiers of rows in their order, 32 bytes, equal at all parties with the same rows.

        Put it at the end of the `run=` of `fedtorch.sites.secure.masked_party`: then the parties refuse a sum if a
        leader has sent them different rows. Whoever reads their signed messages can test a guess of the whole list.

        Args:
            rows: `(m,)` as `following` and `leading` return them.

        Raises:
            ValueError: a row that this party lacks, −1.

        >>> clinic, laboratory = Holder(["ann", "bob"], "clinic"), Holder(["cem", "bob", "ann"], "laboratory")
        >>> clinic.digest(torch.tensor([0, 1])) == laboratory.digest(torch.tensor([2, 1]))
        True
        >>> clinic.digest(torch.tensor([0, 1])) == laboratory.digest(torch.tensor([1, 2]))
        False
        """
        if bool((rows < 0).any()):
            missing = int((rows < 0).sum())
            raise ValueError(f"Expected rows that {self.name!r} has, but it lacks {missing}; require all members")
        words = [self.identifiers[row].encode() for row in rows.tolist()]
        return hashlib.sha256(b"".join(len(word).to_bytes(8, "big") + word for word in words)).digest()

    def following(self, leader: str) -> Half:
        """Run a member's half; return its rows in the common order.

        Args:
            leader: the name of the leader.
        """
        yield Send(leader, self.own_points(), rows=True)
        points = yield Receive(leader, _POINTS, rows=True, most=self.most)
        yield Send(leader, self.blind(points), rows=True)
        return self.rows((yield Receive(leader, _POSITIONS, rows=True, most=len(points.x))))

    def leading(self, members: Sequence[str], required: Iterable[str] | None = None) -> Half:
        """Run the leader's half; return its own rows in the common order.

        Rows are sorted by identifier, or shuffled where not all members are required.

        Args:
            members: their names.
            required: members without which a row is left out; all by default.

        Raises:
            ValueError: an unknown required member, or no row that all required ones have.

        >>> clinic, laboratory = Holder(["b", "c", "a"], "clinic"), Holder(["a", "d", "b"], "laboratory")
        >>> halves = {"clinic": clinic.leading(["laboratory"]), "laboratory": laboratory.following("clinic")}
        >>> rows, traffic = together(halves)
        >>> rows["clinic"], rows["laboratory"]  # of a and b, in the order of identifiers
        (tensor([2, 0]), tensor([0, 2]))
        """
        needed = list(members if required is None else required)
        for name in needed:
            if name not in members:
                raise ValueError(f"Expected required members among {sorted(members)}, but got {name!r}")
        mine = self.own_points()
        for name in members:
            yield Send(name, mine, rows=True)
        places = {}
        for name in members:
            theirs = yield Receive(name, _POINTS, rows=True, most=self.most)
            returned = yield Receive(name, _POINTS, rows=True, most=len(mine.x))
            places[name] = self.places(name, theirs, returned)
        shared = torch.ones(len(self.order), dtype=torch.bool)
        for name in needed:
            shared &= places[name] >= 0
        if not bool(shared.any()):
            raise ValueError(
                f"Expected rows that {self.name!r} and {needed} share, but got none; are identifiers alike?"
            )
        order = sorted(shared.nonzero()[:, 0].tolist(), key=lambda row: self.identifiers[row])
        if set(needed) < set(members):
            secrets.SystemRandom().shuffle(order)
        for name in members:
            yield Send(name, Positions(places[name][order]), rows=True)
        return torch.tensor(order)

    def _times(self, point: ec.EllipticCurvePublicKey) -> bytes:
        return self._secret.exchange(ec.ECDH(), point)


def intersect(
    identifiers: Mapping[str, Sequence[str]], leader: str, required: Iterable[str] | None = None
) -> Intersection:
    """Align all parties in one process.

    Args:
        identifiers: of every party, by name.
        leader: the name of the leader; the common order is that of its identifiers.
        required: members without which a row is left out; all by default.

    Raises:
        ValueError: an unknown leader or member, an identifier that comes twice, or no common row.
    """
    if leader not in identifiers:
        raise ValueError(f"Expected a leader among {list(identifiers)}, but got {leader!r}")
    members = [name for name in identifiers if name != leader]
    leads = Holder(identifiers[leader], leader)
    halves = {leader: leads.leading(members, required)}
    halves |= {name: Holder(identifiers[name], name).following(leader) for name in members}
    rows, traffic = together(halves)
    shared = [leads.identifiers[row] for row in rows[leader].tolist()]
    order = sorted(range(len(shared)), key=shared.__getitem__)
    return Intersection(tuple(rows[name][order] for name in identifiers), sum(traffic))


def _normalised(identifiers: Sequence[str], name: str) -> list[str]:
    """Return identifiers in Unicode's normal form C.

    Raises:
        TypeError: not strings.
        ValueError: not distinct, or no Unicode text.
    """
    seen: dict[str, int] = {}
    for row, identifier in enumerate(identifiers):
        if not isinstance(identifier, str):
            raise TypeError(
                f"Expected strings as identifiers of {name!r}, but got {type(identifier).__name__} in row {row}"
            )
        identifier = unicodedata.normalize("NFC", identifier)
        if any("\ud800" <= letter <= "\udfff" for letter in identifier):
            raise ValueError(
                f"Expected Unicode text as identifiers of {name!r}, but got half a surrogate pair in row {row}; read "
                "the file in its own encoding"
            )
        if identifier in seen:
            raise ValueError(
                f"Expected distinct identifiers at {name!r}, but rows {seen[identifier]} and {row} have the same; "
                "merge them, or keep the first with `Party.distinct`"
            )
        seen[identifier] = row
    return list(seen)


def _hash_to_point(identifier: str) -> ec.EllipticCurvePublicKey:
    """Return the x-coordinate of an identifier's point: the first of its hashes that is one of a point."""
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
    joined = bytearray().join(points)
    return torch.frombuffer(joined, dtype=torch.uint8).reshape(-1, _BYTES) if joined else _POINTS.x.clone()


def _each(points: Points) -> Iterator[bytes]:
    """Return the items one after the other."""
    joined = points.x.numpy().tobytes()
    return (joined[place : place + _BYTES] for place in range(0, len(joined), _BYTES))
