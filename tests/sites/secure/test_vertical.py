"""Vertical models under masks train as without, and the server sees words."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import splits
from support.oracles.closed_forms import distance
from support.verticals import GUIDES, ROWS, gathered, in_threads, nodes, noises, some_model, some_parameters

import fedtorch as ft
from fedtorch.protocol.halves import Half, Receive, Send, together, wrapped
from fedtorch.protocol.journal import Journal, Stateful
from fedtorch.random.entropy import Entropy
from fedtorch.sites import Hub, secure
from fedtorch.sites.rounds import past_sums
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.sites.secure import Grid
from fedtorch.sites.secure.messages import Aborted
from fedtorch.sites.secure.vertical import Keys, Words, masked_party, masked_server
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Limits
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.trust import privacy
from fedtorch.trust.attacks import tapped
from fedtorch.vfl.nodes.iteration import Iteration, party_half, server_half
from fedtorch.vfl.nodes.node import Gradient, Summand
from fedtorch.vfl.rows.data import VerticalData

GRID = Grid(40, 2.0**10)
ITERATIONS = [
    Iteration(noise, 0.05) for noise in noises(some_model("augmented", "bernoulli")[0], GUIDES["sums"](), ROWS, 4)
]
SIGNING = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in (1, 2, 3)}
KEYS = {k: key.public_key().public_bytes_raw() for k, key in SIGNING.items()}


def over_streams(made: dict[int, Half]) -> None:
    """Run halves over the streams of a hub; raise what a party raises."""
    hub, names = Hub(Limits(seconds=5.0)), {k: f"party {k}" for k in SIGNING}
    with ThreadPoolExecutor(len(made)) as pool:
        futures = [pool.submit(over_link, made[k], memory.link(hub, name), seconds=20) for k, name in names.items()]
        server = pool.submit(over_hub, made[0], hub, list(names.values()), seconds=20, timeout=20)
        for future in [*futures, server]:
            future.result(20)


def made_nodes(guide: str, steps: int, rate: float = 0.05, active=(None, None, None, None)):
    """(the server, the parties, the iterations)."""
    model, data = some_model("augmented", "bernoulli")
    family = GUIDES[guide]()
    server, parties = nodes(model, family, some_parameters(model, family, data), data, shared=False)
    given = noises(model, family, ROWS, steps)
    return server, parties, [Iteration(noise, rate, active=here) for noise, here in zip(given, active)]


def under_masks(
    made: dict[int, Half], entropies: dict[int, Entropy] | None = None, grid: Grid = GRID
) -> dict[int, Half]:
    entropies = {k: privacy.from_seed(k) for k in KEYS} if entropies is None else entropies
    hidden = {k: masked_party(made[k], k, KEYS, SIGNING[k], grid, entropies[k], run=b"run") for k in KEYS}
    return {0: masked_server(made[0], KEYS, grid, run=b"run"), **hidden}


def test_new_rows_are_predicted_from_a_sum_under_masks() -> None:
    """The server hears words alone, and predicts as in one process: 40 bits after the point, of a probability."""
    network, rows = splits.CASES["sums"](), splits.data().features
    made = {0: network.server_prediction(splits.N, draws=5)}
    made |= {j: network.party_prediction(f"party {j - 1}", x, draws=5) for j, x in enumerate(rows, start=1)}
    heard: list[type] = []
    hidden = under_masks(made)
    hidden[0] = tapped(hidden[0], lambda node, message, sent: None if sent else heard.append(type(message)))
    assert distance(together(hidden)[0][0], network.predict(rows, draws=5)) < 1e-9
    assert set(heard) == {Keys, Words}


def halves(guide: str, masks: bool, steps: int, rate: float = 0.05, active=(None, None, None, None), grid: Grid = GRID):
    """(the halves by node, all parameters as they are by then)."""
    server, parties, iterations = made_nodes(guide, steps, rate, active)
    made = {0: server_half(server, iterations), **{p.index: party_half(p, iterations, 1) for p in parties}}
    return under_masks(made, grid=grid) if masks else made, lambda: gathered(server, parties)


@pytest.mark.parametrize("guide", ["sums", "noiseless"])
def test_training_under_masks_is_training_up_to_the_grid(guide: str) -> None:
    ends = []
    for masks in (False, True):
        made, parameters = halves(guide, masks, 4)
        together(made)
        ends.append(parameters())
    # Three roundings of 2⁻⁴¹ in every number of a sum; Adam divides by gradients' sizes, which are not small here.
    assert distance(*ends) < 1e-8
    assert distance(ends[0], halves(guide, False, 0)[1]()) > 0.01


def test_the_server_sees_words_that_look_like_chance_and_never_the_same() -> None:
    made, _ = halves("noiseless", True, 3, 1e-12)
    seen: dict[int, list[torch.Tensor]] = {1: [], 2: [], 3: []}

    def watched(half, party: int):
        heard = None
        while True:
            try:
                step = half.send(heard)
            except StopIteration as done:
                return done.value
            if isinstance(step, Send) and isinstance(step.message, Words):
                seen[party].append(step.message.words)
            heard = yield step

    together({0: made[0], **{k: watched(made[k], k) for k in seen}})
    words = torch.cat([torch.cat(each) for each in seen.values()])
    assert len(words.unique()) == len(words)
    spread = words.double() / 2.0**64
    assert float(spread.std()) == pytest.approx(12**-0.5, rel=0.1)  # uniform, of some hundreds of words


def test_masked_halves_go_over_the_wire() -> None:
    """In threads, by encoded payloads, as in one process."""
    ends = []
    for driver in (together, in_threads):
        made, parameters = halves("sums", True, 2)
        driver(made)
        ends.append(parameters())
    assert distance(*ends) < 1e-12


def test_what_a_sum_is_made_of_leaves_no_process_without_masks() -> None:
    """In one process, which has everything, nothing leaves."""
    with pytest.raises(ValueError, match=r"secure sum around a half .*masked_party.* accept_disclosure=True"):
        over_streams(halves("sums", False, 1)[0])
    together(halves("sums", False, 1)[0])
    over_streams(halves("sums", True, 1)[0])
    over_streams(halves("noiseless", False, 1)[0])  # an ordinary split network's, which says what it sends


def test_what_is_not_summed_at_the_cut_layer_is_refused() -> None:
    """Masks would hand the server zeros and a sum in the place of what it joins side by side."""
    network = splits.CASES["concatenated"]()
    server, parties = network.nodes(splits.data(), splits.SGD)
    made = {0: masked_server(server_half(server, [Iteration()]), KEYS, GRID, run=b"run")}
    for k, party in enumerate(parties, start=1):
        made[k] = masked_party(
            party_half(party, [Iteration()]), k, KEYS, SIGNING[k], GRID, privacy.from_seed(k), run=b"run"
        )
    with pytest.raises(TypeError, match="but got Value; use a sum at the cut layer"):
        together(made)


def test_masks_go_on_from_the_points_of_a_journal() -> None:
    """Keys are agreed anew in each block of iterations, so that one that is begun again has other masks."""

    def over(half: Half, journal: Journal, node: Stateful, mask: Callable[[Half], Half]) -> Half:
        yield from journal.through(lambda some: mask(half(node, some)), node, ITERATIONS, every=2)

    ends = []
    for masks in (False, True):
        model, data = some_model("augmented", "bernoulli")
        family = GUIDES["sums"]()
        server, parties = nodes(model, family, some_parameters(model, family, data), data, shared=False)
        plain = lambda half: half
        hide = lambda half, k: masked_party(half, k, KEYS, SIGNING[k], GRID, run=b"run")
        hear = lambda half: masked_server(half, KEYS, GRID, run=b"run")
        made = {0: over(server_half, Journal(), server, hear if masks else plain)}
        for p in parties:
            made[p.index] = over(party_half, Journal(), p, partial(hide, k=p.index) if masks else plain)
        together(made)
        ends.append(gathered(server, parties))
    assert distance(*ends) < 1e-8


def test_models_that_need_more_than_a_sum_are_refused() -> None:
    model, data = some_model("power", "bernoulli")
    family = GUIDES["mean field"]()
    server, parties = nodes(model, family, some_parameters(model, family, data), data, shared=True)
    iterations = [Iteration(noise, 0.05) for noise in noises(model, family, ROWS, 1)]
    made = {0: secure.masked_server(server_half(server, iterations), KEYS, GRID, run=b"run")}
    for k, party in enumerate(parties, start=1):
        half = party_half(party, iterations)
        made[k] = secure.masked_party(half, k, KEYS, SIGNING[k], GRID, privacy.from_seed(k), run=b"run")
    with pytest.raises((TypeError, Aborted), match=r"only values of a sum|all parties in every iteration"):
        together(made)


def test_a_party_that_is_not_there_is_no_sum() -> None:
    made, _ = halves("noiseless", True, 2, active=(None, [True, True, False]))
    with pytest.raises(Aborted, match=r"parties \[3\] are missing"):
        together(made)


def test_keys_of_others_are_refused() -> None:
    """Party 2 signs with a key of its own making, or says party 3's advert again."""
    made, _ = halves("noiseless", True, 1)
    model_party = halves("noiseless", False, 1)[0][2]
    made[2] = masked_party(model_party, 2, KEYS, Ed25519PrivateKey.generate(), GRID, privacy.from_seed(9), run=b"run")
    with pytest.raises(ValueError, match="client 2 has signed in this session"):
        together(made)
    for alone in (
        lambda: masked_party(model_party, 1, {1: bytes(32)}, SIGNING[1], GRID, privacy.from_seed(1), run=b"run"),
        lambda: masked_server(model_party, {1: bytes(32)}, GRID, run=b"run"),
    ):
        with pytest.raises(ValueError, match="Expected at least 2 parties of a sum, but got 1"):
            alone()


def test_sums_off_the_grid_are_refused_by_the_server() -> None:
    with pytest.raises(Aborted, match="numbers of at most 1e-06"):
        together(halves("noiseless", True, 1, grid=Grid(40, 1e-6))[0])


def test_parties_of_one_delay_train_under_masks_and_others_are_named() -> None:
    ends = []
    for masks, delays in ((False, (2, 2, 2)), (True, (2, 2, 2)), (True, (0, 2, 0))):
        server, parties, iterations = made_nodes("noiseless", 4)
        made = {0: server_half(server, iterations)}
        made |= {p.index: party_half(p, iterations, delay=delay) for p, delay in zip(parties, delays)}
        made = under_masks(made) if masks else made
        if len(set(delays)) > 1:
            with pytest.raises(Aborted, match="party 2 has received others, or has another delay="):
                together(made)
            return
        together(made)
        ends.append(gathered(server, parties))
        if len(ends) == 2:
            assert distance(*ends) < 1e-8


def test_a_half_that_does_not_say_what_it_was_told_is_refused() -> None:
    def party() -> Half:
        yield Send(0, Summand(torch.zeros(2)))
        yield Receive(0, Gradient(torch.zeros(2)))
        yield Send(0, Summand(torch.zeros(2)))

    def server() -> Half:
        for k in KEYS:
            yield Receive(k, Summand(torch.zeros(2)))
        for k in KEYS:
            yield Send(k, Gradient(torch.zeros(2)))

    with pytest.raises(TypeError, match="a half that binds messages to those received, as party_half does"):
        together(under_masks({0: server(), **{k: party() for k in KEYS}}))


def test_masks_of_one_secret_are_others_in_each_block_of_iterations() -> None:
    """Else words of a party would tell its changes from one block to the next."""
    server, parties, iterations = made_nodes("noiseless", 2)
    entropies, words = {k: privacy.from_seed(k) for k in KEYS}, list[torch.Tensor]()
    for iteration in iterations:
        made = {0: server_half(server, [iteration]), **{p.index: party_half(p, [iteration]) for p in parties}}
        made = under_masks(made, entropies)

        def noted(step: Send | Receive) -> Half:
            if isinstance(step, Send) and isinstance(step.message, Words):
                words.append(step.message.words)
            return (yield step)

        together(made | {1: wrapped(made[1], noted)})
    first, second = (GRID.decode(each) for each in words)
    assert float((second - first).abs().median()) > 1.0e3 > float(parties[0].propose(iterations[0]).sent.abs().max())


def test_what_is_held_of_a_sum_does_not_grow_with_steps() -> None:
    """Bytes of all live tensors when the server has the last words of a step: of the third as of the twentieth."""
    server, parties, iterations = made_nodes("noiseless", 20, active=[None] * 20)
    halves = {0: server_half(server, iterations), **{p.index: party_half(p, iterations) for p in parties}}
    made, held, heard = under_masks(halves), list[int](), itertools.count(1)

    def watched(step: Send | Receive) -> Half:
        answer = yield step
        if isinstance(answer, Words) and next(heard) in (3 * 3, 3 * 20):
            gc.collect()
            tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
            held.append(sum(each.numel() * each.element_size() for each in tensors))
        return answer

    together(made | {0: wrapped(made[0], watched)})
    assert len(held) == 2
    assert held[0] == held[1]


def test_the_first_message_is_a_key_and_the_second_what_the_server_passes_on() -> None:
    made, _ = halves("noiseless", True, 0)
    first = next(made[1])
    assert first.to == 0
    assert isinstance(first.message, Keys)
    assert isinstance(made[1].send(None), Receive)


def ended(product: float, factor: float) -> str:
    """Who ends a run, if any, in which party 1 is sent a gradient that it adds to a value, times a product of rows."""

    def party(times: float) -> Half:
        yield Send(0, Summand(torch.zeros(2, dtype=torch.float64)), bound=b"0")
        heard = yield Receive(0, Gradient(torch.zeros(2, dtype=torch.float64)))
        yield Send(0, Summand(heard.gradient * times), bound=b"1")

    def server() -> Half:
        for _ in range(2):
            for k in KEYS:
                yield Receive(k, Summand(torch.zeros(2, dtype=torch.float64)))
            for k in KEYS if _ == 0 else ():
                yield Send(k, Gradient(torch.tensor([factor, 0.0], dtype=torch.float64)))

    made = under_masks({0: server(), 1: party(product), 2: party(0.0), 3: party(0.0)})
    seen: list[str] = []

    def noted(half: Half, name: str) -> Half:
        try:
            return (yield from half)
        except (ValueError, RuntimeError):
            seen.append(name)
            raise

    with contextlib.suppress(ValueError, RuntimeError):
        together({k: noted(half, "server" if k == 0 else "party") for k, half in made.items()})
    return seen[0] if seen else ""


def test_parties_that_refuse_numbers_beyond_the_grid_tell_products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grid, "total", lambda grid, values, draws, largest, digits=53: grid.encode(values).sum(0))
    low, high = GRID.bound / 1e4, GRID.bound / 1e2
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if ended(1234.5, middle) == "party" else (middle, high)
    assert GRID.bound / low == pytest.approx(1234.5, rel=1e-4)


def test_no_party_refuses_what_it_has_and_the_server_finds_what_is_beyond_the_grid() -> None:
    for product in (1234.5, 4321.0):
        assert [ended(product, factor) for factor in (0.1, 10.0, 1e3, 1e60)] == ["", "server", "server", "server"]
    assert [ended(math.nan, 1.0), ended(math.inf, 1.0), ended(1e300, 1e300)] == ["server"] * 3


def first_sum(parties: tuple[int, ...], folder: Path | None, order: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    """What the server hears of a run of some parties, the first of whom remembers sums where it has a folder.

    The parties' rows are in an order that the server has chosen.
    """

    def party(k: int) -> Half:
        value = torch.tensor([1.5 * k, -k], dtype=torch.float64)[list(order)]
        yield Send(0, Summand(value), start=bytes([k]))

    def server() -> Half:
        for k in parties:
            heard = yield Receive(k, Summand(torch.zeros(len(order), dtype=torch.float64)))
        return heard.value

    keys, run = {k: KEYS[k] for k in parties}, f"run of {len(parties)}".encode()
    made: dict[int, Half] = {0: masked_server(server(), keys, GRID, run=run)}
    for k in parties:
        made[k] = masked_party(party(k), k, keys, SIGNING[k], GRID, run=run, folder=folder if k == 1 else None)
    return together(made)[0][0]


def test_a_party_that_remembers_begins_no_second_run_with_its_value_and_others(tmp_path: Path) -> None:
    """Two runs that differ by a party tell its part, to whom nobody remembers."""
    assert (first_sum((1, 2, 3), None) - first_sum((1, 2), None)).tolist() == [4.5, -3.0]
    with pytest.raises(Refusal, match=r"no sums\.jsonl"):
        first_sum((1, 2, 3), tmp_path)
    past_sums.begin(tmp_path)
    for _ in range(2):  # the same again tells nothing more
        first_sum((1, 2, 3), tmp_path)
    for order in ((0, 1), (1, 0), (1,)):
        with pytest.raises(Refusal, match="takes part in others with the same sites only"):
            first_sum((1, 2), tmp_path, order)


def test_rows_in_another_order_are_the_same_start(tmp_path: Path) -> None:
    """Real parties: one order of rows for all three, another without the third, whose part the difference would be."""
    past_sums.begin(tmp_path)
    features = splits.draw(0, 3, ROWS, 2)

    def begun(which: tuple[int, ...], order: torch.Tensor, folder: Path | None) -> torch.Tensor:
        rows = VerticalData(tuple(features[k - 1][order] for k in which), torch.ones(len(order)).double())
        bottoms = [torch.nn.Linear(2, 1).double() for _ in which]
        network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli())
        server, parties = network.nodes(rows)
        heard = list[torch.Tensor]()

        def noted(step: Send | Receive) -> Half:
            message = yield step
            if isinstance(message, Summand):
                heard.append(message.value.flatten())
            return message

        public, run = {place: KEYS[k] for place, k in enumerate(which, 1)}, bytes(which)
        made = {0: masked_server(wrapped(server_half(server, [Iteration()]), noted), public, GRID, run=run)}
        for (place, k), node in zip(enumerate(which, 1), parties, strict=True):
            half, own = party_half(node, [Iteration()]), folder if k == 1 else None
            made[place] = masked_party(half, place, public, SIGNING[k], GRID, run=run, folder=own)
        together(made)
        return heard[len(which) - 1]

    order, everybody = torch.arange(ROWS), (1, 2, 3)
    turned, back = order.roll(1), order.roll(-1)
    of_all, of_two = begun(everybody, order, tmp_path), begun((1, 2), order, None)
    torch.testing.assert_close(of_all - begun((1, 2), turned, None)[back], of_all - of_two, rtol=0.0, atol=1e-9)
    assert float((of_all - of_two).abs().min()) > 1e-3  # the part that is found is not nothing
    with pytest.raises(Refusal, match="takes part in others with the same sites only"):
        begun((1, 2), turned, tmp_path)


def test_a_half_that_does_not_say_how_it_has_begun_is_not_remembered(tmp_path: Path) -> None:
    def party() -> Half:
        yield Send(0, Summand(torch.zeros(2)))

    def server() -> Half:
        for k in KEYS:
            yield Receive(k, Summand(torch.zeros(2)))

    made = {0: masked_server(server(), KEYS, GRID, run=b"run")}
    made |= {k: masked_party(party(), k, KEYS, SIGNING[k], GRID, run=b"run", folder=tmp_path) for k in KEYS}
    with pytest.raises(TypeError, match="a digest of its first parameters, as party_half gives"):
        together(made)


def test_a_part_of_a_sum_that_is_not_finite_is_found_by_the_server_without_masks() -> None:
    """The party says nothing, which under masks others would see; nobody has moved."""
    server, parties, iterations = made_nodes("noiseless", 1)
    with torch.no_grad():
        for leaf in parties[1].part.parameters():  # of rank 2
            leaf.fill_(torch.nan)
    halves = {0: server_half(server, iterations), **{p.index: party_half(p, iterations) for p in parties}}
    with pytest.raises(ValueError, match="values of party 'number 2', but got NaN or Inf for aligned row 0"):
        together(halves)
