"""Draws follow a client's name: who else is there, and in which order, changes nobody's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.loopback import Loopback
from support.oracles.closed_forms import distance, linear_clients, same_bits
from support.sites import offers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.runs.cohorts import uniform_cohort
from fedtorch.federation.runs.posterior_draws import given_shared, site_draws
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.random import named, philox
from fedtorch.random.named import numbers
from fedtorch.sites.rounds.population import Remote
from fedtorch.tree import Tree
from fedtorch.trust import attacks, privacy

NAMES = ("Turku", "Oulu", "Vaasa", "Espoo", "7", "0")
ROWS = dict(zip(NAMES, linear_clients([6] * len(NAMES))))
COMPANIES = [("Oulu",), ("Vaasa", "Oulu"), NAMES[::-1], ("0", "Espoo", "Oulu", "7")]  # Oulu's; first of all NAMES


def of(names: Sequence[str]) -> ft.data.FederatedData:
    return ft.data.from_tensors([ROWS[name] for name in names], names=list(names))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Flatten(0)).double()


def descent(**more: Any) -> ft.LocalSolver:
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    settings = {"epochs": 2, "batch_size": 2, "optimizer": adam, "loss": nn.functional.mse_loss, **more}
    return ft.gradient_descent(network(), **settings)


def own_models(make: Callable[[], ft.Algorithm], names: Sequence[str], rounds: int = 2, **more: Any) -> dict[str, Tree]:
    run = ft.run(make(), ft.InProcess(of(names)), rounds=rounds, progress=False, **more)
    return {name: tree.map(lambda leaf, k=k: leaf[k], run.tensors()) for k, name in enumerate(names)}


def private() -> ft.LocalSolver:
    return privacy.example_level(
        network(), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=3,
        sampling_rate=0.5, clip=1.0, noise=1.0, delta=1e-3, entropy=privacy.from_seed(0),
    )  # fmt: skip


TRAINED: dict[str, Callable[[], ft.LocalSolver]] = {
    "dropout and Adam": descent,
    "Adam kept": lambda: descent(reset="never"),
    "one by one": lambda: descent(batched=False),
    "rows and noise of a seed": private,
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_client_trains_alone_as_in_any_company(name: str) -> None:
    """Blocks of another number of clients add up in another order: rounding, and nothing else."""
    models = lambda names: own_models(lambda: ft.separate(TRAINED[name]()), names)["Oulu"]
    expected = models(NAMES)
    assert distance(expected, dict(network().requires_grad_(False).named_parameters())) > 1e-3
    for company in COMPANIES:
        assert distance(models(company), expected) < 1e-12


def test_a_client_with_a_loader_is_shuffled_as_in_any_company() -> None:
    def models(names: Sequence[str]) -> Tree:
        loaders = {n: DataLoader(TensorDataset(*ROWS[n]), batch_size=2, shuffle=True) for n in names}
        local = ft.gradient_descent(
            network(), epochs=2, optimizer=lambda p: torch.optim.Adam(p, lr=0.05), loss=nn.functional.mse_loss
        )
        run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_loaders(loaders)), rounds=2, progress=False)
        return tree.map(lambda leaf: leaf[0], run.tensors([list(names).index("Oulu")]))

    expected = models(NAMES)
    for company in COMPANIES:
        assert distance(models(company), expected) < 1e-12


def test_chains_of_a_client_are_those_of_any_company() -> None:
    """Their noise: the distributions differ, by what all clients share."""

    def keys(names: Sequence[str]) -> Tensor:
        algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1, chains=3)
        found = []

        def client(inbox: Tree, state: Tree, data: Any, turn: ft.Turn) -> Any:
            found.append(turn.key)
            return algorithm.client(inbox, state, data, turn)

        watched = dataclasses.replace(algorithm, client=client)
        ft.run(watched, ft.InProcess(of(names)), torch.zeros(3), rounds=1, progress=False)
        return torch.cat(found)[list(names).index("Oulu")]

    assert {int(keys(company)) for company in (NAMES, *COMPANIES)} == {int(keys(("Oulu",)))}


def test_another_order_of_clients_is_the_same_run() -> None:
    """Who is asked, who drops out, and what comes of it."""
    asked, answered, servers = [], [], []
    for names in (NAMES, NAMES[::-1]):
        run = ft.Run(ft.fedavg(descent()), ft.InProcess(of(names)), cohort=4, faults=ft.dropouts(0.2))
        rounds = list(run.rounds(4))
        asked.append([{names[k] for k in round.asked.tolist()} for round in rounds])
        answered.append([{names[k] for k in round.ids.tolist()} for round in rounds])
        servers.append(run.server)
    assert asked[0] == asked[1]
    assert answered[0] == answered[1] != asked[0]
    assert distance(*servers) < 1e-12


COHORTS = {
    "uniform": uniform_cohort(3, len(NAMES)),
    "coins": ft.poisson_cohort(0.5, len(NAMES)),
    "weights": ft.weighted_cohort([1.0] * len(NAMES), 3),
}


@pytest.mark.parametrize("name", COHORTS)
def test_cohorts_follow_names(name: str) -> None:
    cohort = COHORTS[name]
    reverse = numbers(NAMES[::-1])
    for round in range(20):
        key = random.fold_in(random.key(1), round)
        asked = {NAMES[k] for k in cohort.of(numbers(NAMES))(key, 0).tolist()}
        assert asked == {NAMES[::-1][k] for k in cohort.of(reverse)(key, 0).tolist()}
        assert cohort.of(torch.arange(len(NAMES)))(key, 0).equal(cohort(key, 0))  # of clients without names


def test_cohorts_without_names_are_unchanged() -> None:
    for number in range(20):
        key = random.fold_in(random.key(1), number)
        assert COHORTS["uniform"](key, 0).equal(random.choice(key, len(NAMES), 3))
        assert COHORTS["coins"](key, 0).equal(random.bernoulli(key, 0.5, (len(NAMES),)).nonzero()[:, 0])
        arrival = random.exponential(key, (len(NAMES),), torch.float64)
        assert COHORTS["weights"](key, 0).equal(arrival.argsort()[:3].sort().values)


def test_of_fewer_clients_the_smallest_are_asked() -> None:
    """Who was asked and is still there, is asked again."""
    run = lambda names: ft.Run(ft.fedavg(descent()), ft.InProcess(of(names)), cohort=3, seed=5)
    everybody, fewer = run(NAMES), run([name for name in NAMES if name != "Vaasa"])
    for _ in range(5):
        first, second = everybody.step(), fewer.step()
        asked = {NAMES[k] for k in first.asked.tolist()} - {"Vaasa"}
        assert asked <= {fewer.population.names[k] for k in second.asked.tolist()}


def test_a_user_s_cohort_is_by_ids() -> None:
    run = ft.Run(ft.fedavg(descent()), ft.InProcess(of(NAMES)), cohort=lambda key, round: torch.tensor([1, 4]))
    assert run.step().asked.tolist() == [1, 4]


@pytest.mark.parametrize("form", ["integers", "coins", "exponential"])
def test_elements_are_those_of_the_whole_draw(form: str) -> None:
    more = {"integers": (), "coins": (2**31,), "exponential": (torch.float64,)}[form]
    draw, keys = getattr(philox, form), random.fold_in(random.key(3), torch.arange(4))
    which = torch.tensor([40, 3, 2, 1, 0, 99])
    expected, got = draw(keys, (100,), *more)[:, which], draw(keys, (6,), *more, which)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)
    assert len(set(draw(random.key(0), (3,), *more, torch.tensor([2**63 - 1, 2**62, 5])).tolist())) > 1


def test_faults_and_repetitions_follow_names() -> None:
    faults = ft.dropouts(0.3) | ft.stragglers(1.0, torch.ones(len(NAMES))) | ft.duplicated(0.5)
    hit: dict[tuple[str, ...], list[list[set[str]]]] = {}
    for names in (NAMES, NAMES[::-1]):
        run = ft.Run(ft.fedavg(descent()), ft.InProcess(of(names)), faults=faults, seed=2)
        rounds = [run.step() for _ in range(6)]
        kinds = lambda round: (round.lost_before, round.late, round.repeated)
        hit[names] = [[{names[k] for k in ids.tolist()} for ids in kinds(round)] for round in rounds]
    assert hit[NAMES] == hit[NAMES[::-1]]
    assert all(any(round[kind] for round in hit[NAMES]) for kind in range(3))


def test_shares_of_work_follow_names() -> None:
    slow = ft.partial_work(1.0)
    models = lambda names: own_models(lambda: ft.separate(descent(epochs=6)), names, faults=slow)["Oulu"]
    expected = models(NAMES)
    for company in COMPANIES:
        assert distance(models(company), expected) < 1e-12


def test_wrong_rows_follow_names() -> None:
    swapped = lambda names: dict(zip(names, of(names) | noisy(list(names).index("Oulu"))))["Oulu"]
    expected = swapped(NAMES)
    assert not torch.equal(expected[0], ROWS["Oulu"][0])
    for company in COMPANIES:
        assert torch.equal(swapped(company)[0], expected[0])


def noisy(client: int) -> attacks.Poison:
    return attacks.Poison((client,), lambda rows, key: (rows[0] + random.normal(key, (6, 3), torch.float64), rows[1]))


def test_edges_follow_the_names_of_their_nodes() -> None:
    """A network in another order, and one without a node that has no edges, lose the same messages."""
    edges = [("Turku", "Oulu"), ("Oulu", "Vaasa"), ("Espoo", "Turku")]

    def models(names: Sequence[str]) -> dict[str, Tensor]:
        network = ft.Network.from_edges(edges, names=names)
        algorithm = ft.gtv(ft.least_squares(nn.Linear(3, 1).double()), network, 0.3)
        algorithm = algorithm | ft.unreliable_edges(network, loss=0.4, delay=2)
        start = {"weight": torch.zeros(1, 3).double(), "bias": torch.zeros(1).double()}
        run = ft.run(algorithm, ft.InProcess(of(names)), start, rounds=6, progress=False)
        return dict(zip(names, run.tensors()["weight"]))

    expected = models(NAMES)
    for names in (NAMES[::-1], NAMES[:-2], ("Vaasa", "Espoo", "Oulu", "Turku")):
        for name, weight in models(names).items():
            assert distance(weight, expected[name]) < 1e-12


def test_clients_at_sites_draw_by_the_names_that_the_server_knows() -> None:
    make = lambda: ft.fedavg(descent())
    run = lambda population: ft.run(make(), population, rounds=3, cohort=4, progress=False, seed=3)
    one = run(ft.InProcess(of(NAMES)))
    sites = run(Remote(Loopback(offers(of(NAMES), make), None), ["c", "a", "b"], "it"))
    assert sites.population.names != NAMES
    assert {*sites.population.names} == {*NAMES}
    assert distance(sites.server, one.server) < 1e-12


def test_rows_that_come_in_are_trained_with_the_same_draws() -> None:
    def models(names: Sequence[str]) -> Tree:
        growing = ft.Growing(of(names), lambda rounds: torch.full((len(names),), 2 * (rounds + 1)))
        run = ft.run(ft.separate(descent()), growing, rounds=3, progress=False)
        return tree.map(lambda leaf: leaf[0], run.tensors([list(names).index("Oulu")]))

    expected = models(NAMES)
    for company in COMPANIES:
        assert distance(models(company), expected) < 1e-12


def test_draws_of_a_posterior_follow_names() -> None:
    make = lambda: ft.ep(hierarchical.linear(hierarchical.normal(3)))
    phi = torch.zeros(5, len(make().posterior.model.names), dtype=torch.float64)
    keys = random.key(7)
    found = []
    for names in (NAMES, NAMES[::-1]):
        run = ft.run(make(), ft.InProcess(of(names)), rounds=2, progress=False)
        theta = site_draws(run, given_shared(run.algorithm.posterior.model, phi, keys))
        found.append(dict(zip(names, theta)))
    for name in NAMES:
        assert distance(found[0][name], found[1][name]) < 1e-10


# -- names and numbers ---------------------------------------------------------------------------------------------


def test_whole_numbers_are_their_own_and_others_digests() -> None:
    assert numbers(("0", "1", "2")).tolist() == [0, 1, 2]
    assert numbers(("2", "0", str(2**63 - 1))).tolist() == [2, 0, 2**63 - 1]
    others = ("01", "-1", "", "1.0", "١", " 1", str(2**63), "a", "å", "\ud800")
    found = numbers(others)
    assert bool((found > 10**12).all())
    assert int(found[7]) == int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "big") // 2


def test_two_names_of_one_number_are_refused_when_a_run_is_made() -> None:
    twice = ("a", str(int(numbers(("a",)))))
    data = ft.data.from_tensors([ROWS["0"], ROWS["7"]], names=list(twice))
    with pytest.raises(ValueError, match=rf"draws differ, but 'a' and '{twice[1]}' have the same number"):
        ft.Run(ft.fedavg(descent()), ft.InProcess(data))


def test_clients_without_names_are_not_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_number", lambda name: pytest.fail("one by one"))
    names = tuple(map(str, range(100_003)))
    assert numbers(names).equal(torch.arange(100_003))


# -- resuming ------------------------------------------------------------------------------------------------------


def as_it_was(run: ft.Run) -> dict[str, Tensor]:
    """The run's checkpoint as it was when clients drew by their places."""
    flat = run.state_dict()
    about = json.loads(bytes(flat["fingerprint"].tolist()))
    about.pop("draws", None)
    flat["fingerprint"] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    return flat


@pytest.mark.parametrize(
    ("names", "more"), [(NAMES, {}), (None, {"faults": ft.dropouts(0.1)})], ids=["names", "faults"]
)
def test_a_checkpoint_of_other_draws_is_refused(names: Sequence[str] | None, more: Any) -> None:
    data = ft.data.from_tensors(list(ROWS.values()), names=names)
    make = lambda: ft.Run(ft.fedavg(descent()), ft.InProcess(data), cohort=3, **more)
    run = make()
    run.step()
    with pytest.raises(ValueError, match="a run with draws by the clients' names, but got one with None; pass"):
        make().load_state_dict(as_it_was(run))
    again = make()
    again.load_state_dict(run.state_dict())
    assert again.step().asked.equal(run.step().asked)
    assert same_bits(again.server, run.server)


def test_a_checkpoint_of_clients_without_names_goes_on() -> None:
    make = lambda: ft.Run(ft.fedavg(descent()), ft.InProcess(ft.data.from_tensors(list(ROWS.values()))), cohort=3)
    run, again = make(), make()
    run.step()
    assert "draws" not in run.fingerprint()
    again.load_state_dict(as_it_was(run))
    assert again.step().asked.equal(run.step().asked)
