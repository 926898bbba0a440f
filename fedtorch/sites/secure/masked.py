"""Secure sums between organisations: each site masks the sum of its own clients, and the server learns the total.

A site knows its clients' rows, so nothing has to be hidden from it: it puts every client's numbers on the grid, adds up
the words, and takes part in the protocol of `parties` as one client. The total equals that of `secure_sum` over all
clients, to the bit. A site's part is hidden from the server among those of at least `minimum` sites; of single clients
the server learns only that they have answered.

A site takes part in sums over one start only with the same sites, in any round, run or keys; see
`fedtorch.sites.rounds.past_sums`. If starts hardly differ and messages hardly change, two sums with and without a site
nearly disclose its message. Only noise prevents that, such as that of `privacy.local_level(..., quorum=q)`.
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
_UNFIT = "take smaller steps or another start, or leave out clients whose rows cause it"
_FEW = 65  # most sites that all mask with one another
_SECRECY = 80  # bits with drawn neighbours, of which 40 remain against a server whose sites try 2⁴⁰ keys


class Summand(NamedTuple):
    """The messages of a site's clients in a masked sum."""

    rows: RowsOf
    whole: bool  # whether each client has a message and all its numbers are finite
    largest: float  # largest magnitude that the server sent to these clients


class Parties(NamedTuple):
    """The parties of a masked sum."""

    run: bytes
    attempt: int  # unique within the run
    keys: dict[int, bytes]  # public Ed25519 key by party, from 1 on


@dataclass(frozen=True)
class Masked:
    """A transport of messages in masked sums; see `masked`.

    Over sites, each masks the sum of its own clients. Up to 65 sites mask with all others, so that the server learns
    the sum of the confirmed sites or nothing; with more sites, each masks with drawn neighbours. `dropouts` and
    `corrupt` are fractions, or numbers, of the sites with which a sum begins. A server may begin a sum with fewer sites
    but as many corrupt ones: to exclude that, give `corrupt` as a number.

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
    minimum: int = 3  # least clients of a sum; over sites, least sites, and at least 3
    entropy: Entropy = field(default_factory=from_system, repr=False, compare=False)
    apart: int = 1
    adversary: Adversary = "active"  # kind of server from which single messages are hidden
    dropouts: float = 0.3  # fraction that may drop out of a sum
    corrupt: float = 0.1  # fraction that may work with the server
    network: None = field(default=None, repr=False)
    _earlier: list[list[int]] = field(default_factory=list, repr=False, compare=False)  # clients of earlier sums here
    _attempts: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    @property
    def masks(self) -> Masked:
        """Return itself, the masks under which sites add up."""
        return self

    @property
    def sites(self) -> int:
        """Return the least number of sites in a sum."""
        return max(self.minimum, 3)

    @property
    def step(self) -> float:
        """Return the step of the grid."""
        return 2.0**-self.grid.bits

    def __str__(self) -> str:
        return (
            f"sums under masks on {self.grid}, of at least {self.sites} sites, hidden from a server that is "
            f"{self.adversary}, with dropouts={self.dropouts:g} and corrupt={self.corrupt:g}"
        )

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return `algorithm` with messages that are added up by the protocol.

        Raises:
            ValueError: its server needs more than plain sums.
        """
        if not adds_up(algorithm.exchange):
            raise ValueError(
                "Expected an algorithm over a plain star for sums under masks, but got one that needs more than the "
                "sum of messages, or changes it (a robust rule, noise of the server, a graph, private rows): leave out "
                "either what needs single messages, or carry=; on a graph use secure.masked_graph in one process and "
                "sealed envelopes between sites"
            )
        return replace(algorithm, exchange=kept(algorithm.exchange, self._sum))

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError if sums of these clients do not fit the grid, or settings do not suit so many sites."""
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
        """Return the aggregate of a sum of words, of messages like `message` `(0, ...)`.

        Args:
            words: the sum over parties of their words, see `party`.
            message: structure of the algorithm's messages.
            clients: most clients in the sum.

        Raises:
            RuntimeError: a client had no message, or the sum is beyond the grid.
        """
        check, sums = words.split([self.grid.width, len(words) - self.grid.width])
        numbers = self.grid.decode(sums)
        if bool(check.any()):
            raise RuntimeError(
                "Expected a message of finite numbers of every client of a sum under masks, but some had none, and the "
                f"sum is random; the log of its site says which client it was; {_UNFIT}"
            )
        if not self.grid.within(numbers, clients):
            raise RuntimeError(
                f"Expected a sum under masks of numbers on {self.grid}, but got one beyond the largest of {clients} "
                f"clients; the log of a site says whose numbers are larger; {_BEYOND}, or take smaller steps"
            )
        summed = tree.map(as_sums, message, is_leaf=(Mean, Sum))
        one = tree.map(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), summed)
        return tree.map(as_aggregate, like(numbers, one), is_leaf=(Mean, Sum))

    def party(self, parties: Parties, number: int, signing: bytes, summand: Summand) -> Client:
        """Return a site's part, whose secrets come from the operating system and are used only in this sum.

        It answers for any numbers of its clients, because a refusal would disclose something about them. Numbers beyond
        the grid add up modulo 2⁶⁴. If a message is missing or not finite, all words are random. A check number in the
        sum then differs from zero, so that the server learns that this happened at some site.
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
        """Return the session of a sum of numbers like `values` `(K, D)`, on which sites and server agree."""
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

    def _sum(self, gathered: RowsOf) -> Tree:
        """Return the aggregate of a round in this process, and record its clients as an earlier sum."""
        ids, messages = in_order(gathered)
        summed = tree.map(as_sums, messages, is_leaf=(Mean, Sum))
        if beyond := _beyond(self.grid, ids, summed):
            raise BadClients(*beyond)
        result = secure_sum(
            rows(summed).cpu(), self.grid, minimum=self.minimum, attempt=next(self._attempts), clients=ids.tolist(),
            apart=self.apart, earlier=self._earlier, entropy=self.entropy, adversary=self.adversary,
            dropouts=self.dropouts, corrupt=self.corrupt,
        )  # fmt: skip
        self._earlier.append(ids.tolist())
        one = tree.take(summed, slice(0, 1))
        total = tree.map(lambda part, leaf: part.to(leaf.device), like(result.total, summed), one)
        return tree.map(as_aggregate, total, is_leaf=(Mean, Sum))


class _Beyond(NamedTuple):
    """Clients with a number beyond the grid's bound, and the error message."""

    ids: Tensor
    message: str


def _beyond(grid: Grid | ExactSums, ids: Tensor, summed: Tree) -> _Beyond | None:
    """Return the clients with a number beyond the grid's bound; None if there are none."""
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
    """Return a transport of messages over a star, by which the server sees only a round's sums, on the grid.

    A `Mean` is sent as weight times value, together with the weight. All clients that answered are summed at once by
    the protocol, so that blocks and their order change no bit; a cohort with fewer than `minimum` clients is not summed
    at all. The same holds for totals, whose changes of a round are summed. Single messages cannot be inspected, so
    medians, bounds on norms and checks for NaN cannot act, and a client has to clip its own message.

    With `ft.Remote(…, carry=masked(…))` each site masks the sum of its own clients, if its policy asks for the same.
    With `ft.InProcess(…, carry=masked(…))` all parties are one process, which shows sums and costs and protects nobody.

    Args:
        grid: grid of fixed-point numbers; `ExactSums()` for `ft.gibbs`.
        minimum: least clients of a sum; over sites, least sites.
        entropy: source of all secrets; default: the operating system's. Sites always use their own.
        apart: least clients in any combination of a round's sum with those of earlier rounds, unless one had the same
            clients. If clients send nearly the same in every round, the difference of two sums is that of the clients
            in only one of them: `apart=minimum` excludes that, for any number of sums, and ends a run in which a single
            client drops out.
        adversary: the kind of server from which single messages are hidden: `"active"`, which may send every client
            different messages, or `"curious"`, which follows the protocol, for which fewer neighbours and a lower
            threshold suffice; all parties agree on it, and a run's settings in reports and records contain it.
        dropouts: the fraction of a round's clients that may drop out of its sum; from 1 on, their number. Against an
            active server 0.3 is possible for four clients and from seven on; otherwise the round raises an error. With
            0 all have to stay.
        corrupt: the fraction of a round's clients that may work with the server; from 1 on, their number.

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
