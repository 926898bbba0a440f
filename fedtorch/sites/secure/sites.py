"""Secure sums between organisations: each site masks the sum of its own clients, and the server learns that of all.

A site knows its clients' rows, so that nothing has to be hidden from it: it puts every client's numbers on the grid,
adds up the words, and takes part in the protocol of `parties` as one client. The total is that of `secure_sum` over
all clients, to the bit. What is hidden from the server is a site's part, among those of `minimum` sites; of single
clients it learns that they have answered.

A site takes part in sums over one start with the same sites only, whatever the round, the run or the keys; see
`fedtorch.sites.rounds.past_sums`. Where starts hardly differ and messages hardly change, two sums with and without
a site say nearly what it said, and noise only keeps that back, such as that of `privacy.local_level(..., quorum=q)`.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Mean, RowsOf, Sum
from fedtorch.federation.exchanges.masks import Parties
from fedtorch.federation.exchanges.messages import as_aggregate, as_sums, like, rows
from fedtorch.random.entropy import from_system
from fedtorch.sites.secure import ring
from fedtorch.sites.secure.grid import ExactSums, Grid
from fedtorch.sites.secure.messages import PHASES, Aborted, Session
from fedtorch.sites.secure.neighbours import Adversary, Neighbourhoods, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server
from fedtorch.tree import Tree

_FEW = 65  # sites that can all mask with one another
_SECRECY = 80  # bits, where neighbours are drawn, of which 40 are left to a server whose sites try 2⁴⁰ keys


class SiteMasks(NamedTuple):
    """What a secure exchange brings to sites; see `fedtorch.federation.exchanges.masks.Masks`, and `SiteSums`.

    Up to 65 sites mask with all others, so that the server learns the sum of the sites that were confirmed or nothing;
    of more, each has neighbours that are drawn. `dropouts` and `corrupt` are parts of the sites with which a sum
    begins, or numbers of them. A server may begin a sum with fewer sites than there are, and they with as many corrupt
    ones: where that is to be kept out, `corrupt` is a number.

    Example:
        >>> from fedtorch.trust import secure
        >>> masks = secure.secure_star(minimum=4, corrupt=1, dropouts=1).masks
        >>> masks.check(clients=100, parties=5)
        >>> masks.check(clients=100, parties=4)
        Traceback (most recent call last):
        ...
        ValueError: Expected 4 clients that an active server cannot outwit, with corrupt=1 (1 of them) and ...
    """

    grid: Grid | ExactSums
    minimum: int  # sites of a sum, at least 3
    apart: int
    adversary: Adversary = "active"  # the server that sites' sums are hidden from
    dropouts: float = 0.3  # the part of the sites that may drop out of a sum
    corrupt: float = 0.1  # the part that may work with the server
    phases: tuple[int, ...] = tuple(PHASES)

    @property
    def step(self) -> float:
        """The grid's."""
        return 2.0**-self.grid.bits

    def __str__(self) -> str:
        return (
            f"sums under masks on {self.grid}, of at least {self.minimum} sites, hidden from a server that is "
            f"{self.adversary}, with dropouts={self.dropouts:g} and corrupt={self.corrupt:g}"
        )

    def check(self, clients: int, parties: int | None = None) -> None:
        """Raise ValueError for clients whose sums do not fit the grid, or settings that are not for so many sites."""
        self.grid.check(clients)
        if parties is not None:
            self._near(parties)
        if self.apart > 1:
            raise ValueError(
                "Expected apart=1 over sites, whose sums differ by the clients that each has asked, but got "
                f"{self.apart}; ask all clients in every round instead"
            )

    def server(self, parties: Parties, message: Tree) -> SiteSums:
        """A sum of messages like `message` `(0, ...)`."""
        summed = tree.map(as_sums, message, is_leaf=(Mean, Sum))
        return SiteSums(self._session(parties, self.grid.encode(rows(summed))), self.grid, summed)

    def party(self, parties: Parties, number: int, signing: bytes, found: RowsOf) -> Client:
        """A site's part, whose secrets are of the operating system and of this sum alone."""
        words = self.grid.encode(rows(tree.map(as_sums, found.message, is_leaf=(Mean, Sum))).cpu())
        total = reduce(lambda one, other: ring.add(one, other, self.grid.width), words, torch.zeros_like(words[0]))
        key = Ed25519PrivateKey.from_private_bytes(signing)
        return Client(self._session(parties, words), number, key, from_system(), total)

    def _session(self, parties: Parties, words: Tensor) -> Session:
        """What the sites of a sum and the server agree on."""
        return Session(
            parties.run, 0, parties.attempt, parties.keys, words.shape[1], self._near(len(parties.keys)), self.minimum,
            self.grid.width, adversary=self.adversary,
        )  # fmt: skip

    def _near(self, sites: int) -> Neighbourhoods:
        return neighbourhoods(
            sites, self.corrupt, self.dropouts, _SECRECY, adversary=self.adversary, minimum=self.minimum,
            everybody=sites <= _FEW,
        )  # fmt: skip


class SiteSums(Server):
    """The server's side of a sum of sites, which `SiteMasks.server` makes.

    Args:
        session: what was agreed.
        grid: of the numbers.
        summed: what is added up, of no clients.

    Example:
        >>> import torch, fedtorch as ft
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> from fedtorch.federation.exchanges.exchange import RowsOf
        >>> from fedtorch.federation.exchanges.masks import Parties
        >>> from fedtorch.trust import secure
        >>> masks = SiteMasks(secure.Grid(), minimum=3, apart=1, dropouts=0)  # of `secure_star(dropouts=0)`
        >>> secrets = {site: bytes([site]) * 32 for site in (1, 2, 3)}
        >>> signing = {site: Ed25519PrivateKey.from_private_bytes(secret) for site, secret in secrets.items()}
        >>> agreed = Parties(b"run", 0, {site: key.public_key().public_bytes_raw() for site, key in signing.items()})
        >>> message = ft.Mean(torch.tensor([[3.0], [5.0]]), torch.ones(2))  # of two clients of every site
        >>> sites = {k: masks.party(agreed, k, secrets[k], RowsOf(torch.arange(2), message)) for k in secrets}
        >>> server = masks.server(agreed, ft.Mean(torch.zeros(0, 1), torch.zeros(0)))
        >>> for phase in masks.phases:
        ...     for site, part in sites.items():
        ...         assert server.take(phase, part.answer(phase, server.request(phase, site)))
        >>> server.aggregate()
        Mean(value=tensor([4.], dtype=torch.float64), weight=tensor(6., dtype=torch.float64))
    """

    def __init__(self, session: Session, grid: Grid | ExactSums, summed: Tree) -> None:
        super().__init__(session)
        self._grid, self._summed = grid, summed

    def aggregate(self) -> Tree:
        """The aggregate of the survivors' clients; raises `Aborted` where there is none."""
        one = tree.map(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), self._summed)
        return tree.map(as_aggregate, like(self._grid.decode(self.total()), one), is_leaf=(Mean, Sum))


class HereOnly(NamedTuple):
    """In the place of masks where there is no protocol between organisations: it is refused there.

    Example:
        >>> HereOnly("one that runs in one process").check(clients=3)
        Traceback (most recent call last):
        ...
        ValueError: Expected an exchange that sites can keep among them, but got one that runs in one process
    """

    why: str
    phases: tuple[int, ...] = ()
    minimum: int = 0
    step: float = 0.0

    def __str__(self) -> str:
        return self.why

    def check(self, clients: int, parties: int | None = None) -> None:
        """Raise ValueError."""
        raise ValueError(f"Expected an exchange that sites can keep among them, but got {self.why}")

    def server(self, parties: Parties, message: Tree) -> SiteSums:
        """There is none."""
        raise Aborted(self.why)

    def party(self, parties: Parties, number: int, signing: bytes, found: RowsOf) -> Client:
        """There is none."""
        raise Aborted(self.why)
