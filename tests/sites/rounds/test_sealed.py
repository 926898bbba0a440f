"""Neighbours' messages through a server that cannot read them: the numbers of one process, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.sites import Carried, carry_of, joined, offers
from test_conformance import ALGORITHMS, population, start

import fedtorch as ft
from fedtorch import tree
from fedtorch.models.gibbs import sparse
from fedtorch.sites import Remote, sealed
from fedtorch.sites.identity import key_directory
from fedtorch.sites.rounds import frames as frames, sites as meeting
from fedtorch.trust import privacy

DATA = linear_clients([5, 2, 9, 4, 17, 6])
NETWORK = ft.Network.from_edges([(i, (i + step) % 6, 1.0 + i + step) for i in range(6) for step in (1, 2)])


def plain() -> ft.Algorithm:
    return ft.gtv(sgd(0.05, steps=2, batch_size=3), NETWORK, {"weight": 0.02, "bias": 0.01})


gtv = Carried(plain, sealed(NETWORK))


class Federation:
    """Three sites of two nodes each, and a run on them."""

    def __init__(
        self, make: Callable[[], ft.Algorithm] = gtv, folder: Path | None = None, data: Any = DATA, **more: Any
    ) -> None:
        self.make, self.frames = make, list[tuple[str, bytes]]()
        self.host = Loopback(offers(data, make, {}, more.pop("sites", 3)), folder, certified().identities)
        self.host.after = self.keep
        self.more = {"seconds": 0.2, "quorum": 1.0, "roster": certified().roster, "rows": data.rows, **more}

    def keep(self, name: str, reply: bytes) -> bytes:
        self.frames.append((name, reply))
        return reply

    def sites(self) -> Remote:
        return Remote(self.host, list(self.host.brought), "it", carry=carry_of(self.make), **self.more)

    def run(self) -> ft.Run:
        return ft.Run(self.make(), self.sites(), seed=3)

    def end(self, run: ft.Run) -> tree.Tree:
        """What all clients predict with when the run is over."""
        run.population.finish(run)
        return tree.concatenate([self.host.sites[name].ended.tensors() for name in self.host.brought])


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def alone(rounds: int, make: Callable[[], ft.Algorithm] = gtv, **more: Any) -> ft.Run:
    return ft.run(make(), ft.InProcess(DATA), rounds=rounds, seed=3, **more)


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gtv", "gtv_regressors", "neighbour_search", pytest.param("edge_weights", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("cohort", [None, 3])
def test_neighbours_hear_what_they_do_in_one_process(name: str, cohort: int | None) -> None:
    """Also where some are silent, which neighbours go on hearing as they were, and where keys are made anew."""
    here, make = population(name), Carried(ALGORITHMS[name], sealed(ft.Network.ring(6)))
    made = Federation(make, data=here.data, rotate=2)
    run, wanted = (
        ft.Run(make(), clients, start(name, make()), seed=3, cohort=cohort) for clients in (made.sites(), here)
    )
    for _ in range(5):
        assert run.step().ids.tolist() == wanted.step().ids.tolist()
    assert run.clients.total() is None
    assert distance(made.end(run), wanted.tensors()) < ROUNDING
    assert run.population.troubles == {}


@pytest.mark.slow
def test_two_sites_and_one_for_each_node() -> None:
    """The penalty acts: without it nodes end elsewhere."""
    wanted = alone(4).tensors()
    for sites in (2, 6):
        made = Federation(sites=sites)
        run = made.run()
        [run.step() for _ in range(4)]
        assert distance(made.end(run), wanted) < ROUNDING
    apart = alone(4, lambda: ft.separate(sgd(0.05, steps=2, batch_size=3)))
    assert distance(apart.tensors(), wanted) > 1e-3


def test_scores_of_models_that_the_server_does_not_know() -> None:
    training, validation = DATA.split(0.7, seed=0)
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}
    made = Federation(data=training)
    for i, name in enumerate(made.host.brought):
        own = validation.select([2 * i, 2 * i + 1])
        made.host.brought[name] = dataclasses.replace(made.host.brought[name], validation=own, metrics=metrics)
        made.host.start(name)
    run, wanted = (ft.Run(gtv(), clients, seed=3) for clients in (made.sites(), ft.InProcess(training)))
    for _ in range(2):
        run.step(), wanted.step()
    found = run.evaluate(run.population.validation, metrics)["mse"]
    assert distance(found.clients, wanted.evaluate(validation, metrics)["mse"].clients) < ROUNDING


def test_the_server_sees_no_model_and_no_message() -> None:
    """Nor do other sites: what stands in frames without seals is not what nodes have told or predict with."""
    told: list[bytes] = []
    for make, seen in ((gtv, False), (plain, True)):
        made = Federation(make)
        heard: list[bytes] = []
        made.host.before = lambda name, frame, heard=heard: heard.append(frame) or True
        run = made.run()
        for _ in range(3):
            run.step()
            for site in made.host.sites.values():
                ids = torch.tensor(range(site._session.first, site._session.first + 2))
                states = site._session.clients.table.read(ids).parameters["weight"]
                told.extend(row.numpy().tobytes() for row in states)
        everything = b"".join(heard + [frame for _, frame in made.frames])
        # Without seals changes travel, of which the first is what a node tells: the start is all the same.
        first = [row.numpy().tobytes() for row in alone(1, plain).server.total["weight"]]
        assert any(part in everything for part in told + first) is seen
        assert (run.last.info == {}) is not seen


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_site_that_is_killed_is_heard_again(tmp_path: Path) -> None:
    """It has other keys, for which its neighbours write anew, of the states that it has kept in its folder."""
    made = Federation(folder=tmp_path)
    run = made.run()
    run.step(), run.step()
    made.host.start("b")
    run.step(), run.step()
    assert distance(made.end(run), alone(4).tensors()) < ROUNDING


def test_a_site_that_is_away_is_heard_as_it_was() -> None:
    """As where its nodes are not asked; the others' keys go on, and it comes back."""
    made = Federation(quorum=0.5)
    run = made.run()
    run.step()
    site = made.host.sites.pop("b")
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    made.host.sites["b"] = site
    made.host.frames.append(("b", site.hello()))
    assert run.step().ids.tolist() == list(range(6))
    wanted = ft.Run(gtv(), ft.InProcess(DATA), seed=3)
    wanted.step()
    wanted.faults = ft.Faults(after=lambda keys, ids: (ids == 2) | (ids == 3))
    wanted.step()
    wanted.faults = None
    wanted.step()
    assert distance(made.end(run), wanted.tensors()) < ROUNDING


def test_a_server_that_goes_back_makes_sites_write_anew(tmp_path: Path) -> None:
    made, file = Federation(folder=tmp_path), tmp_path / "run.safetensors"
    run = made.run()
    run.step(), run.step()
    run.save(file)
    run.step()
    again = made.run().load(file)
    again.step(), again.step()
    assert distance(made.end(again), alone(4).tensors()) < ROUNDING


# -- what is refused ---------------------------------------------------------------------------------------------------


def envelopes_of(run: ft.Run) -> dict[str, dict[str, bytes]]:
    return run.clients.session._envelopes._held


def flip(envelope: bytes, place: int) -> bytes:
    return envelope[:place] + bytes([envelope[place] ^ 1]) + envelope[place + 1 :]


def test_envelopes_that_are_not_as_they_were_sealed() -> None:
    """What "b" says of envelopes that a dishonest server has changed, or of older ones; then it goes on."""
    cases = {
        "replayed": (lambda held: old["a"]["b"], "number 3 comes again"),
        "to another": (lambda held: held["a"]["c"], "for an old key, or for another site's"),
        "of another": (lambda held: held["c"]["b"], "with a key that is not there"),
        "altered": (lambda held: flip(held["a"]["b"], -1), "altered, or is of another edge"),
        "another number": (lambda held: flip(held["a"]["b"], 0), "altered, or is of another edge"),
        "unknown key": (lambda held: flip(held["a"]["b"], 9), "with a key that is not there"),
        "none": (lambda held: b"envelope", "but got 8 bytes"),
        "withheld": (lambda held: b"", "but got 0 bytes"),
    }
    made = Federation(quorum=0.5)
    run = made.run()
    run.step()
    old = {name: dict(found) for name, found in envelopes_of(run).items()}
    run.step(), run.step()
    for changed, expected in cases.values():
        held = envelopes_of(run)
        held["a"]["b"] = changed(held)
        assert run.step().ids.tolist() == [0, 1, 4, 5]
        assert expected in run.population.troubles["b"]
    assert run.step().ids.tolist() == list(range(6))  # the others have written anew


def test_envelopes_for_keys_that_are_gone() -> None:
    made = Federation(quorum=0.5, rotate=2)
    run = made.run()
    run.step(), run.step()
    old = envelopes_of(run)["a"]["b"]
    keep = run.clients.session._envelopes.keep

    def stale(envelopes: Any) -> None:
        keep({name: {**found, **({"b": old} if name == "a" else {})} for name, found in envelopes.items()})

    run.clients.session._envelopes.keep = stale
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert "with a key that is not there" in run.population.troubles["b"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ft.fedavg(sgd(0.1)), "needs other messages"),
        (
            lambda: ft.without_server(ft.gibbs(sparse.regression(), sparse.hierarchy()), NETWORK),
            "needs other messages",
        ),
        (lambda: ft.gtv(sgd(0.1), NETWORK, 0.5) | ft.unreliable_edges(NETWORK, loss=0.1), "needs other messages"),
        (lambda: ALGORITHMS["matrix_normal"](), "needs other messages"),
    ],
    ids=["star", "without_server", "unreliable_edges", "private_rows"],
)
def test_what_envelopes_between_neighbours_cannot_do(make: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        sealed(NETWORK).carried(make())


def test_sites_that_seal_take_part_in_nothing_else() -> None:
    made = Federation()
    with pytest.raises(ValueError, match="Expected roster="):
        Remote(made.host, ["a", "b", "c"], "it", carry=sealed(NETWORK)).bind(gtv(), None)
    with pytest.raises(RuntimeError, match="the site runs messages sealed envelopes, not None"):
        ft.Run(gtv(), Remote(made.host, ["a", "b", "c"], "it", seconds=0.05)).step()
    run = made.run()
    run.step()
    session = made.host.sites["a"]._session
    site = made.host.sites["a"]
    reason = lambda kind: frames.read(
        site.answer(frames.encode(kind, run=session.run, sequence=5, kept=session._version, keep=[], sizes={})), "a"
    ).text("reason")
    assert "to their neighbours only" in reason("total")
    assert "no sum under masks" in reason("phase")
    with pytest.raises(ValueError, match="persistent contributions whose sums the server can read"):
        run.population.withdraw(run, "b")


# -- and with privacy of nodes -----------------------------------------------------------------------------------------


def test_nodes_that_add_noise_seal_it_too() -> None:
    """So little noise that numbers are those without it, but for the clipping, which does nothing here."""
    make = lambda: ft.gtv(sgd(0.05, steps=2), NETWORK, 0.02) | privacy.node_level(clip=1e3, noise=1e-12, delta=1e-3)
    made = Federation(Carried(make, sealed(NETWORK)))
    run = made.run()
    [run.step() for _ in range(3)]
    plain = ft.run(ft.gtv(sgd(0.05, steps=2), NETWORK, 0.02), ft.InProcess(DATA), rounds=3, seed=3)
    assert distance(made.end(run), plain.tensors()) < 1e-5  # clip is cut by 2⁻²⁰ of what it lets through


def test_threads_that_come_and_go() -> None:
    """The same over links of a hub, with sites in threads."""
    made = certified()
    more = {"identities": made.identities, "roster": made.roster, "rows": DATA.rows, "carry": gtv.carry}
    with joined(offers(DATA, gtv), **more) as (sites, threads):
        run = ft.run(gtv(), sites, rounds=3, seed=3)
        sites.finish(run)
        for thread in threads.values():
            thread.join(10.0)
        found = tree.concatenate([threads[name].session.tensors() for name in "abc"])
    assert distance(found, alone(3).tensors()) < ROUNDING


# -- the signed key directory ------------------------------------------------------------------------------------------


def announced(made: Any, name: str, run: str) -> bytes:
    return key_directory.RunKeys(made.identities[name], run, 0, 2).announcement(0)


def test_directories_that_are_not_to_be_believed() -> None:
    made, run = certified(), "0" * 32
    words = [
        key_directory.RunKeys(made.identities[name], run, 2 * i, 2).announcement(0) for i, name in enumerate("abc")
    ]
    authority = made.identities["a"].authority
    found = key_directory.read(key_directory.write(made.roster, words), authority, run)
    assert [key_directory.speaker(word, made.roster, run) for word in words] == list(found.speakers)
    assert [(each.name, each.first, each.clients) for each in found.speakers] == [("a", 0, 2), ("b", 2, 2), ("c", 4, 2)]
    other = certified("abd")
    cases: list[tuple[bytes, str]] = [
        (key_directory.write(other.roster, words), "the authority has not signed it"),
        (key_directory.write(made.roster, [words[0], words[0]]), "each other's clients"),
        (key_directory.write(made.roster, words[::-1]), "each other's clients"),
        (key_directory.write(made.roster, [words[0].replace(b"first", b"fjrst")]), "'a' has not signed it"),
        (
            key_directory.write(made.roster, [key_directory.RunKeys(other.identities["d"], run, 0, 2).announcement(0)]),
            "'d' has another key",
        ),
        (
            key_directory.write(
                made.roster, [key_directory.RunKeys(made.identities["a"], "1" * 32, 0, 2).announcement(0)]
            ),
            "another run",
        ),
        (b"[]", "not enough values"),
        (b"{", "Expected a signed key directory"),
        (b'["{}"]', "Expected a signed key directory"),
    ]
    for data, expected in cases:
        with pytest.raises(ValueError, match=expected):
            key_directory.read(data, authority, run)
