"""What the disclosure of vertical training and of alignment says is learnt is found by an attack, and no more is.

Each attack reads the messages of real halves, of one seed that every reader may try again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.verticals import draw, logistic_data
from torch import Tensor, nn

from fedtorch import random, vfl
from fedtorch.learns import UNDECLARED, declared
from fedtorch.protocol.halves import Half, Receive, Send, packed, together, unpacked, wrapped
from fedtorch.sites import secure
from fedtorch.sites.secure.messages import bundle
from fedtorch.sites.secure.vertical import Keys, Words
from fedtorch.trust import attacks, privacy
from fedtorch.trust.attacks.split import label_scores
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Gradient, Iteration, PartyNode, ServerNode, Summand
from fedtorch.vfl.rows.alignment import Holder, Points

WIDTHS, N, STEPS = [3, 2], 400, 20
GRID, START = secure.Grid(), int(random.fold_in(random.key(0), 0))
DATA = logistic_data(WIDTHS, N)
SIGNING = {j: Ed25519PrivateKey.from_private_bytes(bytes([j]) * 32) for j in (1, 2)}
PUBLIC = {j: key.public_key().public_bytes_raw() for j, key in SIGNING.items()}
PUSH = draw(7, 1, 1, 1, N)  # a gradient that a server makes up
Heard = dict[int, list[Any]]  # by party, what it sent and was sent


def heard(
    defence: Callable[[ServerNode, Half], Half] = lambda server, half: half,
    masks: bool = False,
    steps: int = STEPS,
) -> tuple[Heard, Heard]:
    """What each party has sent and was sent in training, as whoever reads its messages sees it."""
    bottoms = [nn.Linear(width, 1, dtype=torch.float64) for width in WIDTHS]
    network = vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), seed=START).double()
    server, parties = network.nodes(DATA, partial(torch.optim.SGD, lr=0.5))
    iterations = [Iteration(step=step) for step in range(steps)]
    halves = {0: defence(server, server_half(server, iterations))}
    halves |= {p.index: party_half(p, iterations) for p in parties}
    if masks:
        halves[0] = secure.masked_server(halves[0], PUBLIC, secure.Grid(), run=b"run")
        for j, key in SIGNING.items():
            entropy = privacy.from_seed(j)
            halves[j] = secure.masked_party(halves[j], j, PUBLIC, key, secure.Grid(), entropy, run=b"run")
    sent: Heard = {1: [], 2: []}
    told: Heard = {1: [], 2: []}
    for j in sent:
        overhear = lambda node, message, own, j=j: (sent if own else told)[j].append(message)
        halves[j] = attacks.tapped(halves[j], overhear)
    together(halves)
    return sent, told


def labels_found(sent: Heard, told: Heard, together: bool) -> float:
    """The share of labels that a party finds by the sign, or both where they know what both have sent."""
    gradients = N * torch.stack([message[0] for message in told[1]])
    means = None
    if together:
        values = [torch.stack([message[0] for message in messages]) for messages in sent.values()]
        means = (values[0] + values[1]).sigmoid()
    return float((attacks.guessed_labels(gradients, means) == DATA.response).double().mean())


def chance(share: float) -> float:
    """Three standard errors of a share of N labels."""
    return 3 * math.sqrt(share * (1 - share) / N)


@pytest.mark.parametrize("together", [False, True])
def test_labels_are_found_without_noise_on_the_gradients(together: bool) -> None:
    sent, told = heard()
    assert labels_found(sent, told, together) == 1.0


@pytest.mark.parametrize(("epsilon", "least"), [(25.0, 0.8), (0.5, None)])
def test_both_parties_find_the_labels_that_epsilon_leaves(epsilon: float, least: float | None) -> None:
    """y − p with p known is y, and a label moves it by half of what C = 1 bounds: right by Φ(√T/(4z)) of T steps."""
    noise = privacy.noise_for(epsilon=epsilon, rounds=STEPS, delta=1e-3)
    guarded = privacy.noised_gradients(clip=1.0, noise=noise, delta=1e-3, entropy=privacy.from_seed(1))
    sent, told = heard(guarded)
    law = 0.5 * (1 + math.erf(math.sqrt(STEPS) / (4 * noise) / math.sqrt(2)))
    found = labels_found(sent, told, together=True)
    assert found == pytest.approx(law, abs=chance(law))
    if least is None:  # at an ε that says so, chance within its interval
        assert found == pytest.approx(0.5, abs=2 * chance(0.5))
    else:
        assert found > least > labels_found(sent, told, together=False)  # the sign alone is no measure of it


def explained(guess: Tensor, truth: Tensor) -> float:
    """R² of the best linear function of a guess."""
    return float(torch.corrcoef(torch.stack([guess, truth]))[0, 1] ** 2)


def features_found(values: Sequence[Tensor]) -> float:
    """R² of the first feature by a server that knows it of half of the rows, in the other half."""
    inputs = torch.stack([value.flatten() for value in values], 1)
    inputs = torch.cat([inputs, torch.ones(N, 1, dtype=torch.float64)], 1)
    feature, half = DATA.features[0][:, 0], N // 2
    solved = torch.linalg.lstsq(inputs[:half], feature[:half, None], driver="gelsd").solution
    return explained((inputs[half:] @ solved)[:, 0], feature[half:])


def test_a_party_s_values_in_the_clear_tell_its_features_and_words_under_masks_do_not() -> None:
    """A linear party of three features and a constant, by as many values as it has parameters."""
    clear, _ = heard(steps=8)
    assert all(isinstance(message, Summand) for message in clear[1])
    assert features_found([message.value for message in clear[1]]) > 0.99
    hidden, _ = heard(steps=8, masks=True)
    words = [message.words[1:].double() / 2.0**63 for message in hidden[1] if isinstance(message, Words)]
    assert len(words) == 8
    # Of words that are chance, R² in the rows held out has mean 1/(n − 1), and is below 9/(n − 1) but for 3 in 1000.
    assert features_found(words) < 9 / (N // 2 - 1)


def test_values_under_masks_add_up_to_the_sum_of_the_parties() -> None:
    """The sum is what the server gets: with a party that tells it its own part, it has the other's."""
    clear, _ = heard(steps=1)
    hidden, _ = heard(steps=1, masks=True)
    total = sum(message.words[1:] for j in (1, 2) for message in hidden[j] if isinstance(message, Words))
    shared = secure.Grid().decode(total).reshape(N)
    own, other = (clear[j][0].value.flatten() for j in (1, 2))
    torch.testing.assert_close(shared - own, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masks", [False, True])
def test_one_party_reads_the_other_s_part_from_its_gradients(masks: bool) -> None:
    """The sign of y − p gives y, so p, and the logit of p less one's own part is the other's."""
    clear, _ = heard(steps=1)
    _, told = heard(steps=1, masks=masks)
    (gradient,) = [N * message.gradient.flatten() for message in told[1] if isinstance(message, Gradient)]
    p = (gradient > 0).double() - gradient
    own, other = (clear[j][0].value.flatten() for j in (1, 2))
    torch.testing.assert_close(p.logit() - own, other, rtol=0, atol=1e-6)
    assert "with two parties the other's part" in declared(Gradient, UNDECLARED).worst


def linear_parties() -> list[PartyNode]:
    bottoms = [nn.Linear(width, 1, dtype=torch.float64) for width in WIDTHS]
    network = vfl.SplitNetwork(bottoms, likelihoods.bernoulli()).double()
    return network.nodes(DATA, partial(torch.optim.SGD, lr=0.5))[1]


def values(party: PartyNode) -> Tensor:
    return party.propose(Iteration()).sent.flatten()


def masked_halves(
    parties: Sequence[PartyNode], steps: int, bound: bool, rows: Sequence[bytes] = (b"", b"")
) -> dict[int, Half]:
    """Halves under masks of fresh keys; `bound` is whether masks are bound to what parties have been told."""

    def unbound(step: Any) -> Half:
        return (yield step._replace(bound=b"anything") if isinstance(step, Send) else step)

    made = {}
    for party in parties:
        half = party_half(party, [Iteration(step=step) for step in range(steps)])
        half = half if bound else wrapped(half, unbound)
        run = b"run" + rows[party.index - 1]
        made[party.index] = secure.masked_party(half, party.index, PUBLIC, SIGNING[party.index], GRID, run=run)
    return made


def deceived(
    parties: Sequence[PartyNode],
    answer: Callable[[int, int], Tensor],
    steps: int,
    bound: bool,
    replayed: Sequence[bytes] = (),
    rows: Sequence[bytes] = (b"", b""),
) -> list[Tensor]:
    """The sums that a server reads that tells party j in each step `answer(step, j)`.

    Parties that it keeps out are represented by adverts of theirs that it has heard before.
    """

    def server() -> Half:
        adverts, sums = list(replayed), []
        for party in parties:
            adverts.append(unpacked((yield Receive(party.index, None)).adverts))
        for party in parties:
            yield Send(party.index, Keys(packed(bundle(adverts))))
        for step in range(steps):
            total = torch.zeros(N, dtype=torch.int64)
            for party in parties:
                total = total + (yield Receive(party.index, None)).words[1:]
            sums.append(GRID.decode(total))
            for party in parties:
                yield Send(party.index, Gradient(answer(step, party.index)))
        return sums

    sums: list[Tensor] = together({0: server(), **masked_halves(parties, steps, bound, rows)})[0][0]
    return sums


def check_change(found: Tensor, truth: Tensor, bound: bool) -> None:
    """A party's change is read to the grid's rounding where masks are not bound, and otherwise is not there."""
    assert float(truth.abs().max()) > 0.1
    if bound:  # R² of chance has mean 1/(n − 1), and is below 9/(n − 1) but for 3 in 1000
        assert explained(found, truth) < 9 / (N - 1)
    else:
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bound", [False, True])
def test_a_server_that_tells_parties_different_gradients_reads_no_change_of_one(bound: bool) -> None:
    """It moves the first party and not the second; the difference of two sums is the first one's change."""
    parties = linear_parties()
    before, moves = values(parties[0]), lambda step, j: PUSH if (step, j) == (0, 1) else 0 * PUSH
    first, second = deceived(parties, moves, 2, bound)
    check_change(second - first, values(parties[0]) - before, bound)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_a_server_that_sends_one_party_back_reads_no_change_of_it(bound: bool, again: bool) -> None:
    """After a broken line one party goes on from an earlier point, or does steps `again` with other gradients."""
    parties = linear_parties()
    start = parties[0].state_dict()
    deceived(parties, lambda step, j: PUSH, 1, bound)
    before, kept = [values(party) for party in parties], parties[1].state_dict()
    (first,) = deceived(parties, lambda step, j: 0 * PUSH, 1, bound)
    torch.testing.assert_close(first, sum(before), rtol=0, atol=1e-6)  # who is told the same is added up
    parties[0].load_state_dict(start)
    parties[1].load_state_dict(kept)
    if again:
        heard_before = unpacked(next(masked_halves(parties, 1, bound)[2]).message.adverts)
        deceived(parties[:1], lambda step, j: -PUSH, 1, bound, [heard_before])
    after = values(parties[0])
    (second,) = deceived(parties, lambda step, j: 0 * PUSH, 1, bound)
    check_change(second - first, after - before[0], bound)


@pytest.mark.parametrize("bound", [False, True])
def test_a_leader_that_tells_parties_different_rows_gets_no_sum_of_them(bound: bool) -> None:
    """It shifts the first party's rows by one, and has all of its values from differences of neighbours."""
    holder = Holder([f"p{i}" for i in range(N)], "a party")
    order = torch.arange(N)
    sums, truth = [], []
    for rows in (order, order.roll(-1)):
        parties = linear_parties()
        parties[0].data = parties[0].data._replace(features=(DATA.features[0][rows],))
        digests = [holder.digest(each) if bound else b"" for each in (rows, order)]
        refused = pytest.raises(ValueError, match="client 2 has signed in this session, but it has not")
        with refused if bound and rows is not order else nullcontext():
            sums += deceived(parties, lambda step, j: 0 * PUSH, 1, True, rows=digests)
        truth.append(values(parties[0]))
    assert len(sums) == 2 - bound
    if not bound:
        found = (sums[1] - sums[0]).cumsum(0)
        torch.testing.assert_close(found, truth[1] - truth[0][0], rtol=0, atol=1e-4)
        assert float(truth[1].std()) > 0.1


def test_what_a_server_tells_all_parties_alike_is_read_in_their_sum() -> None:
    """What is left to it: sums after gradients of its choice, as here of the changes of all."""
    parties = linear_parties()
    before = sum(values(party) for party in parties)
    first, second = deceived(parties, lambda step, j: (1 - step) * PUSH, 2, True)
    torch.testing.assert_close(second - first, sum(values(party) for party in parties) - before, rtol=0, atol=1e-6)


def repeated(private: Callable[[ServerNode, Half], Half], times: int) -> tuple[Heard, Heard]:
    """What parties that do not move hear of one step that they have done so many times."""
    bottoms = [nn.Linear(width, 1, dtype=torch.float64) for width in WIDTHS]
    network = vfl.SplitNetwork(bottoms, likelihoods.bernoulli()).double()
    server, parties = network.nodes(DATA, partial(torch.optim.SGD, lr=1e-12))
    sent: Heard = {1: [], 2: []}
    told: Heard = {1: [], 2: []}
    with suppress(RuntimeError):
        for _ in range(times):
            halves = {0: private(server, server_half(server, [Iteration()]))}
            for party in parties:
                overhear = lambda node, message, own, j=party.index: (sent if own else told)[j].append(message)
                halves[party.index] = attacks.tapped(party_half(party, [Iteration()]), overhear)
            together(halves)
    return {j: messages[: len(told[1])] for j, messages in sent.items()}, told


@pytest.mark.parametrize("budget", [None, 1.0])
def test_a_step_that_is_asked_for_300_times_tells_no_more_than_the_budget(budget: float | None, tmp_path: Any) -> None:
    """As by a party that hangs up at each block's end; y − p with p known is right as a normal law says."""
    noise = privacy.noise_for(epsilon=1.0, rounds=1, delta=1e-3)
    ledger, found = tmp_path / "labels.jsonl", []
    settings: dict[str, Any] = {"clip": 1.0, "noise": noise, "delta": 1e-3, "budget": budget}
    for run in range(2):
        private = privacy.noised_gradients(**settings, ledger=ledger, entropy=privacy.from_seed(run))
        found.append(repeated(private, 150))
    sent, told = ({j: a[j] + b[j] for j in a} for a, b in zip(*found))
    releases = len(told[1])
    assert releases == (300 if budget is None else 1) == private.ledger.entries
    assert private.ledger.epsilon == pytest.approx(privacy.epsilon(noise=noise, rounds=releases, delta=1e-3), rel=1e-6)
    law = 0.5 * (1 + math.erf(math.sqrt(releases) / (4 * noise) / math.sqrt(2)))
    assert labels_found(sent, told, together=True) == pytest.approx(law, abs=chance(law))
    assert law > 0.9 if budget is None else law < 0.56


LISTS = {
    "leader": [f"p{i}" for i in range(60)],
    "b": [f"p{i}" for i in range(30, 90)],
    "c": [f"p{i}" for i in range(45)],
}


def points_seen(members: Sequence[str], at: str) -> dict[str, list[Any]]:
    """The messages that a node of an alignment hears, by who said them."""
    halves = {"leader": Holder(LISTS["leader"], "leader").leading(members)}
    halves |= {name: Holder(LISTS[name], name).following("leader") for name in members}
    said: dict[str, list[Any]] = {}
    overhear = lambda node, message, own: None if own else said.setdefault(str(node), []).append(message)
    halves[at] = attacks.tapped(halves[at], overhear)
    together(halves)
    return said


def test_the_leader_learns_who_has_its_rows_and_not_those_that_it_lacks() -> None:
    """Of rows that b has and c lacks, too; they are left out of what is common."""
    leader = Holder(LISTS["leader"], "leader")
    mine = leader.own_points()
    for name in ("b", "c"):
        member = Holder(LISTS[name], name)
        theirs = member.own_points()
        places = leader.places(name, theirs, member.blind(mine))
        known = {LISTS["leader"][row] for row in (places >= 0).nonzero()[:, 0].tolist()}
        assert known == set(LISTS["leader"]) & set(LISTS[name])
        assert len(theirs.x) == len(LISTS[name])  # and how many it has
    common = set.intersection(*map(set, LISTS.values()))
    assert common < set(LISTS["leader"]) & set(LISTS["b"])


def test_a_member_learns_how_many_the_leader_has_and_which_of_its_own_rows_are_used() -> None:
    heard = points_seen(["b", "c"], "b")
    points, positions = heard["leader"]
    assert heard.keys() == {"leader"}
    assert len(points.x) == len(LISTS["leader"])
    assert len(positions.rows) == len(set.intersection(*map(set, LISTS.values())))


def test_points_of_rows_that_the_other_lacks_look_like_chance() -> None:
    """Bits of points, of whose mean 512 · n bits have an sd of 1/√(1024 n); the same row is another point next time."""
    first, again = (Holder(LISTS["b"], "b").own_points() for _ in range(2))
    bits = torch.stack([(first.x >> shift) & 1 for shift in range(8)]).double()
    assert float(bits.mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(bits.numel()))
    assert not {tuple(x) for x in first.x.tolist()} & {tuple(x) for x in again.x.tolist()}


def test_guesses_are_found_until_the_daily_limit(tmp_path: Any) -> None:
    """A list of guessed identifiers finds those that the other has, of so many a day."""
    limit = vfl.DailyLimit(tmp_path / "guesses.json", 50, now=lambda: 0.0)
    guesses = Holder([f"p{i}" for i in range(25, 50)], "guesser")
    victim = Holder(LISTS["c"], "c", limit=limit)
    places = guesses.places("c", victim.own_points(), victim.blind(guesses.own_points()))
    assert int((places >= 0).sum()) == 20  # p25 to p44
    with pytest.raises(ValueError, match="at most 25 identifiers to be tested"):
        victim.blind(Points(Holder([f"q{i}" for i in range(30)], "guesser").own_points().x))


def test_scores_by_two_classes_are_those_of_both_ways() -> None:
    """One output less ½ is the largest of the two of a softmax."""
    y = (draw(3, 50) > 0).double()
    p, noise = draw(4, 4, 1, 50).sigmoid(), draw(5, 4, 1, 50)
    one = label_scores(y - p + noise, p)
    both = label_scores(torch.cat([-(y - p + noise), y - p + noise], 1), torch.cat([1 - p, p], 1))
    assert torch.equal((one > 0).long(), both.argmax(-2))
