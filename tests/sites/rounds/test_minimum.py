"""`Policy(minimum=)` during a fit: no number of fewer rows leaves a site; sums are held by the rows of all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from safetensors.torch import load
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.sites import Carried, carry_of, offers, servers_keys

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.algorithms.matrix_normal.posterior import FACTORS
from fedtorch.inference.comparison import DENSITIES
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree, join, masked, sealed
from fedtorch.sites.rounds import frames, session as session_of_sites, sites as meeting
from fedtorch.sites.rounds._behind import Behind
from fedtorch.sites.rounds._pseudonyms import Pseudonyms
from fedtorch.sites.rounds.past_cohorts import PastCohorts
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.sites.rounds.session import SiteSession
from fedtorch.sites.rounds.site import Site
from fedtorch.trust import robust, secure

TEN = Policy()
DATA = linear_clients([3, 3, 3, 3, 40, 50])  # at two sites: three patients and one of them, and large wards
SUM_OF_FEW = "sums of at least 10 rows, and the 1 of its clients"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


@pytest.fixture(autouse=True)
def in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are numbered as the tests say, and not in the order of their pseudonyms, which is another each time."""
    monkeypatch.setattr(Site, "_in_order", lambda site, configuration: configuration)


def fedavg() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


def on_sites(
    make: Callable[[], ft.Algorithm] = fedavg,
    data: ft.data.FederatedData = DATA,
    policy: Policy = TEN,
    sites: int = 1,
    **more: Any,
) -> ft.Run:
    host = Loopback(offers(data, make, {}, sites, policy=policy), None, certified().identities)
    roster = {} if carry_of(make) == TEN.carry else {"roster": certified().roster}
    names = [chr(ord("a") + k) for k in range(sites)]
    remote = Remote(host, names, "it", rows=data.rows, seconds=0.05, quorum=1.0, carry=carry_of(make), **roster)  # type: ignore[arg-type]
    return ft.Run(make(), remote, seed=3, **more)


# -- the attack --------------------------------------------------------------------------------------------------------

PATIENT = {"ward": "isolation", "age": 50.9, "sex": "m"}


def regression(design: ft.data.Design) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design))


def wards() -> pandas.DataFrame:
    """Rows of a site, one of whose wards has one patient."""
    draws = numpy.random.default_rng(0)
    frame = pandas.DataFrame({"ward": ["north", "south", "east"] * 20, "age": draws.uniform(20, 80, 60).round(1)})
    frame["sex"] = draws.choice(["f", "m"], 60)
    frame.loc[7, list(PATIENT)] = list(PATIENT.values())
    frame["score"] = 0.1 * frame["age"] + draws.normal(size=60)
    return frame


def asked_alone(frame: pandas.DataFrame, ward: str, policy: Policy) -> tuple[float, float]:
    """What a server learns that asks for one ward alone, twice: (age, 1 if male)."""
    host = Loopback({"a": SiteConfiguration.of_frame(frame, "ward", {"it": regression}, policy=policy)}, None)
    design = agree(host, ["a"], "score ~ age + sex + (1 | ward)", client="ward", minimum=10)
    remote = Remote(host, ["a"], "it", quorum=1.0, seconds=0.05)
    run = ft.Run(regression(design), remote, cohort=[host.brought["a"].data.names.index(ward)])
    run.step(), run.step()
    precision, scale = run.server.total.site.precision, design.encoding.standard["age"]
    return scale.mean + scale.sd * float(precision[1] / precision[0]), float(precision[10] / precision[6])


def test_a_ward_of_one_patient_tells_its_age_and_sex_and_by_default_nothing(caplog: Any) -> None:
    age, _ = asked_alone(wards(), "isolation", Policy(minimum=1))
    assert age == pytest.approx(PATIENT["age"], abs=0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match=SUM_OF_FEW) as refusal:
        asked_alone(wards(), "isolation", TEN)
    assert "isolation" not in str(refusal.value)
    assert "no sum: clients ['isolation'] have fewer than 10 rows" in caplog.text  # in the site's own log


# -- what adds up, and what does not -----------------------------------------------------------------------------------


def test_clients_of_three_rows_are_added_up() -> None:
    """`(1 | patient)` with three rows each: the numbers are those of one process."""
    here = ft.run(fedavg(), ft.InProcess(DATA), rounds=3, seed=3)
    there = on_sites()
    [there.step() for _ in range(3)]
    assert distance(there.server, here.server) < ROUNDING


@pytest.mark.parametrize("make", [fedavg, lambda: ft.scaffold(sgd(0.05)), lambda: ft.feddyn(sgd(0.1), 0.1)])
def test_a_cohort_of_few_rows_is_refused_and_one_of_enough_is_not(make: Callable[[], ft.Algorithm]) -> None:
    run = on_sites(make, cohort=[0, 1, 2, 3])
    run.step()
    run._draw = lambda key, number: torch.tensor([0])
    with pytest.raises(RuntimeError, match=SUM_OF_FEW):
        run.step()
    run._draw = lambda key, number: torch.tensor([4])  # of 40 rows
    run.step()


def test_who_is_lost_on_the_way_counts_as_not_asked() -> None:
    """A server that says of all messages but one that they were lost."""
    run = on_sites(faults=ft.Faults(after=lambda key, ids: ids > 0))
    with pytest.raises(RuntimeError, match=SUM_OF_FEW):
        run.step()


GOES_ALONE = {
    "graph": lambda: ft.gtv(sgd(0.1), ft.Network.ring(6), 0.5),
    "robust": lambda: fedavg() | robust.rule(robust.median()),
    "sealed": Carried(lambda: ft.gtv(sgd(0.1), ft.Network.ring(6), 0.5), sealed(ft.Network.ring(6))),
}


@pytest.mark.parametrize("name", GOES_ALONE)
def test_what_goes_client_by_client_is_held_by_each_clients_rows(name: str, caplog: Any) -> None:
    sites = 3 if name == "sealed" else 1
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="client 0 has fewer than 10 rows") as no:
        on_sites(GOES_ALONE[name], sites=sites).step()
    assert "'client 0'" not in str(no.value)
    assert "no messages of single clients: clients ['client 0'" in caplog.text
    on_sites(GOES_ALONE[name], sites=sites, policy=Policy(minimum=3)).step()


def test_under_masks_the_sum_is_of_several_sites() -> None:
    make = Carried(fedavg, masked(secure.Grid(30, 2.0**20), dropouts=0))
    run = on_sites(make, linear_clients([3, 3, 3, 3, 3, 3]), sites=3)
    run.step()
    assert run.number == 1


# -- losses ------------------------------------------------------------------------------------------------------------


def test_losses_of_small_clients_are_told_as_one_and_of_large_ones_as_they_are() -> None:
    here = ft.run(fedavg(), ft.InProcess(DATA), rounds=1, seed=3).last.info["loss"]
    small = on_sites().step().info["loss"]
    assert distance(small, here.mean().expand(6)) < ROUNDING
    large = on_sites(cohort=[4, 5]).step().info["loss"]
    assert distance(large, here[4:]) < ROUNDING


def test_a_log_that_not_all_small_clients_have_is_not_told() -> None:
    """A mean over those that have a value is of fewer rows than all that answered have."""

    def noted(having: int) -> ft.Algorithm:
        made = fedavg()

        def client(inbox: Any, state: Any, data: Any, turn: Any) -> ft.Reply:
            reply = made.client(inbox, state, data, turn)
            age = torch.full_like(reply.info["loss"], 50.9)
            age[having:] = torch.nan
            return reply._replace(info={**reply.info, "age": age})

        return replace(made, client=client)

    for having in (1, 5):
        assert on_sites(lambda having=having: noted(having)).step().info["age"].isnan().all()
    assert on_sites(lambda: noted(6)).step().info["age"].tolist() == [50.9] * 6


def test_separate_training_tells_losses_only_and_those_of_few_rows_never_alone() -> None:
    """Nothing that is sent is of rows; the losses are, and two cohorts' means, or a mean and a loss of one of two
    clients, would differ by a client."""
    make = lambda: ft.separate(sgd(0.1))
    here = ft.run(make(), ft.InProcess(DATA), rounds=1, seed=3).last.info["loss"]
    assert distance(on_sites(make).step().info["loss"], here.mean().expand(6)) < ROUNDING
    for cohort in ([0], [0, 1, 2, 3, 4], [4, 5]):
        with pytest.raises(RuntimeError, match="send only losses, and one of them has few rows"):
            on_sites(make, cohort=cohort).step()
    large = linear_clients([40, 50])
    there = ft.run(make(), ft.InProcess(large), rounds=1, seed=3).last.info["loss"]
    assert distance(on_sites(make, large, cohort=[1]).step().info["loss"], there[1:]) < ROUNDING
    assert on_sites(make, linear_clients([2, 3])).step().info["loss"].isnan().all()


def asked_of(run: ft.Run, clients: list[int]) -> torch.Tensor:
    """Return the losses of a round of these clients, whatever the run's cohort is."""
    session, every = run.clients.session, type(run.clients.session).of_site
    with pytest.MonkeyPatch.context() as patched:
        chosen = lambda site, cohort=None: torch.tensor(clients) if cohort is None else every(session, site, cohort)
        patched.setattr(session, "of_site", chosen)
        return run.step().info["loss"]


def test_a_client_that_trained_alone_is_what_two_means_of_all_losses_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loss then follows to rounding, and from a few of these its row."""
    make, patient = lambda: ft.separate(sgd(0.1)), 2
    in_process = ft.Run(make(), ft.InProcess(DATA.select([patient])))
    alone = [float(in_process.step().info["loss"]) for _ in range(2)]
    before = on_sites(make).step().info["loss"]
    with pytest.raises(RuntimeError, match="the mean of all would disclose these"):
        asked_of(on_sites(make), [patient])
    monkeypatch.setattr(SiteSession, "_check_rows", lambda session, ids: None)
    run = on_sites(make)
    assert asked_of(run, [patient]).isnan().all()
    change = 6 * (run.step().info["loss"] - before)[0]
    assert change.item() == pytest.approx(alone[1] - alone[0], rel=1e-9)


OWN_MODELS = {"separate": lambda: ft.separate(sgd(0.1)), "ditto": lambda: ft.ditto(sgd(0.1), strength=0.5)}


@pytest.mark.parametrize("make", OWN_MODELS.values(), ids=OWN_MODELS)
def test_a_sum_of_scores_of_clients_own_models_would_follow_one_model(
    make: Callable[[], ft.Algorithm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of a client's training rows, which are many, changes the score of its validation rows, which are few."""
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}
    training, validation = linear_clients([40, 50, 60, 70]), linear_clients([3] * 4)

    def change() -> float:
        brought = offers(training, make, sites=1, policy=TEN)["a"]
        host = Loopback({"a": replace(brought, validation=validation, metrics=metrics)}, None)
        run = ft.Run(make(), Remote(host, ["a"], "it", rows=training.rows, quorum=1.0, seconds=0.05), seed=3)
        total = lambda: 12 * float(run.evaluate(run.population.validation, metrics)["mse"].overall)
        before = total()
        asked_of(run, [2])
        return total() - before

    with pytest.raises(RuntimeError, match="only where all of its clients have one model"):
        change()
    monkeypatch.setattr(session_of_sites, "one_of", lambda tree, alike="": tree)
    run = ft.Run(make(), ft.InProcess(training.select([2])), seed=3)
    own = [run.evaluate(validation.select([2]), metrics)["mse"].overall]
    run.step()
    own.append(run.evaluate(validation.select([2]), metrics)["mse"].overall)
    assert change() == pytest.approx(3 * float(own[1] - own[0]), rel=1e-6)


def test_scores_of_few_validation_rows_are_told_as_one_sum_of_all_clients() -> None:
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}

    def scored(policy: Policy, ask: slice = slice(None)) -> tuple[Any, Any]:
        brought = offers(DATA, fedavg, sites=1, policy=policy)["a"]
        host = Loopback({"a": replace(brought, validation=DATA, metrics=metrics)}, None)
        remote = Remote(host, ["a"], "it", rows=DATA.rows, quorum=1.0, seconds=0.05)
        run = ft.run(fedavg(), remote, rounds=1, seed=3)
        if ask != slice(None):
            every = run.clients.session.of_site
            run.clients.session.of_site = lambda site, cohort=None: every(site, cohort)[ask]
        return run.evaluate(remote.validation, metrics)["mse"], run

    alone, _ = scored(Policy(minimum=1))
    assert not alone.clients.isnan().any()
    together, _ = scored(TEN)
    assert together.overall == pytest.approx(alone.overall, rel=1e-12)
    assert together.clients.isnan().tolist() == [False] + [True] * 5
    with pytest.raises(RuntimeError, match="all clients of the site, some of which have few validation rows"):
        scored(TEN, slice(0, 5))


def elsewhere(run: ft.Run) -> None:
    """Make a server send the first client other tensors than the others."""
    session = run.clients.session
    sent = session.inboxes

    def inboxes(outbox: Any, ids: torch.Tensor) -> frames.Inboxes:
        starts = tree.map(torch.clone, sent(outbox, ids).inbox)
        [leaf[0].add_(1) for leaf in tree.leaves(starts) if leaf.is_floating_point()]
        return frames.Inboxes(ids, starts)

    session.inboxes = inboxes


def test_scores_of_few_rows_are_of_one_model() -> None:
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}

    def scored(policy: Policy) -> None:
        brought = offers(DATA, fedavg, sites=1, policy=policy)["a"]
        host = Loopback({"a": replace(brought, validation=DATA, metrics=metrics)}, None)
        run = ft.Run(fedavg(), Remote(host, ["a"], "it", rows=DATA.rows, quorum=1.0, seconds=0.05), seed=3)
        elsewhere(run)
        run.evaluate(run.population.validation, metrics)

    scored(Policy(minimum=1))
    with pytest.raises(RuntimeError, match="only where all of its clients were sent the same"):
        scored(TEN)


def test_scores_on_a_graph_are_of_each_nodes_own_validation_rows() -> None:
    """A node's model is its own, so that one sum of scores may follow one node's model."""
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}
    training = linear_clients([40, 50, 60])
    make = lambda: ft.gtv(sgd(0.1), ft.Network.ring(3), 0.5)

    def scored(validation: ft.data.FederatedData) -> Any:
        brought = offers(training, make, sites=1, policy=TEN)["a"]
        host = Loopback({"a": replace(brought, validation=validation, metrics=metrics)}, None)
        run = ft.run(make(), Remote(host, ["a"], "it", rows=training.rows, quorum=1.0, seconds=0.05), rounds=1, seed=3)
        return run.evaluate(run.population.validation, metrics)["mse"]

    assert not scored(linear_clients([10, 12, 11])).clients.isnan().any()
    with pytest.raises(RuntimeError, match="client 1 has fewer than 10 validation rows"):
        scored(linear_clients([30, 9, 30]))


def test_log_densities_of_few_rows_are_over_one_cavity() -> None:
    def told(minimum: int, one: bool = False) -> Any:
        make = lambda: ft.ep(hierarchical.linear(hierarchical.normal(3, random=[]), noise=1.0))
        run = on_sites(make, policy=Policy(minimum=minimum, after_fit=("densities",)))
        run.step()
        if not one:
            elsewhere(run)
        sent = {"phi": torch.zeros(2, 3).double(), "key": ft.random.key(0)}
        return run.clients.ask(run.outbox, DENSITIES, sent, {"method": "waic"})["elpd"][0]

    assert told(1).isfinite()
    assert told(10, one=True).isfinite()
    with pytest.raises(RuntimeError, match="only where all of its clients were sent the same"):
        told(10)


def test_sums_over_devices_that_the_server_weighs_are_held_by_each_devices_rows() -> None:
    """With a weight of zero for all others, they are of one device."""
    head = ft.LinearHead(3, intercept=False, dtype=torch.float64)
    make = lambda: ft.matrix_normal(ft.least_squares(head), noise=1.0)
    each = {"noise": torch.ones(2).double(), "factor": torch.tensor([[1.0], [0.0]]).double()}

    def asked(minimum: int) -> Any:
        run = on_sites(make, linear_clients([3, 40]), Policy(minimum=minimum, after_fit=("effects",)))
        return run.clients.ask(run.outbox, FACTORS, {"multiple": torch.full((1,), 1e-9).double()}, {}, each)

    assert asked(3).right.isfinite().all()
    for minimum in (4, 10):
        with pytest.raises(RuntimeError, match=f"{minimum} rows"):
            asked(minimum)


def test_whose_message_is_not_finite_is_not_told_where_clients_have_few_rows(caplog: Any) -> None:
    """A server may choose starts at which a message overflows if a client's row is large."""
    x, y = (torch.cat(each) for each in zip(*linear_clients([3, 3, 3, 3])))
    x[0] = 1e300
    data = ft.data.from_tensors(list(zip(x.split(3), y.split(3))))

    def last_said(policy: Policy) -> frames.Frame:
        said = list[bytes]()
        host = Loopback(offers(data, fedavg, {}, 1, policy=policy), None)
        host.after = lambda name, reply: said.append(reply) or reply
        with pytest.raises((RuntimeError, ValueError)):
            ft.Run(fedavg(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05)).step()
        return frames.read(said[-1], "a")

    assert last_said(Policy(minimum=1)).about["refused"].keys() == {"0"}
    with caplog.at_level(logging.WARNING):
        reason = last_said(TEN).about["reason"]
    assert "not every message is finite" in reason
    assert not any(character.isdigit() for character in reason)
    assert "no sum: clients ['0'] failed, or sent messages that are not finite: " in caplog.text


# -- sums over one start -----------------------------------------------------------------------------------------------


def sum_of(run: ft.Run, clients: list[int]) -> dict[str, torch.Tensor]:
    """What the clients' changes of a round over the first start add up to, as the server knows it."""
    before = tree.to(run.server, copy=True)
    run._draw = lambda key, number: torch.tensor(clients)
    run.step()
    rows = sum(int(DATA.counts[client]) for client in clients)
    found = {name: rows * (leaf - before[name]) for name, leaf in run.server.items()}
    run.server = before
    return found


def test_two_cohorts_over_one_start_tell_a_client_and_by_default_nothing() -> None:
    run = on_sites(policy=Policy(minimum=1))
    one, other = sum_of(run, [0, 1, 2, 4]), sum_of(run, [1, 2, 4])
    alone = sum_of(ft.Run(fedavg(), ft.InProcess(DATA), seed=3), [0])
    assert distance({name: one[name] - other[name] for name in one}, alone) < 1e-12
    run = on_sites()
    sum_of(run, [0, 1, 2, 4])
    with pytest.raises(RuntimeError, match="difference would come from fewer than 10 rows"):
        sum_of(run, [1, 2, 4])
    sum_of(run, [0, 1, 2, 4])  # the same may be asked again
    sum_of(run, [5])  # and others
    run.server = tree.map(lambda leaf: leaf + 1.0, run.server)
    sum_of(run, [1, 2, 4])  # and from another start


def test_clients_of_few_rows_are_added_up_over_one_start_only() -> None:
    """Two sums that differ in the start of one client would tell what that client makes of both."""

    def one_elsewhere(policy: Policy) -> None:
        run = on_sites(policy=policy)
        elsewhere(run)
        run.step()

    one_elsewhere(Policy(minimum=1))
    with pytest.raises(RuntimeError, match="only where all of its clients were sent the same"):
        one_elsewhere(TEN)


def test_sets_that_differ_by_enough_rows() -> None:
    run = on_sites()
    sum_of(run, [0, 1, 2, 3, 4, 5])
    sum_of(run, [0, 1, 2, 3])  # of twelve rows
    with pytest.raises(RuntimeError, match="fewer than 10 rows"):
        sum_of(run, [1, 2, 3, 5])


def test_three_sums_no_two_of_which_tell_a_client() -> None:
    """{0}, {1} and all three: the last less both would be what the third client, of three rows, has said."""
    data = linear_clients([10, 10, 3])
    run = on_sites(data=data)
    for clients in ([0], [1]):
        run._draw = lambda key, number, clients=clients: torch.tensor(clients)
        before = tree.to(run.server, copy=True)
        run.step()
        run.server = before
    run._draw = lambda key, number: torch.arange(3)  # differs from either by thirteen rows
    with pytest.raises(RuntimeError, match="fewer than 10 rows"):
        run.step()


def test_over_runs_and_restarts(tmp_path: Path) -> None:
    host = Loopback(offers(DATA, fedavg, {}, 1, policy=TEN), tmp_path)

    def run() -> ft.Run:
        remote = Remote(host, ["a"], "it", rows=DATA.rows, seconds=0.05, quorum=1.0)
        return ft.Run(fedavg(), remote, seed=3)

    sum_of(run(), [0, 1, 2, 4])
    host.start("a")
    with pytest.raises(RuntimeError, match="fewer than 10 rows"):
        sum_of(run(), [1, 2, 4])
    host.start("a")
    sum_of(run(), [0, 1, 2, 4])
    file = tmp_path / "a" / "cohorts.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"set":0', b'"set":7'))
    host.start("a")
    with pytest.raises(RuntimeError, match=r"cohorts\.jsonl is damaged"):
        sum_of(run(), [0, 1, 2, 4])


def test_a_client_that_is_gone_is_not_what_two_sums_differ_by() -> None:
    memory, rows = PastCohorts(None), {"x": 3, "y": 40}
    behind = lambda names: sum(rows[name] for name in names)
    memory.add(b"1" * 32, ["x", "y"], ["x", "y"], behind, 10)
    with pytest.raises(Refusal, match="fewer than 10 rows"):
        memory.add(b"1" * 32, ["y"], ["y"], behind, 10)
    memory.add(b"2" * 32, ["y"], ["y"], behind, 10)


# -- what clients tell for good ----------------------------------------------------------------------------------------


def test_who_tells_for_the_first_time_does_so_with_enough_others(caplog: Any) -> None:
    make = lambda: ft.scaffold(sgd(0.05))
    run = on_sites(make, linear_clients([3, 3, 3, 3, 3, 3, 40]), cohort=[0, 6])
    answered = []
    for cohort in ([0, 6], [0, 1, 6], [1, 2, 3, 6], [1, 2, 3, 4, 6], [5, 6], range(7)):
        run._draw = lambda key, number, cohort=cohort: torch.tensor(list(cohort))
        answered.append(run.step().ids.tolist())
    waits = "left out until others contribute for the first time together with them"
    assert f"{waits}: clients ['client 1'] have fewer than 10 rows" in caplog.text
    assert answered == [[0, 6], [0, 6], [6], [1, 2, 3, 4, 6], [6], [0, 1, 2, 3, 4, 6]]
    run._draw = lambda key, number: torch.tensor([5])
    with pytest.raises(RuntimeError, match=SUM_OF_FEW):
        run.step()


def test_whose_messages_are_lost_do_not_tell_with_the_others() -> None:
    """The server says of three of four that they are lost, so that the fourth would tell alone."""
    make = lambda: ft.scaffold(sgd(0.05))
    run = on_sites(make, cohort=[4])
    run.step()
    run._draw = lambda key, number: torch.arange(5)
    run.faults = ft.Faults(after=lambda key, ids: ids < 3)
    assert run.step().ids.tolist() == [4]


def test_who_leaves_does_so_with_enough_others(tmp_path: Path) -> None:
    """A run that goes back, and then on without a client, from another start."""

    def twice(make: Callable[[], ft.Algorithm]) -> None:
        run = on_sites(make, cohort=[4])
        run.step()
        run.save(tmp_path / "run.ckpt")
        run._draw = lambda key, number: torch.arange(5)
        run.step()
        run.load(tmp_path / "run.ckpt")
        server = run.server if isinstance(run.server, dict) else run.server.parameters
        [leaf.add_(1e-9) for leaf in server.values()]
        run._draw = lambda key, number: torch.arange(1, 6)  # client 5 in the place of client 0
        run.step()

    twice(fedavg)
    with pytest.raises(RuntimeError, match="difference would come from fewer than 10 rows"):
        twice(lambda: ft.scaffold(sgd(0.05)))


# -- persons -----------------------------------------------------------------------------------------------------------


def test_twelve_rows_of_one_patient_are_one_person(caplog: Any) -> None:
    frame = wards().assign(patient=range(60))
    mine = pandas.concat([frame[7:8]] * 12)  # visits: the ward has twelve rows, of one patient
    visits = pandas.concat([frame.drop(index=7), mine], ignore_index=True)
    age, _ = asked_alone(visits, "isolation", TEN)
    assert age == pytest.approx(PATIENT["age"], abs=0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="sums of at least 10 persons"):
        asked_alone(visits, "isolation", Policy(person="patient"))
    assert "no sum: clients ['isolation'] have fewer than 10 persons" in caplog.text
    asked_alone(visits, "north", Policy(person="patient"))  # of twenty


def test_a_person_in_two_clients_counts_once_in_their_sum() -> None:
    rows = Behind(TEN, torch.tensor([9, 9]), ["x", "y"], 4, {"x": frozenset(range(9)), "y": frozenset(range(9))})
    assert not rows.is_enough(torch.tensor([4, 5]))
    assert rows.named(["x", "y"]) == 9
    assert Behind(TEN, torch.tensor([9, 9]), ["x", "y"], 4).is_enough(torch.tensor([4, 5]))


def test_cohorts_that_are_refused_tell_which_visits_are_of_one_patient_and_count_as_rounds() -> None:
    """Of twelve visits the last two are of one patient: two others left out leave nine patients."""
    visits = pandas.concat([wards()[:11], wards()[10:11]]).assign(ward=[f"v{k}" for k in range(12)])
    visits["patient"] = [*range(11), 10]
    make = lambda design: ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)))

    def said(rounds: int | None) -> list[str]:
        policy = Policy(person="patient", rounds=rounds)
        host = Loopback({"a": SiteConfiguration.of_frame(visits, "ward", {"it": make}, policy=policy)}, None)
        agree(host, ["a"], "score ~ age + (1 | ward)", client="ward", scales={"age": (50, 10), "score": (0, 1)})
        start, remote = torch.zeros(1, 2, dtype=torch.float64), Remote(host, ["a"], "it", quorum=1.0, seconds=0.05)
        run, answers = ft.Run(make(None), remote, {"weight": start}), list[str]()
        for first in range(12):
            try:
                asked_of(run, sorted({*range(12)} - {first, (first + 1) % 12}))
                answers.append("a sum")
            except RuntimeError as error:
                answers.append(str(error))
        return answers

    enough = ["sums of at least 10 persons" not in each for each in said(None)]
    assert [k for k in range(12) if enough[k] and enough[k - 1]] == [10, 11]
    assert ["does not answer more" in each for each in said(3)] == [False] * 3 + [True] * 9


def test_a_level_of_one_patient_is_told_to_no_server_where_persons_count() -> None:
    visits = pandas.concat([wards()[:1].assign(sex="x")] * 12 + [wards()], ignore_index=True)
    visits["patient"] = [0] * 12 + list(range(1, 61))

    def levels(policy: Policy) -> Any:
        brought = SiteConfiguration.of_frame(visits, "ward", {"it": regression}, policy=policy)
        other = {} if policy.person is None else {"other": {"sex": "other"}}
        design = agree(Loopback({"a": brought}, None), ["a"], "score ~ age + sex + (1 | ward)", client="ward", **other)
        return design.encoding.levels["sex"].names

    assert levels(TEN) == ("f", "m", "x")
    assert levels(Policy(person="patient")) == ("f", "m", "other")


def test_a_policy_whose_persons_are_in_no_frame() -> None:
    algorithms = {"it": fedavg}
    with pytest.raises(ValueError, match="a column of the site's frame"):
        SiteConfiguration(DATA, algorithms, Policy(person="patient"))
    with pytest.raises(ValueError, match="a column of the site's frame"):
        SiteConfiguration.of_frame(wards(), "ward", algorithms, policy=Policy(person="patient"))
    holes = wards().assign(patient=[None, *range(59)])
    with pytest.raises(ValueError, match="missing cells"):
        SiteConfiguration.of_frame(holes, "ward", algorithms, policy=Policy(person="patient"))


# -- names -------------------------------------------------------------------------------------------------------------


def patients(visits: int = 3) -> pandas.DataFrame:
    """Rows of a site whose clients are patients, each by a number that somebody else has too."""
    draws = numpy.random.default_rng(1)
    frame = pandas.DataFrame({"patient": [f"B-18{k:02d}" for k in range(20)] * visits})
    frame["age"] = draws.uniform(20, 80, len(frame)).round(1)
    frame["score"] = 0.1 * frame["age"] + draws.normal(size=len(frame))
    return frame


def met(host: Loopback) -> tuple[tuple[str, ...], bytes]:
    """(the names that a server hears, all that the site says from its first word until after a round)."""
    said = [frame for _, frame in host.frames]
    host.after = lambda name, reply: (said.append(reply), reply)[1]
    design = agree(host, ["a"], "score ~ age + (1 | patient)", client="patient", minimum=10)
    remote = Remote(host, ["a"], "it", quorum=1.0, seconds=0.05)
    ft.run(regression(design), remote, rounds=1)
    return remote.names, b"".join(said)


def of_frame(frame: pandas.DataFrame, policy: Policy = TEN) -> SiteConfiguration:
    return SiteConfiguration.of_frame(frame, "patient", {"it": regression}, policy=policy)


def test_patients_numbers_leave_a_site_and_by_default_do_not(tmp_path: Path) -> None:
    names, said = met(Loopback({"a": of_frame(patients(), Policy(minimum=1))}, None))
    assert set(names) == set(patients()["patient"])
    assert b"B-18" in said
    host = Loopback({"a": of_frame(patients())}, tmp_path)
    names, said = met(host)
    assert b"B-18" not in said
    assert len(set(names)) == 20
    host.start("a")
    assert met(host)[0] == names  # of another process of the site
    elsewhere, _ = met(Loopback({"a": of_frame(patients())}, tmp_path / "other"))
    assert not set(elsewhere) & set(names)


def test_a_patient_of_many_rows_has_no_name_either_where_others_have_few() -> None:
    frame = pandas.concat([patients(), *[patients(1)[:1]] * 12], ignore_index=True)
    _, said = met(Loopback({"a": of_frame(frame)}, None))
    assert b"B-18" not in said


def test_what_a_name_was_told_as_it_is_told_as_for_good(tmp_path: Path) -> None:
    wide = patients(10)  # all have enough rows
    host = Loopback({"a": of_frame(wide)}, tmp_path)
    names, _ = met(host)
    assert names == tuple(wide["patient"][:20])
    host.brought["a"] = of_frame(pandas.concat([wide, patients(1)[:1].assign(patient="C-7")], ignore_index=True))
    host.start("a")
    grown, said = met(host)
    assert grown[:20] == names
    assert grown[20].startswith("client ")
    assert b"C-7" not in said


def test_two_processes_of_a_site_tell_a_name_as_the_same(tmp_path: Path) -> None:
    """Both begin before either has told anything, and neither forgets what the other has told."""
    one, two = Pseudonyms(tmp_path), Pseudonyms(tmp_path)
    both = one.aliases(("B-1", "B-2"), hidden=True)
    assert two.aliases(("B-2", "B-3"), hidden=True)[0] == both[1]
    assert one.aliases(("B-1", "B-2", "B-3", "ward"), hidden=False)[:2] == both
    again = Pseudonyms(tmp_path).aliases(("B-1", "B-2", "B-3", "ward"), hidden=True)
    assert again == (*both, two.aliases(("B-3",), hidden=True)[0], "ward")


def test_who_begins_at_once_makes_one_secret(tmp_path: Path) -> None:
    """Each has a lock of its own on the file, as a process has."""
    ready = threading.Barrier(8)

    def told(number: int) -> tuple[str, ...]:
        names = Pseudonyms(tmp_path)
        ready.wait()
        return names.aliases((f"B-{number}", "B-9"), hidden=True)

    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(told, range(8)))
    assert len({last for _, last in every}) == 1
    assert Pseudonyms(tmp_path).aliases([f"B-{k}" for k in range(8)], hidden=True) == tuple(first for first, _ in every)


def test_row_counts_of_few_rows_are_told_as_a_mean() -> None:
    count = lambda *rows: Behind(TEN, torch.tensor(rows), [str(k) for k in range(len(rows))], 0).reported_counts()
    assert count(3, 40, 1, 9, 50) == [5, 40, 4, 4, 50]
    assert count(1, 40, 20, 0) == [11, 40, 10, 0]  # with the next fewest, for of one row no sum is told
    assert count(30, 40) == [30, 40]
    assert count(2) == [2]


def test_join_says_once_what_a_small_minimum_means(caplog: Any) -> None:
    def said(rows: list[int], policy: Policy) -> str:
        links = iter([ConnectionError("not yet"), PermissionError("another process")])

        def dial() -> Any:
            raise next(links)

        caplog.clear()
        with pytest.raises(PermissionError, match="another process"):
            join(dial, offers(linear_clients(rows), fedavg, sites=1, policy=policy)["a"])
        return caplog.text

    alone = said([1], Policy(minimum=1))
    assert alone.count("Policy(minimum=1) allows messages from only 1 rows") == 1
    assert "allows messages from only 5 rows" in said([2, 5, 40], Policy(minimum=3))
    assert "fewer than the 10 rows" in said([1], TEN)
    assert "minimum" not in said([30], TEN)
    assert "minimum" not in said([3, 40], TEN)
    assert "minimum" not in said([30], Policy(minimum=1))


@pytest.mark.parametrize(
    ("additive", "taken", "persons", "leaves"),
    [
        (True, 2, None, False),  # 2 + 2 + 2 rows
        (True, 4, None, True),
        (False, 4, None, False),
        (False, 10, None, True),
        (True, 4, 4, False),  # who may be the same four persons in each client
        (True, 10, 20, True),
        (True, 10, 9, False),
    ],
)
def test_rows_that_a_round_takes_are_counted(additive: bool, taken: int, persons: int | None, leaves: bool) -> None:
    rows, names = torch.tensor([30, 40, 50]), ["a", "b", "c"]
    known = None if persons is None else dict.fromkeys(names, frozenset(range(persons)))
    behind = Behind(TEN, rows, names, 0, known)
    if leaves:
        behind.check_taken(torch.arange(3), additive, taken)
        return
    with pytest.raises(Refusal, match="take larger batches, more steps, or epochs"):
        behind.check_taken(torch.arange(3), additive, taken)


def drawing() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=2))


def site_in(folder: Path) -> Loopback:
    return Loopback(offers(DATA, drawing, {}, 1, policy=TEN), folder)


def three_rounds(host: Loopback, folder: Path | None = None) -> tuple[ft.Run, tuple[str, ...]]:
    """A fit that draws, with whose folder server and site begin anew in its middle; the names that the server knows."""

    def run() -> ft.Run:
        return ft.Run(drawing(), Remote(host, ["a"], "it", rows=DATA.rows, seconds=0.05, quorum=1.0), seed=3)

    there = run()
    there.step(), there.step()
    names = there.population.names
    if folder is not None:
        there.save(folder / "run.ckpt")
        host.start("a")
        there = run()
        assert there.population.names == names
        there.load(folder / "run.ckpt")
    there.step()
    return there, names


def test_a_fit_that_draws_is_that_of_one_process_with_the_names_that_the_server_knows(tmp_path: Path) -> None:
    """But for the keys, which are the site's own. Restarts of both sides in the middle change no bit of it."""
    with servers_keys():
        there, names = three_rounds(site_in(tmp_path), tmp_path)
    assert not set(names) & set(DATA.names)
    for known, same in ((names, True), (DATA.names, False)):
        here = ft.run(drawing(), ft.InProcess(replace(DATA, names=known)), rounds=3, seed=3)
        assert (distance(there.server.parameters, here.server.parameters) < ROUNDING) == same


def test_a_fit_that_draws_is_repeated_to_the_bit_with_the_sites_folder_only(tmp_path: Path) -> None:
    one, two = site_in(tmp_path / "one"), site_in(tmp_path / "two")
    once, again, other = (
        three_rounds(host, folder)[0].server.parameters["weight"]
        for host, folder in ((one, None), (one, tmp_path), (two, None))
    )
    assert torch.equal(once, again)
    assert not torch.allclose(once, other)


def test_patients_at_one_site_and_wards_with_names_at_another_are_one_fit() -> None:
    data = linear_clients([3, 3, 3, 3, 40, 50, 60, 70])
    make = lambda: ft.ep(hierarchical.linear(hierarchical.normal(3), noise=0.5))
    run = on_sites(make, data, sites=2)
    assert run.population.names[4:] == data.names[4:]
    assert not set(run.population.names[:4]) & set(data.names)
    [run.step() for _ in range(3)]
    here = ft.run(make(), ft.InProcess(data), rounds=3, seed=3)
    assert distance(run.server.total.site.precision, here.server.total.site.precision) < 1e-9


# -- who notices nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fedavg, lambda: ft.gtv(sgd(0.1), ft.Network.ring(3), 0.5)])
def test_hospitals_that_are_one_client_of_many_rows_notice_nothing(make: Callable[[], ft.Algorithm]) -> None:
    """All that they say is the same without the rule, to the bit."""
    said: list[list[dict[str, Any]]] = []
    data = linear_clients([30, 40, 25])
    for policy in (TEN, Policy(minimum=1)):
        run = on_sites(make, data, policy, sites=3)
        got: list[bytes] = []
        host = run.population.plan.sites.host
        host.after = lambda name, reply, got=got: got.append(reply) or reply
        [run.step() for _ in range(3)]
        said.append([{name: leaf.tolist() for name, leaf in load(reply).items()} for reply in got])
        [answer.pop("__counters__") for answer in said[-1]]  # of frames
        said[-1] += [frames.read(site.hello(), name).about for name, site in host.sites.items()]
    assert len(said[0]) == 9 + 3
    assert said[0] == said[1]
    assert [(about["clients"], about["rows"]) for about in said[0][9:]] == [
        ([name], [count]) for name, count in zip(data.names, data.counts.tolist())
    ]


def test_a_site_that_is_one_person_says_so() -> None:
    phone = linear_clients([1])
    with pytest.raises(RuntimeError, match=r"smaller Policy\(minimum=\)"):
        on_sites(data=phone).step()
    on_sites(data=phone, policy=Policy(minimum=1)).step()
