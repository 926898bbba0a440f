"""Vertical models whose server learns the parties' sum and none of their values: masks around both halves.

With `fedtorch.vfl.sums` (and with `noiseless`) a server needs Σ_j η_j of the parties only, and sends all of them one
gradient. `masked_party` puts masks on what a party sends, one for each other party, which cancel in the sum;
`masked_server` takes the words of all of them and hands the half inside their sum. The halves themselves, and whoever
drives them, do not know.

In its first message each party says a key, signed, which the server passes on; masks then are fresh in every message.
Each mask is bound to what the party has been told in the whole run, `Send.bound`: masks between two parties cancel
where both have been told the same messages in the same order, and otherwise leave words that are chance.

*From whom:* the server, also an active one: one that passes keys on as it likes (they are signed, and all have to be
there), sends parties different gradients, or lets one do steps again, or go on from another point, without the others.
It may work with other parties, as long as two are honest. Whatever it does, it learns sums of the values of all honest
parties after they have been told the same, and nothing else. It chooses what that is, as often as it likes: as many
sums as there are parameters tell what all features span. *Not from whom:* parties, which learn the labels of their
gradients and with them the others' sum.

Sums of runs that differ by a party tell its part: a party with `folder=` begins no second run with the parameters of
an earlier one and other parties, whatever rows it is asked for. From other parameters it does, and nothing remembers
later steps. Sums of rows that do not
belong together tell a party's values, where the leader of an alignment tells parties different rows: with
`Holder.digest` of the rows in the name of the run, parties of different rows refuse each other's keys. All parties take
part in every iteration: there are no shares to recover masks from, and a sum that lacks one cannot be read.

Sources: as `parties`, without the parts that dropouts need.

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
>>> together(halves)[0][0]  # what the server hears: nothing of the first, and the sum
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
    """Both ways: a party's advert up, and all of them down."""

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
    """Up: a summand on the grid, under masks that cancel in the sum of all."""

    words: Tensor  # (1 + B·M·C·n,) int64, the first zero where all numbers are finite
    bound: Tensor  # (32,) uint8, a digest of what the party has been told, the same of all whose masks cancel


def _session(run: bytes, keys: dict[int, bytes], attempt: int) -> Session:
    """Return what server and parties agree on beforehand."""
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
    """Return a party's half with masks on what it sends.

    Args:
        half: as without masks, such as `vfl.iteration.party_half(node, iterations)`.
        party: its number, from 1 on.
        keys: by party, from 1 on, who signs with which Ed25519 key; server and parties agree on them.
        signing: its own Ed25519 key.
        grid: that all parties agree on.
        entropy: where its secret comes from; default: the operating system.
        run: a name of the run that no other has; at its end the digest of the rows, `Holder.digest`.
        attempt: of the run; one that is begun again is another.
        folder: where the party remembers with whom it has added up what it makes of the parameters with which a run
            begins, so that no later run begins with the same parameters and other parties, with whatever rows, in
            whatever order; begun by `fedtorch states DIR --begin-sums`. Without one it remembers nothing.

    Raises:
        Refusal: in its first step, the party has begun with these parameters and other parties; or the folder's memory
            is not there.
        TypeError: the half sends something else than a value of the sum, or does not say what it has been told, or
            with a folder not how it has begun.
        Aborted, ValueError: others' keys that are not as agreed; fewer than two parties, whose sum would be one party's
            value.
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
    number, told, largest = itertools.count(), False, 0.0

    def mask(step: Send | Receive) -> Half:
        nonlocal told, largest
        if isinstance(step, Receive):
            told, message = True, (yield step)
            largest = max(largest, largest_of(message))
            return message
        value = _value(step.message)
        if told and not step.bound:
            raise TypeError(
                "Expected a half that says what it has been told, as party_half does by Send.bound, but got one that "
                "does not: masks would cancel also where the server tells parties different things"
            )
        bound = hashlib.sha256(digest + step.bound).digest()
        one = session._replace(round=next(number), size=1 + value.numel())
        numbers = value.detach().reshape(1, -1).cpu()
        if one.round == 0 and folder is not None:
            _remember(folder, step.start, session)
        words = entropy.words(purpose._replace(round=one.round, phase=f"digits of {party}"), one.size)
        if grid.has(numbers):  # else all of it is chance, as the first word says: a refusal would tell of this party
            words = torch.cat([words[:1].zero_(), grid.total(numbers, words[1:], largest, digits_of(numbers))])
        else:
            _LOG.warning("party %d has values that are not finite, so that the sum of all is chance", party)
        if not grid.within(numbers, 1):
            _LOG.warning("party %d has values beyond the grid; scale features, or take smaller steps", party)
        for other, key in shared.items():
            words += pair_mask(one, bound, key, party, other)
        yield Send(0, Words(words, packed(bound)))
        return None

    return (yield from wrapped(half, mask))


def _remember(folder: Path, start: bytes, session: Session) -> None:
    """Remember who begins together; raise Refusal where others have, whose parts the difference of sums would tell.

    The start is that of the party's parameters: its value has the rows that the server asks for, in the server's order.
    """
    from fedtorch.sites.rounds.past_sums import PastSums

    if not start:
        raise TypeError(
            "Expected a half that says with which parameters it has begun, as party_half does by Send.start, but got "
            "one that does not; with folder= the party remembers them"
        )
    past = PastSums(folder)
    past.open()
    parties = frozenset(key.hex() for key in session.keys.values())
    past.of_round(start, (), None, parties, confirmed=True)


def masked_server(half: Half, keys: dict[int, bytes], grid: Grid, *, run: bytes, attempt: int = 0) -> Half:
    """Return the server's half, which is handed the sum as the last party's value, and zeros as those of the others.

    Args:
        half: as without masks, such as `vfl.iteration.server_half(node, iterations)`.
        keys: by party, from 1 on, who signs with which Ed25519 key; server and parties agree on them.
        grid: that all parties agree on.
        run: a name of the run that no other has.
        attempt: of the run; one that is begun again is another.

    Raises:
        Aborted: the half does not hear every party before it says something; or parties that have been told different
            things, or in another order, whose masks do not cancel; a sum beyond the grid, or of numbers of which some
            are not finite, which no party refuses to send, as that would tell of its rows.
        TypeError: the half expects something else than values of the sum.
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
                raise Aborted(f"Expected all parties in every iteration, but parties {waiting} are not there")
            return (yield step)
        like = _value(step.like)
        came = yield Receive(
            step.sender, Words(torch.zeros(1 + like.numel(), dtype=torch.int64), torch.zeros(32, dtype=torch.uint8))
        )
        if step.sender not in waiting:
            raise Aborted(f"Expected party {step.sender} once in an iteration, but it is heard again")
        if bound is not None and not torch.equal(came.bound, bound):
            raise Aborted(
                f"Expected parties that have been told the same, to which their masks are bound, but party "
                f"{step.sender} has been told something else, or has another delay="
            )
        waiting.remove(step.sender)
        total = came.words if total is None else total + came.words
        bound = came.bound
        value = torch.zeros_like(like)
        if not waiting:
            numbers = grid.decode(total[1:])
            if bool(total[0] != 0) or not grid.within(numbers, len(parties)):
                raise Aborted(
                    f"Expected a sum of finite numbers of at most {grid.bound} in size of every party, but got others, "
                    "and the log of a party says whose; scale features, take smaller steps, or a grid with a larger "
                    "bound"
                )
            value = numbers.reshape(like.shape).to(like)
            waiting, total, bound = list(parties), None, None
        return Summand(value)

    return (yield from wrapped(half, add))


def _value(message: Tree) -> Tensor:
    """Return the number of a sum that a message holds; raise TypeError for another message."""
    if not isinstance(message, Summand):
        raise TypeError(
            f"Expected parties that send values of a sum and nothing else, but got {type(message).__name__}; "
            "use a sum at the cut layer and an augmented model, or a power model with vfl.sums()"
        )
    return message.value


def _room(session: Session) -> Tensor:
    """Return a bundle as large as that of all adverts."""
    return packed(bundle([bytes(most_up(session, ADVERT))] * len(session.keys)))
