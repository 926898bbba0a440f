"""Vertical models whose server learns the parties' sum and none of their values, by masks around both halves.

With `fedtorch.vfl.sums` (and with `noiseless`) a server needs only Σ_j η_j of the parties, and sends all of them one
gradient. `masked_party` masks a party's messages, with one mask for each other party, which cancel in the sum;
`masked_server` adds up the words of all parties and passes the sum to the inner half. The halves themselves and their
drivers are not changed.

In its first message each party sends a signed key, which the server passes on; masks are new in every message. Each
mask is bound to everything that the party has received in the run, `Send.bound`: masks between two parties cancel if
both have received the same messages in the same order, and otherwise leave random words.

*Protects against* the server, also an active one, which passes on keys as it likes (they are signed, and all must be
there), sends parties different gradients, or makes one party repeat steps or continue from another point. It may work
with other parties, as long as two are honest. It learns only sums of the values of all honest parties that have
received the same messages. It chooses these messages, as often as it likes: as many sums as there are parameters
disclose the span of all features. *Does not protect against* parties, which learn the labels from their gradients, and
with them the others' sum.

Sums of runs that differ by a party disclose its part. So a party with `folder=` begins no second run with the
parameters of an earlier one and other parties, for any rows. From other parameters it does, and later steps are not
recorded. If the leader of an alignment sends different rows to parties, sums of rows that do not belong together
disclose a party's values: with `Holder.digest` of the rows in the name of the run, parties with different rows refuse
each other's keys. All parties take part in every iteration: there are no shares from which to recover masks, so an
incomplete sum cannot be read.

Sources: as for `parties`, without the parts about dropouts.

>>> import torch
>>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
>>> from fedtorch.trust import privacy, secure
>>> from fedtorch.vfl.nodes.node import Summand
>>> from fedtorch.protocol.halves import Receive, Send, together
>>> def server():
...     first = yield Receive(1, Summand(torch.zeros(2)))
...     second = yield Receive(2, Summand(torch.zeros(2)))
...     return first.value, second.value
>>> def party(value):
...     yield Send(0, Summand(value))
>>> keys = {j: Ed25519PrivateKey.from_private_bytes(bytes([j]) * 32) for j in (1, 2)}
>>> public = {j: key.public_key().public_bytes_raw() for j, key in keys.items()}
>>> values = {1: torch.tensor([1.0, 2.0]), 2: torch.tensor([10.0, 20.0])}
>>> halves = {0: masked_server(server(), public, secure.Grid(), run=b"run")}
>>> for j, key in keys.items():
...     halves[j] = masked_party(party(values[j]), j, public, key, secure.Grid(), privacy.from_seed(j), run=b"run")
>>> together(halves)[0][0]  # the server's values: zeros for the first party, and the sum
(tensor([0., 0.]), tensor([11., 22.]))
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from pathlib import Path
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedtorch._representation import without_rows
from fedtorch.learns import Learns, tells
from fedtorch.protocol.halves import Half, Receive, Send, packed, unpacked, wrapped
from fedtorch.random.entropy import Entropy, Purpose, from_system
from fedtorch.sites.secure._both_sides import commitment, exchanged, opened_adverts, pair_mask
from fedtorch.sites.secure.grid import Grid, digits_of, largest_of
from fedtorch.sites.secure.messages import ADVERT, KEYS, Aborted, Session, bundle, most_up, sign, unbundle
from fedtorch.sites.secure.neighbours import Neighbourhoods
from fedtorch.tree import Tree
from fedtorch.vfl.nodes.node import Summand

_LOG = logging.getLogger(__name__)


@tells(Learns("nothing: keys for masks, signed"))
@without_rows
class Keys(NamedTuple):
    """A party's advert, up, and the adverts of all parties, down."""

    adverts: Tensor  # (bytes,) uint8


@tells(
    Learns(
        "nothing by themselves; all parties' together, the sum of their parts of each row's predictor, in each step; "
        "as many sums as there are parameters tell what all features span"
    ),
    exactness="rounded to a grid",
    of="the sum of all parties, under masks",
)
@without_rows
class Words(NamedTuple):
    """A party's masked summand on the grid, up; masks cancel in the sum of all parties."""

    words: Tensor  # (1 + B·M·C·n,) int64; the first is zero if all numbers are finite
    bound: Tensor  # (32,) uint8, digest of all messages that the party has received; masks cancel if it is equal


def _session(run: bytes, keys: dict[int, bytes], attempt: int) -> Session:
    """Return the session on which server and parties agree."""
    if len(keys) < 2:
        raise ValueError(f"Expected at least 2 parties of a sum, but got {len(keys)}")
    others = len(keys) - 1
    return Session(run, 0, attempt, keys, 1, Neighbourhoods(others, others), len(keys))


def masked_party(
    half: Half,
    party: int,
    keys: dict[int, bytes],
    signing: Ed25519PrivateKey,
    grid: Grid,
    entropy: Entropy | None = None,
    *,
    run: bytes,
    attempt: int = 0,
    folder: Path | str | None = None,
) -> Half:
    """Return a party's half with masks on its messages.

    Args:
        half: the half without masks, such as `vfl.iteration.party_half(node, iterations)`.
        party: the party's number, from 1 on.
        keys: public Ed25519 key by party, from 1 on, on which server and parties agree.
        signing: the party's own Ed25519 key.
        grid: grid of all parties' numbers.
        entropy: source of its secret; default: the operating system.
        run: unique name of the run, which ends with the digest of the rows, `Holder.digest`.
        attempt: attempt of the run; a repeated run is another attempt.
        folder: folder with the record of start parameters and of the parties of each sum over them, so that no later
            run begins with the same parameters and other parties, for any rows in any order; created by
            `fedtorch states DIR --begin-sums`. Without a folder nothing is recorded.

    Raises:
        Refusal: in its first step, the party has begun before with these parameters and other parties; or the folder
            has no record.
        TypeError: the half sends other messages than a value of the sum, or lacks `Send.bound`, or with a folder
            `Send.start`.
        Aborted, ValueError: others' keys are not the agreed ones; or fewer than two parties, whose sum would be one
            party's value.
    """
    session = _session(run, keys, attempt)
    grid.check(len(session.keys))
    entropy = from_system() if entropy is None else entropy
    return _masked_party(half, party, session, signing, grid, entropy, None if folder is None else Path(folder))


def _masked_party(
    half: Half,
    party: int,
    session: Session,
    signing: Ed25519PrivateKey,
    grid: Grid,
    entropy: Entropy,
    folder: Path | None,
) -> Half:
    digest = session.digest()
    purpose = Purpose(session.run, 0, session.attempt, f"mask key of {party}", digest)
    secret = X25519PrivateKey.from_private_bytes(entropy.key(purpose))
    public = secret.public_key().public_bytes_raw()
    advert = sign(session, ADVERT, party, KEYS.pack(public, public, commitment(public)), signing)
    yield Send(0, Keys(packed(advert)))
    adverts = opened_adverts(session, unbundle(unpacked((yield Receive(0, Keys(_room(session)))).adverts)))
    if adverts.get(party, (b"",))[0] != public:
        raise Aborted(f"Expected party {party}'s own advert among those of all, but it is missing")
    shared: dict[int, bytes] = {}
    for other in sorted(adverts.keys() - {party}):
        agreed = exchanged(secret, adverts[other][0])
        if agreed is None:
            raise Aborted(f"Expected a key of party {other}, but got one of low order", (other,))
        shared[other] = agreed
    number, has_received, largest = itertools.count(), False, 0.0

    def mask(step: Send | Receive) -> Half:
        nonlocal has_received, largest
        if isinstance(step, Receive):
            has_received, message = True, (yield step)
            largest = max(largest, largest_of(message))
            return message
        value = _value(step.message)
        if has_received and not step.bound:
            raise TypeError(
                "Expected a half that binds messages to those received, as party_half does by Send.bound, but got one "
                "without: masks would cancel even if the server sent parties different messages"
            )
        bound = hashlib.sha256(digest + step.bound).digest()
        one = session._replace(round=next(number), size=1 + value.numel())
        numbers = value.detach().reshape(1, -1).cpu()
        if one.round == 0 and folder is not None:
            _remember(folder, step.start, session)
        words = entropy.words(purpose._replace(round=one.round, phase=f"digits of {party}"), one.size)
        # Otherwise all words are random, as the first one shows: a refusal would disclose that it was this party.
        if grid.has(numbers):
            words = torch.cat([words[:1].zero_(), grid.total(numbers, words[1:], largest, digits_of(numbers))])
        else:
            _LOG.warning("party %d has values that are not finite, so the sum of all is random", party)
        if not grid.within(numbers, 1):
            _LOG.warning("party %d has values beyond the grid; scale features, or take smaller steps", party)
        for other, key in shared.items():
            words += pair_mask(one, bound, key, party, other)
        yield Send(0, Words(words, packed(bound)))
        return None

    return (yield from wrapped(half, mask))


def _remember(folder: Path, start: bytes, session: Session) -> None:
    """Record which parties begin with a start; raise Refusal if other parties have begun with it before.

    The start is a digest of the party's parameters, because its value also depends on the rows that the server asks
    for, and on their order.
    """
    from fedtorch.sites.rounds.past_sums import PastSums

    if not start:
        raise TypeError(
            "Expected a half with a digest of its first parameters, as party_half gives by Send.start, but got one "
            "without; folder= needs it to record them"
        )
    past = PastSums(folder)
    past.open()
    parties = frozenset(key.hex() for key in session.keys.values())
    past.of_round(start, (), None, parties, confirmed=True)


def masked_server(half: Half, keys: dict[int, bytes], grid: Grid, *, run: bytes, attempt: int = 0) -> Half:
    """Return the server's half, which gets the sum as the last party's value, and zeros as those of the others.

    Args:
        half: the half without masks, such as `vfl.iteration.server_half(node, iterations)`.
        keys: public Ed25519 key by party, from 1 on, on which server and parties agree.
        grid: grid of all parties' numbers.
        run: unique name of the run.
        attempt: attempt of the run; a repeated run is another attempt.

    Raises:
        Aborted: the half sends a message before it has received one of every party; parties have received different
            messages, or in another order, so that masks do not cancel; or the sum is beyond the grid, or has numbers
            that are not finite. No party refuses to send such numbers, because that would disclose something about its
            rows.
        TypeError: the half expects other messages than values of the sum.
        ValueError: fewer than two parties, whose sum would be one party's value.
    """
    return _masked_server(half, _session(run, keys, attempt), grid)


def _masked_server(half: Half, session: Session, grid: Grid) -> Half:
    parties = sorted(session.keys)
    empty = Keys(torch.zeros(most_up(session, ADVERT), dtype=torch.uint8))
    adverts = []
    for party in parties:
        adverts.append(unpacked((yield Receive(party, empty)).adverts))
    for party in parties:
        yield Send(party, Keys(packed(bundle(adverts))))
    total: Tensor | None = None
    bound: Tensor | None = None
    waiting = list(parties)

    def add(step: Send | Receive) -> Half:
        nonlocal total, bound, waiting
        if isinstance(step, Send):
            if len(waiting) < len(parties):
                raise Aborted(f"Expected all parties in every iteration, but parties {waiting} are missing")
            return (yield step)
        like = _value(step.like)
        came = yield Receive(
            step.sender, Words(torch.zeros(1 + like.numel(), dtype=torch.int64), torch.zeros(32, dtype=torch.uint8))
        )
        if step.sender not in waiting:
            raise Aborted(f"Expected party {step.sender} once in an iteration, but the half asks for it again")
        if bound is not None and not torch.equal(came.bound, bound):
            raise Aborted(
                f"Expected parties that have received the same messages, to which their masks are bound, but party "
                f"{step.sender} has received others, or has another delay="
            )
        waiting.remove(step.sender)
        total = came.words if total is None else total + came.words
        bound = came.bound
        value = torch.zeros_like(like)
        if not waiting:
            numbers = grid.decode(total[1:])
            if bool(total[0] != 0) or not grid.within(numbers, len(parties)):
                raise Aborted(
                    f"Expected a sum of finite numbers of at most {grid.bound} in size of every party, but got others; "
                    "the log of a party says whose; scale features, take smaller steps, or use a grid with a larger "
                    "bound"
                )
            value = numbers.reshape(like.shape).to(like)
            waiting, total, bound = list(parties), None, None
        return Summand(value)

    return (yield from wrapped(half, add))


def _value(message: Tree) -> Tensor:
    """Return the value in a party's message; raise TypeError for another message."""
    if not isinstance(message, Summand):
        raise TypeError(
            f"Expected parties that send only values of a sum, but got {type(message).__name__}; use a sum at the cut "
            "layer and an augmented model, or a power model with vfl.sums()"
        )
    return message.value


def _room(session: Session) -> Tensor:
    """Return a bundle of the size of all adverts together."""
    return packed(bundle([bytes(most_up(session, ADVERT))] * len(session.keys)))
