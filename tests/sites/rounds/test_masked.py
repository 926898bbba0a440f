"""Secure sums between sites: those of one process, whoever drops out; the server sees no message of a site."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, same_bits, sgd
from support.sites import Carried, carry_of, offers
from test_conformance import ALGORITHMS, STARTS, population, start

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Sum
from fedtorch.federation.runs import run as running
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, Roster
from fedtorch.sites.identity import identity, key_directory
from fedtorch.sites.rounds import frames as frames, sites as meeting
from fedtorch.sites.secure import ExactSums, Grid
from fedtorch.sites.secure.masked import Masked, Parties, masked as secure_masked
from fedtorch.sites.secure.messages import ADVERT, MASKED, PHASES, SHARES
from fedtorch.sites.secure.neighbours import neighbourhoods
from fedtorch.trust import secure

GRID = Grid(30, 2.0**20)
SIZES = [5, 2, 9, 4, 17, 6]
DATA = linear_clients(SIZES)
FINE = Grid(12, 2.0**40)  # for messages of which some are large


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def masked(make: Callable[[], ft.Algorithm], grid: Any = GRID, **more: Any) -> Carried:
    """Of three sites that all have to stay, if nothing else is said."""
    return Carried(make, secure_masked(grid, **{"dropouts": 0, **more}))


def alone(make: Callable[[], ft.Algorithm], data: Any, chunk: int | None = None) -> ft.InProcess:
    """The same in one process."""
    return ft.InProcess(data, chunk, carry=carry_of(make))


def fedavg() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


def scaffold() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05))


def phase_of(frame: bytes) -> int:
    """In which phase a request to a site is."""
    about = frames.read(frame, "the server").about
    return {"round": ADVERT}.get(about["kind"], about.get("phase", 0))


class Federation:
    """Sites that keep frames, and a run on them."""

    def __init__(
        self,
        make: Callable[[], ft.Algorithm],
        data: Any = DATA,
        sites: int = 3,
        folder: Path | None = None,
        **more: Any,
    ) -> None:
        first = more.pop("start", None)
        configuration = {name: more.pop(name) for name in ("policy",) if name in more}
        self.make, self.frames = make, list[tuple[str, bytes]]()
        self.host = Loopback(offers(data, make, first, sites, **configuration), folder, certified().identities)
        self.host.after = self.keep
        self.more = {"seconds": 0.2, "quorum": 1.0, "roster": certified().roster, "rows": data.rows, **more}

    def keep(self, name: str, reply: bytes) -> bytes:
        self.frames.append((name, reply))
        return reply

    def gone(self, names: str, phase: int) -> None:
        """Sites end when they are asked for their message of a phase; begun anew they stay."""
        left = set(names)

        def before(name: str, frame: bytes) -> bool:
            if name in left and phase_of(frame) == phase:
                left.remove(name)
                self.host.kill(name)
                return False
            return True

        self.host.before = before

    def run(self, parameters: Any = None, **more: Any) -> ft.Run:
        return ft.Run(
            self.make(),
            Remote(self.host, list(self.host.brought), "it", **{"carry": carry_of(self.make), **self.more}),
            parameters,
            seed=3,
            **more,
        )


# -- the same sums -----------------------------------------------------------------------------------------------------

EXACT = {"gibbs"}
SUMS = ["fedavg", "scaffold", "personal_layers", "feddyn", "fedadam", "ep", "fedmgp", "normal_em", "gibbs"]
FAST = {"gibbs", "normal_em"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in SUMS])
def test_sites_add_up_what_one_process_does(name: str) -> None:
    """Clients one by one are the same operations, so that sums on the grid are the same to the bit."""
    here, make = population(name), masked(ALGORITHMS[name], ExactSums() if name in EXACT else FINE)
    made = Federation(make, here.data, sites=6, start=STARTS.get(name))
    first = start(name, make())
    run = made.run(first)
    wanted = ft.Run(make(), alone(make, here.data, chunk=1), first, seed=3)
    for _ in range(2):
        run.step(), wanted.step()
    if name in EXACT:
        assert same_bits(run.server, wanted.server)
    assert distance(run.server, wanted.server) < ROUNDING
    assert run.last.ids.tolist() == list(range(6))


@pytest.mark.parametrize("make", [fedavg, scaffold])
def test_the_same_operations_under_masks_give_the_same_bits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one size, two at a site, also where some are silent, and where the total is made anew."""
    monkeypatch.setattr(running, "TOTAL_ANEW", 2)
    data, silent = linear_clients([8] * 6), ft.Faults(after=lambda keys, ids: ids == 2)
    made = Federation(masked(make), data)
    run = made.run(faults=silent)
    wanted = ft.Run(made.make(), alone(made.make, data, chunk=2), seed=3, faults=silent)
    for _ in range(3):
        run.step(), wanted.step()
        assert run.last.ids.tolist() == wanted.last.ids.tolist() == [0, 1, 3, 4, 5]
        assert same_bits(run.server, wanted.server)
    assert run.history["bytes_up"].iloc[-1] > 3 * 5 * 64  # signed messages of three sites in five phases


# -- who drops out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [pytest.param(p, marks=() if p == MASKED else pytest.mark.slow) for p in PHASES])
def test_a_site_that_drops_out(phase: int, tmp_path: Path) -> None:
    """Before it has sent masked words it is left out and goes back; later it is in the sum, and goes on."""
    made = Federation(masked(scaffold, dropouts=0.2), sites=6, folder=tmp_path, quorum=0.5)
    run = made.run()
    run.step()
    made.gone("c", phase)
    run.step()
    stay = [i for i in range(6) if i != 2 or phase > MASKED]
    assert run.last.ids.tolist() == stay
    made.host.start("c")
    run.step()
    assert run.last.ids.tolist() == list(range(6))
    fate = ft.Faults(after=lambda keys, ids: (ids == 2) & (phase <= MASKED))
    wanted = ft.Run(made.make(), alone(made.make, DATA), seed=3)
    wanted.step()
    wanted.faults = fate
    wanted.step()
    wanted.faults = None
    wanted.step()
    assert distance(run.server, wanted.server) < 1e-7  # on the grid of 2⁻³⁰, in other blocks


def test_too_few_that_stay_are_no_sum_and_the_round_can_be_done_again() -> None:
    made = Federation(masked(fedavg, minimum=5, dropouts=0.2), sites=6, quorum=0.5)
    run = made.run()
    before = tree.to(run.server, copy=True)
    made.gone("ab", MASKED)
    with pytest.raises(RuntimeError, match="smaller than the minimum 5"):
        run.step()
    assert run.number == 0
    assert same_bits(run.server, before)
    made.host.start("a"), made.host.start("b")
    assert run.step().ids.tolist() == list(range(6))
    with pytest.raises(RuntimeError, match="adds up under masks with 5 sites at least, not 4"):
        made.run(cohort=[0, 1, 2, 3]).step()


def test_a_line_that_breaks_between_phases_changes_nothing() -> None:
    """What was answered is answered again with the same bytes: the site does not mask anything twice."""
    made, said = Federation(masked(fedavg)), list[bytes]()

    def after(name: str, reply: bytes) -> bytes | None:
        if name != "b" or "sizes" not in frames.read(reply, name).about:
            return reply
        said.append(reply)
        if len(said) % 2 == 0:  # but for keys, every answer is lost once
            made.host.frames.append((name, made.host.sites[name].hello()))
            return None
        return reply

    made.host.after = after
    run = made.run()
    assert run.step().ids.tolist() == list(range(6))
    assert len(said) >= 2 * len(PHASES)
    assert said[2::2] == said[1::2]
    assert distance(run.server, ft.run(made.make(), alone(made.make, DATA), rounds=1, seed=3).server) < 1e-7


@pytest.mark.slow
def test_a_site_that_was_killed_has_other_secrets(tmp_path: Path) -> None:
    made = Federation(masked(scaffold), folder=tmp_path, quorum=1.0, seconds=0.05)
    run = made.run()
    run.step()
    killed = []

    def before(name: str, frame: bytes) -> bool:
        if name == "b" and phase_of(frame) == SHARES and not killed:
            killed.append(name)
            made.host.start(name)
        return True

    made.host.before = before
    with pytest.raises(RuntimeError, match="smaller than the minimum 3"):
        run.step()
    assert run.number == 1
    run.step()
    assert distance(run.server, ft.run(made.make(), alone(made.make, DATA), rounds=2, seed=3).server) < 1e-7


# -- what the server sees ----------------------------------------------------------------------------------------------


def test_no_frame_has_a_message_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a site or a client adds up, as numbers or as words, nor what it trains on; without masks it does."""
    told: list[bytes] = []
    honest = Masked.party

    def party(self: Any, parties: Any, number: int, signing: bytes, found: Any) -> Any:
        made = honest(self, parties, number, signing, found)
        told.append(made.words.numpy().tobytes())
        for leaf in tree.leaves(found.rows.message):
            told.extend(part.numpy().tobytes() for part in (leaf, leaf.sum(0), *leaf) if part.numel() > 1)
        return made

    monkeypatch.setattr(Masked, "party", party)
    made = Federation(masked(scaffold), linear_clients([8] * 6))
    run = made.run()
    run.step(), run.step()
    seen = b"".join(frame for _, frame in made.frames)
    assert len(told) > 6 * 5
    assert not any(part in seen for part in told)
    kinds = {frames.read(frame, name).kind for name, frame in made.frames}
    assert kinds == {"answer"}
    fields = {name for sender, frame in made.frames for name in frames.read(frame, sender).about}
    assert fields <= {"kind", "sequence", "sizes", "clients", "everybody", "info", "refused"}
    assert run.last.info == {}
    plain = Federation(scaffold, linear_clients([8] * 6))
    other = plain.run()
    other.step()
    control = linear_clients([8] * 6)
    one = ft.Run(scaffold(), ft.InProcess(control.select([0, 1])), seed=3)
    one.step()
    assert any(
        leaf.numpy().tobytes() in b"".join(frame for _, frame in plain.frames) for leaf in tree.leaves(one.server.total)
    )


def test_a_server_that_sends_sites_different_models_gets_no_sum() -> None:
    made = Federation(masked(fedavg))
    run = made.run()
    scatter = run.clients.session.algorithm.exchange.scatter

    def unlike(outbox: Any, ids: Any) -> Any:
        heard = scatter(outbox, ids)
        return tree.map(lambda leaf: leaf + 1, heard) if 2 in torch.arange(6)[ids] else heard

    exchange = run.clients.session.algorithm.exchange._replace(scatter=unlike)
    run.clients.session.algorithm = dataclasses.replace(run.clients.session.algorithm, exchange=exchange)
    with pytest.raises(RuntimeError, match="Expected at least"):
        run.step()


def test_the_same_messages_are_not_added_up_with_and_without_a_site() -> None:
    """A server that asks for a round twice: of all sites, and of all but one, whose message would be the difference."""
    made = Federation(masked(fedavg, dropouts=0.2), sites=6, quorum=0.5)
    one, other = made.run(), made.run()
    one.step()
    other.clients.session.run = one.clients.run
    other._draw = lambda key, number: torch.arange(5)
    with pytest.raises(RuntimeError, match="takes part in others with the same sites only"):
        other.step()
    other._draw = None
    other.step()
    assert same_bits(other.server, one.server)
    one.step()


@pytest.mark.parametrize(
    ("sites", "minimum", "graph"), [(6, 3, (5, 4, 1)), (6, 5, (5, 4, 1)), (3, 3, (2, 2, 0)), (65, 3, (64, 36, 6))]
)
def test_few_sites_mask_with_all_others(sites: int, minimum: int, graph: Any) -> None:
    """A minimum less one have to work together, at least; of many sites, as if 40 bits of the choice were lost."""
    carry = secure_masked(GRID, minimum, dropouts=0.2 if sites > 3 else 0)
    near = lambda sites: carry.server(
        Parties(b"run", 1, {k + 1: bytes([k]) * 32 for k in range(sites)}), Sum(torch.zeros(0, 2))
    ).session.graph  # fmt: skip
    assert near(sites) == graph
    if sites == 65:
        assert near(90) == neighbourhoods(90, dropouts=0.2, secrecy=80)


def test_the_server_that_is_meant_is_agreed_on_and_on_record() -> None:
    """A site that hides its sums from a server that cheats does not take part where only a curious one is meant."""
    run = Federation(masked(fedavg, adversary="curious")).run()
    assert "a server that is curious" in run.fingerprint()["messages"]
    assert "messages" not in ft.Run(fedavg(), ft.InProcess(DATA)).fingerprint()
    site = Federation(masked(fedavg))
    site.make = masked(fedavg, adversary="curious")
    with pytest.raises(RuntimeError, match=r"a server that is active.*, not .*a server that is curious"):
        site.run().step()
    with pytest.raises(ValueError, match="3 clients that an active server cannot outwit"):
        Federation(masked(fedavg, dropouts=0.3)).run()


# -- whom sites believe ------------------------------------------------------------------------------------------------


def test_a_roster_that_another_authority_has_signed_is_not_believed() -> None:
    """Sites' own keys are those of the roster, so that the server notices nothing."""
    run = Federation(masked(fedavg)).run()
    keyring, folder = run.clients.session._keyring, certified("abd").folder
    sites = {name: identity.fingerprint(certified().identities[name].certificate) for name in "abc"}
    other = Roster(folder / "other.json")
    [other.add(name, key) for name, key in sites.items()]
    keyring._roster = key_directory.sign_roster(folder, other)
    with pytest.raises(RuntimeError, match="the authority has not signed it"):
        run.step()


def test_an_older_roster_is_not_believed() -> None:
    """In which there may be a site that has been revoked since."""
    made = Federation(masked(fedavg))
    run, folder = made.run(), certified().folder
    run.step()
    run.clients.session._keyring._roster = key_directory.sign_roster(
        folder, Roster(folder / "roster.json"), now=lambda: 0.0
    )
    with pytest.raises(RuntimeError, match="older than one that the site has seen"):
        run.step()


def of_another_run(name: str) -> bytes:
    return key_directory.RunKeys(certified().identities[name], "0" * 32, 2, 2).announcement(0)


def keys_of(name: str, word: bytes, first: int = 2) -> bytes:
    """An announcement for the run of another one."""
    return key_directory.RunKeys(
        certified().identities[name], json.loads(json.loads(word)["said"])["run"], first, 2
    ).announcement(0)


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (lambda word: b"keys", "Expected keys that a site of the roster has signed"),
        (lambda word: word.replace(b"first", b"fjrst"), "'b' has not signed it"),
        (lambda word: keys_of("c", word), "expected keys of 'b' with its clients"),
        (lambda word: keys_of("b", word, first=0), "expected keys of 'b' with its clients"),
        (
            lambda word: key_directory.RunKeys(certified().identities["b"], "0" * 32, 2, 2).announcement(0),
            "for another run",
        ),
    ],
    ids=["none", "changed", "of another", "of other clients", "of another run"],
)
def test_a_site_with_keys_that_others_would_not_believe_is_left_out(lie: Any, expected: str) -> None:
    """By the server, which it could otherwise keep from all sums."""
    made = Federation(masked(fedavg), sites=3)

    def after(name: str, reply: bytes) -> bytes:
        frame = frames.read(reply, name)
        if name != "b" or "keys" not in frame.about.get("sizes", {}):
            return reply
        return frames.encode_blobs("answer", {"keys": lie(frame.blob("keys"))}, sequence=frame.about["sequence"])

    made.host.after = after
    run = made.run()
    with pytest.raises(RuntimeError, match="Expected answers of at least 3 of 3 sites") as error:
        run.step()
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"roster": None}, "Expected roster="),
        ({"sites": 2}, "at least 3 sites"),
    ],
)
def test_masks_that_cannot_be(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Federation(masked(fedavg), **more).run()


def test_exchanges_that_have_no_protocol_between_sites() -> None:
    network = ft.Network.from_edges([(i, (i + step) % 6) for i in range(6) for step in (1, 2)])
    make = Carried(lambda: ft.gtv(sgd(0.1), network, 0.5), secure.masked_graph(network, GRID))
    with pytest.raises(ValueError, match="masked_graph, which runs in one process"):
        Federation(make).run()
    with pytest.raises(ValueError, match="apart=1 over sites"):
        Federation(masked(fedavg, apart=3)).run()


def test_what_needs_every_client_s_message_has_no_sums() -> None:
    with pytest.raises(ValueError, match="Expected an algorithm over a plain star for sums under masks"):
        Federation(masked(ALGORITHMS["matrix_normal"])).run()


def test_sites_that_mask_take_part_in_nothing_else() -> None:
    made = Federation(masked(fedavg))
    plain = ft.Run(fedavg(), Remote(made.host, list(made.host.brought), "it", seconds=0.05))
    with pytest.raises(RuntimeError, match="under 'it' the site runs messages sums under masks"):
        plain.step()
    made.host.identities = {}
    for name in made.host.brought:
        made.host.start(name)
    with pytest.raises(RuntimeError, match="no identity to sign keys with"):
        made.run().step()


def test_what_was_told_under_masks_cannot_be_withdrawn() -> None:
    run = Federation(masked(scaffold), withdrawals=True).run()
    run.step()
    with pytest.raises(ValueError, match="persistent contributions whose sums the server can read"):
        run.population.withdraw(run, "b")


def test_under_masks_nothing_is_told_of_a_fit() -> None:
    """Whatever the policies say: answers to questions are readable."""
    model = hierarchical.linear(hierarchical.normal(3), noise=1.0)
    everything = Policy(after_fit=("effects", "densities", "margins"), minimum=1)
    federation = Federation(masked(lambda: ft.ep(model), FINE), policy=everything)
    run = federation.run()
    run.step()
    federation.frames.clear()
    with pytest.raises(RuntimeError, match="hides all messages from the server"):
        ft.inference.ranef(run, tolerance=torch.inf)
    assert [frames.read(reply, name).kind for name, reply in federation.frames] == ["refusal"] * 3
    assert len(run.summary(tolerance=torch.inf)) == 6, "what all share is the server's"
