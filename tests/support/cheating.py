"""A server that cheats in secure sums, with clients that work with it, and what it can compute from all it has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedtorch.random.entropy import expanded
from fedtorch.sites.secure import shamir
from fedtorch.sites.secure._both_sides import commitment, exchanged, pair_mask
from fedtorch.sites.secure.messages import (
    ADVERT,
    ENVELOPE,
    KEYS,
    MASKED,
    PHASES,
    REVEAL,
    SHARE,
    SHARES,
    Aborted,
    Session,
    body_of,
    listed,
    records,
    split_words,
)
from fedtorch.sites.secure.neighbours import Neighbourhoods, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server
from fedtorch.trust import privacy

SIZE = 2
Agreed = tuple[Session, dict[int, Ed25519PrivateKey]]
Payload = Callable[[int, int, bytes], bytes]  # (phase, client, what its view's server would send) -> what it is sent


def session(
    n: int, graph: Neighbourhoods | None = None, **more: object
) -> tuple[Session, dict[int, Ed25519PrivateKey]]:
    """A session of clients 1 to n, and the keys with which they sign."""
    signing = {k: Ed25519PrivateKey.from_private_bytes(k.to_bytes(32, "big")) for k in range(1, n + 1)}
    public = {k: key.public_key().public_bytes_raw() for k, key in signing.items()}
    settings = {"run": b"run", "round": 0, "attempt": 0, "minimum": 3, **more}
    near = neighbourhoods(n) if graph is None else graph
    return Session(keys=public, size=SIZE, graph=near, **settings), signing  # type: ignore[arg-type]


class Cheated:
    """Honest clients, a copy of each corrupt one for every view, and a server for each view of what has been said.

    Args:
        agreed: what was agreed, and who signs with which key.
        corrupt: the clients that work with the server; their copies have the same secrets.
        views: how many stories are told.
    """

    def __init__(self, agreed: Agreed, corrupt: Collection[int] = (), views: int = 1) -> None:
        self.session, self.signing = agreed
        self.corrupt, self.views = frozenset(corrupt), [Server(self.session) for _ in range(views)]
        make = lambda k: Client(self.session, k, self.signing[k], privacy.from_seed(k), self.words(k))
        self.honest = {k: make(k) for k in self.session.keys if k not in self.corrupt}
        self.copies = [{k: make(k) for k in self.corrupt} for _ in self.views]
        self.said: dict[int, dict[int, bytes]] = {phase: {} for phase in PHASES}  # by honest clients
        self.ended: dict[int, Exception] = {}  # honest clients that go no further, and why

    def words(self, k: int) -> Tensor:
        """What a client adds."""
        return torch.tensor([k * 1000 + place for place in range(SIZE)], dtype=torch.int64)

    def order(self) -> list[int]:
        """All clients in the order of the circle, as the first view has it."""
        adverts = [body_of(message) for _, message in sorted(self.views[0].messages[ADVERT].items())]
        seed = hashlib.sha256(self.session.digest() + b"".join(adverts)).digest()
        return sorted(self.session.keys, key=lambda k: hashlib.sha256(seed + k.to_bytes(8, "big")).digest())

    def phase(
        self,
        phase: int,
        view: Callable[[int], int] = lambda k: 0,
        hidden: Collection[tuple[int, int]] = (),
        payload: Payload = lambda phase, k, data: data,
    ) -> None:
        """Asks honest clients as their view has it; of what they say, (view, client) in `hidden` does not get there."""
        requests = [
            {k: self._request(server, phase, k) for k in self.session.keys} for server in self.views
        ]  # before anybody answers, as between processes
        for k, one in self.honest.items():
            data = requests[view(k)][k]
            if k in self.ended or data is None:
                continue
            try:
                message = one.answer(phase, payload(phase, k, data))
            except (Aborted, ValueError) as error:
                self.ended[k] = error
                continue
            self.said[phase][k] = message
            for number, server in enumerate(self.views):
                if (number, k) not in hidden:
                    server.take(phase, message)
        for number, (server, copies) in enumerate(zip(self.views, self.copies)):
            for k, one in copies.items():
                if requests[number][k] is not None and (number, k) not in hidden:
                    try:
                        server.take(phase, one.answer(phase, requests[number][k]))
                    except (Aborted, ValueError):
                        continue

    def _request(self, server: Server, phase: int, k: int) -> bytes | None:
        try:
            return server.request(phase, k)
        except (Aborted, KeyError):  # it has no story for this client
            return None

    def learnt(self) -> list[frozenset[int]]:
        """The sets of honest clients whose sums can be computed; each is computed, and compared with what it is of."""
        return Adversary(self).sums()


class Adversary:
    """All that a server and its clients have: every message, and what those clients can open.

    Args:
        made: what has been done.
    """

    def __init__(self, made: Cheated) -> None:
        self.made, self.session, self.digest = made, made.session, made.session.digest()
        self.adverts = {k: KEYS.unpack(body_of(message)) for k, message in made.said[ADVERT].items()}
        self.shares: dict[tuple[int, bool], dict[int, int]] = {}
        for holder, message in made.said[REVEAL].items():
            for owner, own, share in records(body_of(message), SHARE):
                self._hold(int(owner), bool(own), holder, bytes(share))
        for dealer, message in made.said[SHARES].items():
            for to, sealed, *commitments in records(body_of(message), ENVELOPE):
                for copy in (copies[int(to)] for copies in made.copies if to in copies):
                    self._open(copy, dealer, bytes(sealed), [bytes(each) for each in commitments])
        self.keys = {k: one._mask_key for copies in made.copies for k, one in copies.items()}
        self.own: dict[int, bytes] = {}
        for k, (public, _, committed) in self.adverts.items():
            if (secret := self._secret(k, True)) is not None and commitment(secret) == committed:
                self.own[k] = secret
            if (secret := self._secret(k, False)) is not None:
                key = X25519PrivateKey.from_private_bytes(secret)
                if key.public_key().public_bytes_raw() == public:
                    self.keys[k] = key

    def _hold(self, owner: int, own: bool, holder: int, share: bytes) -> None:
        self.shares.setdefault((owner, own), {})[holder] = int.from_bytes(share, "big")

    def _open(self, copy: Client, dealer: int, sealed: bytes, commitments: list[bytes]) -> None:
        shared = exchanged(copy._envelope_key, self.adverts[dealer][1])
        copy._shared.setdefault(dealer, (shared or b"", b""))
        both = copy._open(dealer, sealed, commitments)
        for own, share in zip((True, False), both or ()):
            self._hold(dealer, own, copy.number, share)

    def _secret(self, k: int, own: bool) -> bytes | None:
        shares = self.shares.get((k, own), {})
        try:
            few = dict(sorted(shares.items())[: self.session.graph.threshold])
            return shamir.combine(few) if len(few) == self.session.graph.threshold else None
        except ValueError:
            return None

    def sums(self) -> list[frozenset[int]]:
        """The sums that come out when all masks that are known are taken away, and the others cancel."""
        left: dict[int, Tensor] = {}
        unknown: dict[int, set[int]] = {}
        for k, message in self.made.said[MASKED].items():
            head, words = split_words(self.session, message)
            rest = torch.frombuffer(bytearray(words), dtype=torch.int64).clone()
            unknown[k] = set()
            for other in listed(self.session, body_of(head)):
                shared = self._shared(k, other)
                if shared is None:
                    unknown[k].add(other)
                else:
                    rest -= pair_mask(self.session, self.digest, shared, k, other)
            left[k] = rest - expanded(self.own[k], SIZE) if k in self.own else rest
        alive, before = {k for k in unknown if k in self.own}, set[int]()
        while alive != before:  # a mask that nobody else has in it as well, who may come along, stays
            before = alive
            alive = {k for k in before if all(j in before and k in unknown[j] for j in unknown[k])}
        found = []
        for group in _groups({k: unknown[k] for k in alive}):
            total = torch.stack([left[k] for k in group]).sum(0)
            assert torch.equal(total, torch.stack([self.made.words(k) for k in group]).sum(0))
            found.append(frozenset(group))
        return found

    def _shared(self, k: int, other: int) -> bytes | None:
        for one, two in ((k, other), (other, k)):
            if one in self.keys and two in self.adverts:
                return exchanged(self.keys[one], self.adverts[two][0])
        return None


def _groups(near: dict[int, set[int]]) -> Iterable[set[int]]:
    """Connected parts of a graph."""
    rest = set(near)
    while rest:
        group, edge = set[int](), {min(rest)}
        while edge:
            group |= edge
            edge = set[int]().union(*(near[k] for k in edge)) - group
        rest -= group
        yield group


def split(made: Cheated, victim: int, part: float = 0.5) -> Callable[[int], int]:
    """Which story honest clients are told: on the circle, the part that begins with the victim the first."""
    order = [k for k in made.order() if k not in made.corrupt]
    order = order[order.index(victim) :] + order[: order.index(victim)]
    count = max(1, round(part * len(order)))
    first = {*order[:count]}
    return lambda k: 0 if k in first else 1
