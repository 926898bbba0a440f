"""A vertical party that is a federation of sites moves as one that has all rows; lost sites and bad rows are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, same_bits
from support.verticals import GUIDES, ROWS, gathered, noises, some_model, some_parameters

import fedtorch as ft
from fedtorch import vfl
from fedtorch.sites.vertical import FederatedParty
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode

PLACES = [[7, 0, 3, 9, 11], [1, 2], [4, 5, 6, 8, 10]]
NAMES = ["north", "south", "west"]
SGD: Any = lambda leaves: torch.optim.SGD(leaves, lr=0.0003)


def sites(x: torch.Tensor, places: list[list[int]] = PLACES) -> ft.data.FederatedData:
    return ft.data.from_tensors([(x[rows], torch.tensor(rows)) for rows in places], NAMES[: len(places)])


def fitted(
    guide: str, federated: bool, per_row: bool = False, local_steps: int = 1, chunk: int | None = None, **settings: Any
) -> vfl.NodesRun:
    """Some iterations in which the second party has all rows, or is a federation of three sites."""
    model, data = some_model("augmented", "gaussian")
    data = data._replace(weight=torch.linspace(0.5, 1.5, ROWS).double())
    q = some_parameters(model, GUIDES[guide](), data)
    top, *holders = parts(model, GUIDES[guide](), q)
    known = data.known_to_parties(response=guide == "amortised, y seen")
    nodes: list[PartyNode] = [PartyNode(part, own, optimizer=SGD, per_row=per_row) for part, own in zip(holders, known)]
    if federated:
        population = ft.InProcess(sites(data.features[1]), chunk)
        own = known[1]._replace(features=())
        nodes[1] = FederatedParty(holders[1], own, population, optimizer=SGD, per_row=per_row, **settings)
    server = ServerNode(top, prepared(model, data).known_to_server(), optimizer=SGD, per_row=per_row)
    drawn = noises(model, GUIDES[guide](), ROWS, 4)
    return vfl.NodesRun(server, nodes, iteration=lambda t: Iteration(drawn[t], step=t), local_steps=local_steps)


def done(run: vfl.NodesRun, rounds: int = 4) -> vfl.Parameters:
    for _ in run.rounds(rounds):
        pass
    return gathered(run.server, run.parties)


@pytest.mark.parametrize("guide", ["amortised", "amortised, y seen", "sums", "noiseless"])
@pytest.mark.parametrize(("per_row", "local_steps"), [(False, 1), (True, 2)])
def test_it_moves_as_one_party_with_all_rows(guide: str, per_row: bool, local_steps: int) -> None:
    whole, divided = (fitted(guide, federated, per_row, local_steps) for federated in (False, True))
    assert distance(done(divided), done(whole)) < ROUNDING
    assert divided.history["train_loss"].to_list() == pytest.approx(whole.history["train_loss"].to_list(), rel=1e-12)


def test_the_same_in_every_chunk_and_order_of_sites() -> None:
    one, other = (done(fitted("amortised", True, chunk=chunk)) for chunk in (None, 1))
    assert distance(one, other) < ROUNDING
    run = fitted("amortised", True)
    party = run.parties[1]
    x = torch.empty(ROWS, 3, dtype=torch.float64)
    for own, rows in party.sites:
        x[rows] = own
    turned = ft.InProcess(sites(x, [list(reversed(rows)) for rows in reversed(PLACES)]))
    run.parties[1] = FederatedParty(party.part, party.data, turned, optimizer=SGD)
    assert distance(done(run), one) < ROUNDING


def test_a_network_of_a_split_party_lies_at_sites() -> None:
    """A bottom network, trained by the gradients of sites alone."""

    def run(federated: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 8).double()[:, None]
        data = vfl.VerticalData((x, torch.cat([x.square(), x.cos()], 1)), (x[:, 0] > 0.2).double())
        make: Callable[[int], torch.nn.Module] = lambda width: torch.nn.Sequential(
            torch.nn.Linear(width, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        ).double()
        network = vfl.SplitNetwork([make(1), make(2)], vfl.likelihoods.bernoulli())
        server, nodes = network.nodes(data, optimizer=SGD)
        if federated:
            population = ft.InProcess(sites(data.features[1], [[3, 0], [1, 2, 7], [6, 4, 5]]))
            own = nodes[1].data._replace(features=())
            nodes[1] = FederatedParty(nodes[1].part, own, population, optimizer=SGD, per_row=nodes[1].per_row)
        fit = vfl.NodesRun(server, nodes)
        for _ in fit.rounds(6):
            pass
        return {name: leaf.detach() for name, leaf in nodes[1].part.named_parameters()}

    with torch.random.fork_rng(devices=[]):
        assert distance(run(True), run(False)) < ROUNDING


def test_it_goes_on_from_what_it_has_saved() -> None:
    whole = done(fitted("amortised", True))
    half = fitted("amortised", True)
    done(half, 2)
    again = fitted("amortised", True)
    again.load_state_dict(half.state_dict())
    assert same_bits(done(again), whole)


def test_a_site_that_is_lost_is_named_and_nothing_moves() -> None:
    run = fitted("amortised", True, faults=ft.dropouts(0.999))
    before = gathered(run.server, run.parties)
    with pytest.raises(RuntimeError, match=r"an answer of every site of party .* but got none of '(north|south|w)"):
        done(run)
    assert same_bits(gathered(run.server, run.parties), before)


def test_what_does_not_fit_is_refused() -> None:
    model, data = some_model("augmented", "gaussian")
    guide = GUIDES["amortised"]()
    part = parts(model, guide, some_parameters(model, guide, data))[2]
    known = data.known_to_parties(response=False)[1]
    own, x = known._replace(features=()), data.features[1]

    def make(places: list[list[int]] = PLACES, known: vfl.VerticalData = own) -> FederatedParty:
        return FederatedParty(part, known, ft.InProcess(sites(x, places)))

    with pytest.raises(ValueError, match="Expected no features at the party itself"):
        make(known=known)
    with pytest.raises(ValueError, match="Expected each of 12 aligned rows at a site, but none has row 10"):
        make([*PLACES[:2], [4, 5, 6, 8]])
    with pytest.raises(ValueError, match="row 0 of 'west' is also at 'north'"):
        make([*PLACES[:2], [4, 5, 6, 8, 0]])
    with pytest.raises(ValueError, match="Expected all rows in every iteration of a federated party"):
        make().propose(Iteration(noises(model, guide, ROWS, 1)[0], rows=torch.arange(4)))
    rows = GUIDES["mean field"]()
    each = parts(model, rows, some_parameters(model, rows, data))[2]
    with pytest.raises(ValueError, match="Expected an amortised family of z, but got one with parameters for ev"):
        FederatedParty(each, own, ft.InProcess(sites(x)))
    other, _ = some_model("power", "gaussian")
    powered = parts(other, guide, some_parameters(other, guide, data))[2]
    with pytest.raises(ValueError, match="Expected a model whose likelihood the server evaluates"):
        FederatedParty(powered, own._replace(response=data.response), ft.InProcess(sites(x)))
    wide = ft.data.from_tensors([(torch.ones(ROWS, 5).double(), torch.arange(ROWS))], ["north"])
    with pytest.raises(ValueError, match="north"):
        FederatedParty(part, own, ft.InProcess(wide))
