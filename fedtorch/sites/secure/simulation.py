"""The protocol of secure sums in one process, on stacked messages, with all its keys, shares, masks and signatures.

It shows what the server sees and what the protocol costs; it protects nobody, because all parties are one process.
`secure_sum` is one sum, with dropouts in any phase; `masked` uses such sums for the rounds of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedtorch.protocol.halves import together
from fedtorch.random.entropy import Entropy, Purpose, from_system
from fedtorch.sites.secure.grid import ExactSums, Grid
from fedtorch.sites.secure.halves import client_half, server_half
from fedtorch.sites.secure.messages import MASKED, Aborted, Session, split_words
from fedtorch.sites.secure.neighbours import Adversary, Neighbourhoods, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server

Tamper = Callable[[int, int, bytes], bytes | None]  # (phase, client's number from 1, message) -> what arrives, or None


class SecureSum(NamedTuple):
    """The result of a secure sum.

    Example:
        >>> import torch
        >>> from fedtorch.trust import privacy, secure
        >>> values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
        >>> made = secure_sum(values, secure.Grid(bits=8), dropouts=0, entropy=privacy.from_seed(0))
        >>> made.total
        tensor([ 7., 70.], dtype=torch.float64)
        >>> made.masked.shape, bool((made.masked == secure.Grid(bits=8).encode(values)).any())
        (torch.Size([3, 2]), False)
        >>> made.sent // 3  # bytes of a client: 16 of words, the others of keys, shares and signatures
        1205
    """

    total: Tensor  # (D,) float64, the exact sum of the survivors' numbers on the grid
    survivors: list[int]  # rows of the clients in the sum
    masked: Tensor  # (M, D) int64, the survivors' masked numbers, as the server has seen them
    sent: int  # bytes of all clients' messages
    received: int  # bytes of all messages to clients
    seconds: float  # processor time of all clients together


def secure_sum(
    values: Tensor,
    grid: Grid | ExactSums = Grid(),  # noqa: B008
    *,
    minimum: int = 3,
    adversary: Adversary = "active",
    dropouts: float = 0.3,
    corrupt: float = 0.1,
    gone: Mapping[int, int] | None = None,
    graph: Neighbourhoods | None = None,
    tamper: Tamper | None = None,
    run: bytes = b"simulation",
    round: int = 0,
    attempt: int = 0,
    apart: int = 1,
    clients: Sequence[int] | None = None,
    earlier: Sequence[Sequence[int]] = (),
    entropy: Entropy | None = None,
) -> SecureSum:
    """Return the sum of rows `(K, D)` by the whole protocol.

    Args:
        values: one row for each client; with `ExactSums`, numbers in the limbs of `fedtorch.exact` side by side.
        grid: grid of all clients' numbers.
        minimum: least clients of a sum.
        adversary: kind of server from which single numbers are hidden, `"active"` or `"curious"`; see `neighbourhoods`.
        dropouts: fraction of the clients that may drop out; from 1 on, their number; with 0 all stay until the end.
        corrupt: fraction of the clients that may work with the server; from 1 on, their number.
        gone: row -> the phase (1 to 6) before which this client drops out.
        graph: neighbours and threshold; default: those of `neighbourhoods` for these dropouts and corrupt clients.
        tamper: changes messages on the way.
        run: name of the run.
        round: number of the round.
        attempt: attempt of the round; each has other masks.
        apart: least clients in any combination of this sum with earlier ones, unless one had the same clients.
        clients: numbers of the rows' clients, from 0 on; default: numbers of the rows.
        earlier: survivors of earlier sums.
        entropy: source of all secrets; default: the operating system's.

    Raises:
        Aborted: the sum cannot be recovered, or would be of fewer than `minimum` clients, or a combination with
            earlier ones of fewer than `apart`.
        ValueError: numbers off the grid's range, or too few clients for these dropouts and corrupt clients.

    Example:
        >>> import torch
        >>> from fedtorch.trust import privacy, secure
        >>> values = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
        >>> made = secure_sum(values, gone={3: 4}, dropouts=0.25, entropy=privacy.from_seed(0))
        >>> made.total, made.survivors  # client 3 has dropped out before it sent its number
        (tensor([7.], dtype=torch.float64), [0, 1, 2])
    """
    numbers = [client + 1 for client in (range(len(values)) if clients is None else clients)]
    grid.check(len(numbers))
    if len(numbers) < minimum:
        raise Aborted(f"Expected at least {minimum} clients for a sum, but got {len(numbers)}")
    words = grid.encode(values)
    entropy = from_system() if entropy is None else entropy
    keys = {
        k: Ed25519PrivateKey.from_private_bytes(entropy.key(Purpose(run, round, attempt, f"signature of {k}", b"")))
        for k in numbers
    }
    public = {k: key.public_key().public_bytes_raw() for k, key in keys.items()}
    if graph is None:
        graph = neighbourhoods(len(numbers), corrupt, dropouts, adversary=adversary, minimum=minimum)
    session = Session(run, round, attempt, public, words.shape[1], graph, minimum, grid.width, apart, adversary)
    before = [frozenset(client + 1 for client in each) for each in earlier]
    parties = {k: Client(session, k, keys[k], entropy, words_of_one, before) for k, words_of_one in zip(numbers, words)}
    row = {k: place for place, k in enumerate(numbers)}
    gone = {} if gone is None else {numbers[place]: phase for place, phase in gone.items()}
    server, cost = Server(session), _Cost()
    halves = {k: client_half(partial(_answer, party, gone.get(k), tamper, cost)) for k, party in parties.items()}
    results, _ = together({0: server_half(server), **halves}, dropouts=True)
    total, survivors = grid.decode(results[0]), server.survivors
    seen = [bytearray(split_words(session, server.messages[MASKED][k])[1]) for k in survivors]
    masked = torch.stack([torch.frombuffer(each, dtype=torch.int64) for each in seen])
    return SecureSum(total, [row[k] for k in survivors], masked, cost.sent, cost.received, cost.seconds)


@dataclass
class _Cost:
    """Counts bytes and seconds."""

    sent: int = 0
    received: int = 0
    seconds: float = 0.0


def _answer(
    party: Client, gone: int | None, tamper: Tamper | None, cost: _Cost, phase: int, payload: bytes
) -> bytes | None:
    """Return a client's message of a phase as it arrives; None if the client has dropped out or the message is lost."""
    if gone is not None and phase >= gone:
        return None
    cost.received += len(payload)
    began = time.process_time()
    message = party.answer(phase, payload)
    cost.seconds += time.process_time() - began
    cost.sent += len(message)
    return message if tamper is None else tamper(phase, party.number, message)
