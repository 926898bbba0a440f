"""The protocol of secure sums in one process, on stacked messages: every key, share, mask and signature of it.

It shows what the server sees and what it costs; it protects nobody, because all parties are one. `secure_sum` is one
sum, with dropouts in any phase, and `secure_star` an exchange whose rounds are such sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchange import Exchange, Mean, Sum, star
from fedtorch.tree import Tree
from fedtorch.trust.privacy.entropy import Entropy, Purpose, from_system
from fedtorch.trust.secure.grid import Grid
from fedtorch.trust.secure.messages import ADVERT, CONFIRM, MASKED, REVEAL, SHARES, Aborted, Session
from fedtorch.trust.secure.neighbours import Neighbourhoods, neighbourhoods
from fedtorch.trust.secure.parties import Client, Server

Tamper = Callable[[int, int, bytes], bytes | None]  # (phase, client, message) -> what arrives, None if nothing does


class SecureSum(NamedTuple):
    """What came out of a sum."""

    total: Tensor  # (D,) float64, exactly that of the survivors' numbers on the grid
    survivors: list[int]  # rows of those that are in it
    masked: Tensor  # (M, D) int64, all that the server has seen of the survivors' numbers
    sent: int  # bytes of all messages of clients
    seconds: float  # of clients' work, all together


def secure_sum(
    values: Tensor,
    grid: Grid = Grid(),  # noqa: B008
    *,
    minimum: int = 3,
    gone: Mapping[int, int] | None = None,
    graph: Neighbourhoods | None = None,
    tamper: Tamper | None = None,
    run: bytes = b"simulation",
    round: int = 0,
    attempt: int = 0,
    entropy: Entropy | None = None,
) -> SecureSum:
    """The sum of rows `(K, D)` by the whole protocol.

    Args:
        values: a client a row.
        grid: that all clients agree on.
        minimum: clients of a sum.
        gone: row -> the phase (1 to 5) before which a client drops out.
        graph: neighbours and threshold; default: by `neighbourhoods`.
        tamper: what the network does to messages.
        run: a name of the run.
        round: of the run.
        attempt: of the round; another one has other masks.
        entropy: of all secrets; default: the operating system's.

    Raises:
        Aborted: the sum cannot be recovered, or would be of fewer than `minimum` clients.
        ValueError: numbers off the grid's range, or too few clients.
    """
    clients, size = values.shape
    grid.check(clients)
    if clients < minimum:
        raise Aborted(f"Expected at least {minimum} clients for a sum, but got {clients}")
    words = grid.encode(values)
    entropy = from_system() if entropy is None else entropy
    keys = [
        Ed25519PrivateKey.from_private_bytes(entropy.key(Purpose(run, round, attempt, f"signature of {k}", b"")))
        for k in range(clients)
    ]
    public = {k + 1: key.public_key().public_bytes_raw() for k, key in enumerate(keys)}
    graph = neighbourhoods(clients) if graph is None else graph
    session = Session(run, round, attempt, public, size, graph, minimum)
    wire = _Wire(Server(session), {} if gone is None else gone, tamper)
    parties = {k + 1: Client(session, k + 1, key, entropy) for k, key in enumerate(keys)}
    server = wire.server
    wire.phase(ADVERT, list(parties), lambda k: parties[k].advertise())
    adverts = list(server.messages[ADVERT].values())
    wire.phase(SHARES, list(server.messages[ADVERT]), lambda k: parties[k].share(adverts))
    wire.phase(MASKED, list(server.messages[SHARES]), lambda k: parties[k].mask(words[k - 1], server.shares_for(k)))
    survivors = server.survivors
    wire.phase(CONFIRM, survivors, lambda k: parties[k].confirm(survivors))
    confirmations = list(server.messages[CONFIRM].values())
    wire.phase(REVEAL, list(server.messages[CONFIRM]), lambda k: parties[k].reveal(confirmations))
    total = grid.decode(server.total())
    seen = [torch.frombuffer(bytearray(server.messages[MASKED][k][9:-64]), dtype=torch.int64) for k in survivors]
    return SecureSum(total, [k - 1 for k in survivors], torch.stack(seen), wire.sent, wire.seconds)


class _Wire:
    """Carries messages to the server, as far as their clients are there."""

    def __init__(self, server: Server, gone: Mapping[int, int], tamper: Tamper | None) -> None:
        self.server, self._gone, self._tamper = server, gone, tamper
        self.sent, self.seconds = 0, 0.0

    def phase(self, phase: int, clients: Sequence[int], say: Callable[[int], bytes]) -> None:
        """Lets clients say what they have to, but for those that drop out before it."""
        for client in clients:
            if phase >= self._gone.get(client - 1, phase + 1):
                continue
            began = time.perf_counter()
            message: bytes | None = say(client)
            self.seconds += time.perf_counter() - began
            self.sent += len(message or b"")
            if self._tamper is not None and message is not None:
                message = self._tamper(phase, client, message)
            if message is not None:
                self.server.take(phase, message)


def secure_star(grid: Grid = Grid(), minimum: int = 3, entropy: Entropy | None = None) -> Exchange:  # noqa: B008
    """A star whose server sees a round's sums only, each number of them on the grid.

    `Mean`s travel as weight times value, beside the weights. The cohort that answered is summed as a whole, by the
    protocol, so that blocks and their order change no bit; with `minimum` clients or more, or not at all.

    Example:
        >>> import dataclasses, torch, fedtorch as ft
        >>> from fedtorch.trust import secure
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
        >>> plain = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
        >>> algorithm = dataclasses.replace(plain, exchange=secure.secure_star())
        >>> one, two = (ft.run(a, ft.InProcess(data), rounds=1).server for a in (plain, algorithm))
        >>> torch.allclose(one["bias"], two["bias"], atol=1e-3)
        True
    """
    attempts = iter(range(2**62))
    entropy = from_system() if entropy is None else entropy

    def finish(partial: Tree) -> Tree:
        summed = tree.map(_as_sums, partial, is_leaf=(Mean, Sum))
        leaves = tree.leaves(summed)
        rows = torch.cat([leaf.reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in leaves], 1).cpu()
        total = secure_sum(rows, grid, minimum=minimum, attempt=next(attempts), entropy=entropy).total
        parts = total.split([leaf[0].numel() for leaf in leaves])
        totals = [part.reshape(leaf.shape[1:]).to(leaf.device) for part, leaf in zip(parts, leaves)]
        return tree.map(_as_aggregate, tree.refill(summed, totals), is_leaf=(Mean, Sum))

    return star()._replace(gather=lambda messages, ids: messages, merge=tree.concatenate, finish=finish, additive=False)


def _as_sums(node: Mean | Sum) -> Mean | Sum:
    """What of a message is added up, float64."""
    wide: Tree = tree.to(node.value, torch.float64)
    if isinstance(node, Sum):
        return Sum(wide)
    weight = node.weight.to(torch.float64)
    return Mean(tree.scale(wide, weight), weight)


def _as_aggregate(node: Mean | Sum) -> Mean | Sum:
    if isinstance(node, Sum):
        return node
    weight = node.weight
    if not float(weight) > 0:
        raise ValueError(f"Expected a positive total weight of the clients that answered, but got {float(weight)}")
    return Mean(tree.scale(node.value, 1 / float(weight)), weight)
