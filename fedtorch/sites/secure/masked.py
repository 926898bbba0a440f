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

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedtorch import tree
from fedtorch.data import BadClients
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import adds_up
from fedtorch.federation.exchanges.exchange import Mean, RowsOf, Sum
from fedtorch.federation.exchanges.messages import as_aggregate, as_sums, in_order, kept, like, rows
from fedtorch.random.entropy import Entropy, Purpose, from_system
from fedtorch.sites.secure.grid import ExactSums, Grid, digits_of
from fedtorch.sites.secure.messages import Session
from fedtorch.sites.secure.neighbours import Adversary, Neighbourhoods, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server
from fedtorch.sites.secure.simulation import secure_sum
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
_BEYOND = "make weights smaller (weight=), clip, or declare a larger bound: Grid(bits=…, bound=…)"
_UNFIT = "take smaller steps or another start, or leave out clients whose rows are at fault"
_FEW = 65  # sites that can all mask with one another
_SECRECY = 80  # bits, where neighbours are drawn, of which 40 are left to a server whose sites try 2⁴⁰ keys


class Summand(NamedTuple):
    """The messages of a site's clients in a masked sum."""

    rows: RowsOf
    whole: bool  # whether each client has a message and all its numbers are finite
    largest: float  # largest magnitude that the server sent to these clients


class Parties(NamedTuple):
    """Names who adds up under masks."""

    run: bytes
    attempt: int  # no other sum of the run has the same
    keys: dict[int, bytes]  # by party, from 1 on, the Ed25519 key with which it signs


@dataclass(frozen=True)
class Masked:
    """Carries messages in sums under masks; see `masked`.

    Over sites each masks the sum of its own clients. Up to 65 sites mask with all others, so that the server learns the
    sum of the sites that were confirmed or nothing; of more, each has neighbours that are drawn. `dropouts` and
    `corrupt` are parts of the sites with which a sum begins, or numbers of them. A server may begin a sum with fewer
    sites than there are, and they with as many corrupt ones: where that is to be kept out, `corrupt` is a number.

    Example:
        >>> from fedtorch.trust import secure
        >>> carry = masked(minimum=4, corrupt=1, dropouts=1)
        >>> carry.check(clients=100, sites=5)
        >>> carry.check(clients=100, sites=4)
        Traceback (most recent call last):
        ...
        ValueError: Expected 4 clients that an active server cannot outwit, with corrupt=1 (1 of them) and ...
    """

    grid: Grid | ExactSums = Grid()  # noqa: RUF009
    minimum: int = 3  # clients of a sum; over sites, sites, and at least 3
    entropy: Entropy = field(default_factory=from_system, repr=False, compare=False)
    apart: int = 1
    adversary: Adversary = "active"  # the server that single messages are hidden from
    dropouts: float = 0.3  # the part that may drop out of a sum
    corrupt: float = 0.1  # the part that may work with the server
    network: None = field(default=None, repr=False)
    _earlier: list[list[int]] = field(default_factory=list, repr=False, compare=False)  # clients of sums made here
    _attempts: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    @property
    def masks(self) -> Masked:
        """Return itself, the masks under which sites add up."""
        return self

    @property
    def sites(self) -> int:
        """Return how many sites a sum has at least."""
        return max(self.minimum, 3)

    @property
    def step(self) -> float:
        """Return that of the grid."""
        return 2.0**-self.grid.bits

    def __str__(self) -> str:
        return (
            f"sums under masks on {self.grid}, of at least {self.sites} sites, hidden from a server that is "
            f"{self.adversary}, with dropouts={self.dropouts:g} and corrupt={self.corrupt:g}"
        )

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return `algorithm` whose messages are added up by the protocol.

        Raises:
            ValueError: its server needs something else than plain sums.
        """
        if not adds_up(algorithm.exchange):
            raise ValueError(
                "Expected an algorithm over a plain star for sums under masks, but got one that needs more than the "
                "sum of messages, or changes it (a robust rule, noise of the server, a graph, private rows): leave out "
                "what needs the messages that masks hide, or carry=; on a graph take secure.masked_graph in one "
                "process and sealed envelopes between sites"
            )
        return replace(algorithm, exchange=kept(algorithm.exchange, self._sum))

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError for clients whose sums do not fit the grid, or settings that are not for so many sites."""
        self.grid.check(clients)
        if sites is not None:
            self._near(sites)
        if self.apart > 1:
            raise ValueError(
                "Expected apart=1 over sites, whose sums differ by the clients that each has asked, but got "
                f"{self.apart}; ask all clients in every round instead"
            )

    def server(self, parties: Parties, message: Tree) -> Server:
        """Return the server's side of a sum of messages like `message` `(0, ...)`."""
        return Server(self._session(parties, rows(tree.map(as_sums, message, is_leaf=(Mean, Sum)))))

    def aggregate(self, words: Tensor, message: Tree, clients: int) -> Tree:
        """Return what the exchange makes of the sum of words of messages like `message` `(0, ...)`.

        Args:
            words: the sum of what `party` has.
            message: of the algorithm.
            clients: of the sum, at most.

        Raises:
            RuntimeError: a client had no message, or they add up to more than the grid has.
        """
        check, sums = words.split([self.grid.width, len(words) - self.grid.width])
        numbers = self.grid.decode(sums)
        if bool(check.any()):
            raise RuntimeError(
                "Expected a message of finite numbers of every client of a sum under masks, but some had none, and the "
                f"sum is chance; the log of its site says whose it was; {_UNFIT}"
            )
        if not self.grid.within(numbers, clients):
            raise RuntimeError(
                f"Expected a sum under masks of numbers on {self.grid}, but got one beyond what {clients} clients "
                f"have there at most; the log of a site says whose numbers are larger; {_BEYOND}, or take smaller steps"
            )
        summed = tree.map(as_sums, message, is_leaf=(Mean, Sum))
        one = tree.map(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), summed)
        return tree.map(as_aggregate, like(numbers, one), is_leaf=(Mean, Sum))

    def party(self, parties: Parties, number: int, signing: bytes, summand: Summand) -> Client:
        """Return a site's part, whose secrets are of the operating system and of this sum alone.

        It answers whatever its clients' numbers are, as that would be told by a refusal. Numbers beyond the grid add up
        modulo 2⁶⁴. Where a message is missing or not finite, all words are chance, which an own number of the sum says,
        and the server learns that it was so at some site.
        """
        summed = tree.map(as_sums, summand.rows.message, is_leaf=(Mean, Sum))
        values, width = rows(summed).cpu(), self.grid.width
        weigh = lambda node: node._replace(weight=node.weight.double()) if isinstance(node, Mean) else node
        exactly_weighed = tree.map(weigh, summand.rows.message, is_leaf=(Mean, Sum))
        session, entropy = self._session(parties, values), from_system()
        drawn = entropy.words(Purpose(parties.run, 0, parties.attempt, f"digits of {number}", b""), session.size)
        check, draws = drawn.split([width, session.size - width])
        if summand.whole and self.grid.has(values):
            check, draws = (
                torch.zeros_like(check),
                self.grid.total(values, draws, summand.largest, digits_of(exactly_weighed)),
            )
            if beyond := _beyond(self.grid, summand.rows.ids, summed):
                _LOG.warning("the sum under masks may be lost: client %d: %s", int(beyond.ids[0]), beyond.message)
        key = Ed25519PrivateKey.from_private_bytes(signing)
        return Client(session, number, key, entropy, torch.cat([check, draws]))

    def _session(self, parties: Parties, values: Tensor) -> Session:
        """Return what the sites of a sum of numbers like `values` `(K, D)` and the server agree on."""
        size = self.grid.width + len(self.grid.encode(values[:0].new_zeros(1, values.shape[1]))[0])
        return Session(
            parties.run, 0, parties.attempt, parties.keys, size, self._near(len(parties.keys)), self.sites,
            self.grid.width, adversary=self.adversary,
        )  # fmt: skip

    def _near(self, sites: int) -> Neighbourhoods:
        return neighbourhoods(
            sites, self.corrupt, self.dropouts, _SECRECY, adversary=self.adversary, minimum=self.sites,
            everybody=sites <= _FEW,
        )  # fmt: skip

    def _sum(self, found: RowsOf) -> Tree:
        """Return the aggregate of a round in this process, whose clients are added to those of earlier sums."""
        ids, messages = in_order(found)
        summed = tree.map(as_sums, messages, is_leaf=(Mean, Sum))
        if beyond := _beyond(self.grid, ids, summed):
            raise BadClients(*beyond)
        made = secure_sum(
            rows(summed).cpu(), self.grid, minimum=self.minimum, attempt=next(self._attempts), clients=ids.tolist(),
            apart=self.apart, earlier=self._earlier, entropy=self.entropy, adversary=self.adversary,
            dropouts=self.dropouts, corrupt=self.corrupt,
        )  # fmt: skip
        self._earlier.append(ids.tolist())
        one = tree.take(summed, slice(0, 1))
        total = tree.map(lambda part, leaf: part.to(leaf.device), like(made.total, summed), one)
        return tree.map(as_aggregate, total, is_leaf=(Mean, Sum))


class _Beyond(NamedTuple):
    """Names clients with a number beyond the grid's bound."""

    ids: Tensor
    message: str


def _beyond(grid: Grid | ExactSums, ids: Tensor, summed: Tree) -> _Beyond | None:
    """Return which clients have a number beyond the grid's bound in what is added up; None where none has."""
    if isinstance(grid, Grid):
        for field, leaf in tree.items(tree.as_real(summed)):
            sizes = leaf.abs().reshape(len(leaf), math.prod(leaf.shape[1:]))
            beyond = ~(sizes <= grid.bound).all(1).cpu()
            if bool(beyond.any()):
                worst = float(sizes[beyond.to(sizes.device)][0].max())
                return _Beyond(
                    ids[beyond],
                    f"expected numbers of at most {grid.bound} in size for the grid of sums under masks, but got "
                    f"{worst} in {field!r}; {_BEYOND}",
                )
    return None


def masked(
    grid: Grid | ExactSums = Grid(),  # noqa: B008
    minimum: int = 3,
    entropy: Entropy | None = None,
    apart: int = 1,
    *,
    adversary: Adversary = "active",
    dropouts: float = 0.3,
    corrupt: float = 0.1,
) -> Masked:
    """Return the carrying of messages over a star whose server sees a round's sums only, on the grid.

    `Mean`s travel as weight times value, beside the weights. The cohort that answered is summed as a whole, by the
    protocol, so that blocks and their order change no bit; with `minimum` clients or more, or not at all. That holds
    for totals too, of which the changes of a round's cohort are summed. No message can be looked at: medians, bounds on
    norms and checks for NaN cannot act, and what a client adds it has to clip itself.

    With `ft.Remote(…, carry=masked(…))` each site masks the sum of its own clients, if its policy asks for the same.
    With `ft.InProcess(…, carry=masked(…))` all parties are one process, which shows sums and costs and protects nobody.

    Args:
        grid: of fixed-point numbers; `ExactSums()` for `ft.gibbs`.
        minimum: clients of a sum; over sites, sites.
        entropy: of all secrets; default: the operating system's. Sites always take their own.
        apart: clients of every combination of a round's sum with those of earlier rounds, at least, unless one was of
            the same clients. Where clients tell nearly the same in every round, one sum less another is that of the
            clients by which they differ: `apart=minimum` rules that out, also for three sums and more, and ends a run
            in which a single client drops out.
        adversary: the server that single messages are hidden from: `"active"`, which may tell every client another
            story, or `"curious"`, which keeps to the protocol and is content with fewer neighbours and a lower
            threshold; part of what all parties agree on, and of a run's settings in reports and records.
        dropouts: the part of a round's clients that may drop out of its sum, or from 1 on how many. From seven clients
            on, and of four, an active server leaves room for 0.3; where it does not, the round says so. With 0 all
            have to stay.
        corrupt: the part of a round's clients that may work with the server, or from 1 on how many.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import secure
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
        >>> ways = (masked(dropouts=0.2), ft.sites.plain())
        >>> one, two = (ft.run(algorithm, ft.InProcess(data, carry=carry), rounds=1).server for carry in ways)
        >>> torch.allclose(one["bias"], two["bias"], atol=1e-3)
        True
    """
    entropy = from_system() if entropy is None else entropy
    return Masked(grid, minimum, entropy, apart, adversary, dropouts, corrupt)
