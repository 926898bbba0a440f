"""Sums under masks that differ by one site: in two rounds, two runs, and after either side was started again."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import distance, linear_clients, sgd
from support.sites import Carried, carry_of, offers

import fedtorch as ft
from fedtorch import tree
from fedtorch.history import Round
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import frames as frames, past_sums, sites as meeting
from fedtorch.sites.rounds.past_sums import PastSums, Step
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.sites.secure.masked import Masked, masked
from fedtorch.sites.secure.messages import ADVERT, CONFIRM, KEYS, MASKED, REVEAL
from fedtorch.sites.secure.parties import Client
from fedtorch.trust import secure

GRID = secure.Grid(30, 2.0**20)
DATA = linear_clients([5, 2, 9, 4, 17, 6, 3])
NAMES = "abcdefg"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


fedavg = Carried(lambda rate=0.1: ft.fedavg(sgd(rate)), masked(GRID, dropouts=0))
scaffold = Carried(lambda: ft.scaffold(sgd(0.05)), masked(GRID, dropouts=0))


def sites_in(folder: Path | None, make: Callable[..., ft.Algorithm] = fedavg, sites: str = NAMES) -> Loopback:
    """Sites of one client each."""
    return Loopback(
        offers(DATA.select(list(range(len(sites)))), make, sites=len(sites)), folder, certified(NAMES).identities
    )


def run_on(host: Loopback, names: Sequence[str], make: Callable[[], ft.Algorithm] = fedavg, **more: Any) -> ft.Run:
    [host.start(name) for name in names if name not in host.sites]  # whom an earlier population did not list
    settings = {"seconds": 0.05, "quorum": more.pop("quorum", 0.5), "roster": certified(NAMES).roster}
    sites = Remote(host, list(names), "it", rows=DATA.rows, carry=carry_of(make), **settings)
    return ft.Run(make(), sites, **{"seed": 3, **more})


def sum_of(run: ft.Run, clients: Sequence[int]) -> dict[str, torch.Tensor]:
    """What the clients' changes of one round add up to, as the server knows it."""
    before = tree.to(run.server, copy=True)
    run.step()
    rows = sum(int(DATA.counts[client]) for client in clients)
    return {name: rows * (leaf - before[name]) for name, leaf in run.server.items()}


def model_of(client: int) -> dict[str, torch.Tensor]:
    """What one client's change of the first round is, times its rows."""
    alone = ft.Run(ft.fedavg(sgd(0.1)), ft.InProcess(DATA.select([client])), seed=3)
    return sum_of(alone, [client])


# -- with and without a site -------------------------------------------------------------------------------------------

SAME = r"a sum over the same start on \d{4}-\d\d-\d\d at .* UTC with \['a', 'b', 'c', 'd'\] \(4 in all\)"


@pytest.mark.parametrize("restart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_runs_with_and_without_one_site_are_refused(restart: bool, tmp_path: Path) -> None:
    """Two honest runs from the same parameters, whose difference would be the model of the site that one lacks."""
    host = sites_in(tmp_path)
    everybody = sum_of(run_on(host, "abcd"), [0, 1, 2, 3])
    if restart:
        [host.start(name) for name in "abcd"]
    with pytest.raises(RuntimeError, match=SAME):
        run_on(host, "abc", seed=4).step()
    assert distance(sum_of(run_on(host, "abcd", seed=5), [0, 1, 2, 3]), everybody) < 1e-7  # the same sites may
    elsewhere = run_on(host, "abc")
    elsewhere.server = tree.map(lambda leaf: leaf + 1.0, elsewhere.server)
    assert elsewhere.step().ids.tolist() == [0, 1, 2]  # and from another start others may


def test_what_two_runs_would_tell_is_the_model_of_the_site_that_one_lacks() -> None:
    """Of sites that forget: what the memory keeps back."""
    host = sites_in(None)
    everybody = sum_of(run_on(host, "abcd"), [0, 1, 2, 3])
    [host.start(name) for name in "abcd"]
    rest = sum_of(run_on(host, "abc"), [0, 1, 2])
    assert distance({name: everybody[name] - rest[name] for name in rest}, model_of(3)) < 1e-8


def test_two_rounds_over_one_start_are_of_the_same_sites(tmp_path: Path) -> None:
    """A server that goes back to the parameters of an earlier round, and leaves a site out."""
    host = sites_in(tmp_path, sites="abcd")
    run = run_on(host, "abcd")
    before = tree.to(run.server, copy=True)
    run.step(), run.step()
    run.server = before
    run._draw = lambda key, number: torch.arange(3)
    with pytest.raises(RuntimeError, match=SAME):
        run.step()
    run.server = tree.map(lambda leaf: torch.where(leaf == 0, -leaf, leaf), before)  # zeros of another sign
    with pytest.raises(RuntimeError, match=SAME):
        run.step()


def test_a_start_counts_whatever_the_masks_are(tmp_path: Path) -> None:
    """On a finer grid messages are the same; with another rate they are others."""
    host = sites_in(tmp_path, fedavg, "abcd")

    def step(names: str, bits: int, rate: float) -> Round:
        make = Carried(fedavg.make, masked(secure.Grid(bits), dropouts=0))
        for name, each in host.brought.items():  # whose processes begin anew, with other policy
            host.brought[name] = dataclasses.replace(each, policy=each.policy._replace(carry=make.carry))
            host.start(name)
        settings = {"roster": certified(NAMES).roster, "rows": DATA.rows, "carry": make.carry}
        return ft.Run(make(rate=rate), Remote(host, list(names), "it", {"rate": rate}, **settings), seed=3).step()

    step("abcd", bits=30, rate=0.1)
    with pytest.raises(RuntimeError, match=SAME):
        step("abc", bits=31, rate=0.1)
    assert step("abc", bits=30, rate=0.2).ids.tolist() == [0, 1, 2]


def test_other_clients_of_a_site_over_one_start_are_refused(tmp_path: Path) -> None:
    """Two of its clients, and one: the difference of the sums would be the other's message."""
    host = Loopback(offers(DATA.select(list(range(6))), fedavg, sites=3), tmp_path, certified(NAMES).identities)
    run = run_on(host, "abc")
    before = tree.to(run.server, copy=True)
    run.step()
    run.server = before
    run._draw = lambda key, number: torch.arange(5)
    with pytest.raises(RuntimeError, match=r"'c': .* takes part in others with the same of its own clients only"):
        run.step()


def test_three_sums_of_which_no_site_sees_what_they_tell(tmp_path: Path) -> None:
    """{a, b, c}, {d, e, f} and all seven: sets differ by four wherever a site can compare, and together by g."""
    host = sites_in(tmp_path)
    assert secure._combinations.revealed([frozenset("abc"), frozenset("def"), frozenset(NAMES)], 3) == {"g"}
    run_on(host, "abc").step(), run_on(host, "def").step()
    with pytest.raises(RuntimeError, match="takes part in others with the same sites only"):
        run_on(host, NAMES).step()


# -- rounds that are lost ----------------------------------------------------------------------------------------------


def withheld(host: Loopback, name: str, phase: int) -> None:
    """A site's messages of a phase do not arrive."""
    host.before = lambda site, frame: site != name or frames.read(frame, "the server").about.get("phase") != phase


def hears_again(host: Loopback, name: str) -> None:
    host.before = lambda site, frame: True
    host.start(name)


@pytest.mark.parametrize("phase", [pytest.param(CONFIRM, marks=pytest.mark.slow), REVEAL])
def test_a_round_that_a_member_ends_is_of_the_same_sites_or_of_none(
    phase: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member is named, asked again over the same start, and left out over others until it has done its part."""
    session = Masked._session

    def strict(self: Any, parties: Any, words: Any) -> Any:
        made = session(self, parties, words)
        return made._replace(graph=made.graph._replace(threshold=made.graph.neighbours))  # nobody may drop out

    monkeypatch.setattr(Masked, "_session", strict)
    host = sites_in(tmp_path, sites="abcd")
    run = run_on(host, "abcd")
    withheld(host, "d", phase)
    with pytest.raises(RuntimeError, match=r"the round is lost, because \['d'\] failed after others had confirmed"):
        run.step()
    assert "site 'd' is left out of sums under masks, because in one it sent nothing" in caplog.text
    host.start("d")
    with pytest.raises(RuntimeError, match="the round is lost"):
        run.step()
    moved = ft.Run(fedavg(), run.population, seed=3)
    moved.server = tree.map(lambda leaf: leaf + 1.0, moved.server)
    hears_again(host, "d")
    assert moved.step().ids.tolist() == [0, 1, 2]
    assert moved.history["lost_before"].tolist() == [1]
    assert run.population.troubles["d"].endswith("because in one it sent nothing")
    assert run.step().ids.tolist() == [0, 1, 2, 3]
    assert run.step().ids.tolist() == [0, 1, 2, 3]


def test_a_server_that_lies_about_who_withheld_gets_no_second_sum(tmp_path: Path) -> None:
    """It has the sum of all four, says that d has withheld its shares, and asks for the round without d."""
    host = sites_in(tmp_path, sites="abcd")
    run = run_on(host, "abcd")
    before = tree.to(run.server, copy=True)
    run.step()
    for again in (run, run_on(host, "abcd"), run_on(host, "abc")):
        again.server = before
        again.population.plan.lost.failed["d"] = "it has withheld its shares"
        with pytest.raises(RuntimeError, match=SAME):
            again.step()


def test_a_site_that_drops_out_before_anybody_confirms_costs_nothing(tmp_path: Path) -> None:
    """Where the server wants all sites, none is asked to confirm a sum without one; all can add up again."""
    host = sites_in(tmp_path, sites="abcd")
    run = run_on(host, "abcd", quorum=1.0)
    withheld(host, "d", MASKED)
    with pytest.raises(RuntimeError, match=r"a sum of at least 4 sites, but only \['a', 'b', 'c'\] are left"):
        run.step()
    hears_again(host, "d")
    assert run.step().ids.tolist() == [0, 1, 2, 3]


def test_a_site_with_wrong_keys_is_left_out_of_this_sum_and_of_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends no round: with keys of low order masks could be known to all."""
    run = run_on(sites_in(tmp_path, sites="abcd"), "abcd")
    honest = Client.advertise

    def advertise(self: Client) -> bytes:
        message = honest(self)
        return self._sign(ADVERT, KEYS.pack(bytes(32), bytes(32), bytes(32))) if self.number == 4 else message

    monkeypatch.setattr(Client, "advertise", advertise)
    for _ in range(2):
        assert run.step().ids.tolist() == [0, 1, 2]
    assert "because in one it sent keys of low order" in run.population.troubles["d"]


# -- what clients tell for good ----------------------------------------------------------------------------------------


def test_totals_are_of_all_sites_that_have_told_something(tmp_path: Path) -> None:
    host = sites_in(tmp_path, scaffold, "abcd")
    run = run_on(host, "abcd", scaffold)
    run.step(), run.step()
    total = run.clients.total()
    assert distance(total, run.server.total) < 1e-8
    assert distance(run.clients.total(), total) == 0
    run.clients.session.members = lambda: ["a", "b", "c"]
    assert run.clients.total() is None
    assert "only with all sites of its earlier sums in the run, and ['d'] (1 in all)" in run.population.troubles["a"]


def test_totals_are_not_told_by_a_site_that_went_back(tmp_path: Path) -> None:
    """A server that sends one site back behind a round: the total would lack what that one told in it."""
    host = sites_in(tmp_path, scaffold, "abcd")
    run = run_on(host, "abcd", scaffold)
    run.step()
    kept = run.clients.session.kept[3]
    run.step(), run.clients.state_dict()  # both versions are kept
    after, run.clients.session.kept[3] = run.clients.session.kept[3], kept
    assert run.clients.total() is None
    assert "'d' has gone back" not in run.population.troubles
    assert "has returned to a state before a sum" in run.population.troubles["d"]
    run.clients.session.kept[3] = after
    assert run.clients.total() is not None
    run.clients.session.kept[3] = kept
    run.step()  # the lost part stays lost
    host.start("d")
    assert run.clients.total() is None


# -- the memory --------------------------------------------------------------------------------------------------------

FOUR = frozenset("abcd")


def test_a_site_whose_memory_is_gone_refuses(tmp_path: Path) -> None:
    host = sites_in(tmp_path, sites="abcd")
    run_on(host, "abcd").step()
    (tmp_path / "a" / past_sums.FILE).unlink()
    run = run_on(host, "abcd", quorum=1.0)
    run.server = tree.map(lambda leaf: leaf + 1.0, run.server)
    with pytest.raises(RuntimeError, match=r"'a': the site's sums\.jsonl is damaged or lost"):
        run.step()
    host.start("a")
    with pytest.raises(RuntimeError, match=r"'a': the site has no sums\.jsonl in its folder of states"):
        run_on(host, "abcd", quorum=1.0).step()
    past_sums.begin(tmp_path / "a")  # on purpose
    host.start("a")
    assert run_on(host, "abcd", quorum=1.0).step().ids.tolist() == [0, 1, 2, 3]
    with pytest.raises(FileExistsError, match="keep it, or move it away"):
        past_sums.begin(tmp_path / "a")


def test_a_site_without_a_folder_says_so_in_its_terms() -> None:
    configuration = offers(DATA.select([0]), fedavg, sites=1)["a"]
    memory = PastSums(None, configuration.policy.remember_sums)
    with pytest.raises(Refusal, match=r"a folder of states, or with Policy\(remember_sums=False\)"):
        memory.open()
    PastSums(None, Policy(remember_sums=False).remember_sums).open()
    PastSums(Path("/nowhere"), Policy(remember_sums=False).remember_sums).open()


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_a_kill_while_a_line_is_written_loses_only_what_was_not_confirmed(cut: int, tmp_path: Path) -> None:
    past_sums.begin(tmp_path)
    memory = opened(tmp_path)
    memory.of_round(b"1" * 32, ["x"], None, FOUR, confirmed=True)
    size = (tmp_path / past_sums.FILE).stat().st_size
    memory.of_round(b"2" * 32, ["x"], None, FOUR | {"e"}, confirmed=True)
    os.truncate(tmp_path / past_sums.FILE, (tmp_path / past_sums.FILE).stat().st_size - cut)
    again = opened(tmp_path)
    assert (tmp_path / past_sums.FILE).read_bytes().endswith(b"\n")
    with pytest.raises(Refusal):
        again.of_round(b"1" * 32, ["x"], None, FOUR - {"d"}, confirmed=False)
    again.of_round(b"2" * 32, ["x"], None, FOUR, confirmed=True)
    opened(tmp_path)
    os.truncate(tmp_path / past_sums.FILE, size - 20)
    opened(tmp_path).of_round(b"1" * 32, ["x"], None, FOUR - {"d"}, confirmed=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"{}\n" + data,
        lambda data: data[:40],
        lambda data: data.replace(b'"clients"', b'"CLIENTS"'),
        lambda data: data.replace(b'"sites":0', b'"sites":7'),
        lambda data: b"".join(data.splitlines(keepends=True)[1:]),
        lambda data: data[:-10] + b"\n" + data,
    ],
)
def test_a_damaged_memory_is_none(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    past_sums.begin(tmp_path)
    memory, file = opened(tmp_path), tmp_path / past_sums.FILE
    memory.of_round(b"1" * 32, ["x"], Step("r", 0, 1), FOUR, confirmed=True)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(Refusal, match="damaged"):
        opened(tmp_path)


def test_a_full_disk_is_a_sum_that_is_not_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past_sums.begin(tmp_path)
    memory, file = opened(tmp_path), tmp_path / past_sums.FILE
    before = file.read_bytes()

    def full(handle: int) -> None:
        assert len(file.read_bytes()) > len(before)
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left on device"):
        memory.of_round(b"1" * 32, ["x"], None, FOUR, confirmed=True)
    assert file.read_bytes() == before
    memory.of_round(b"1" * 32, ["x"], None, FOUR | {"e"}, confirmed=False)


def test_a_memory_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_sums, "MOST", 3)
    past_sums.begin(tmp_path)
    memory = opened(tmp_path)
    for number in range(3):
        memory.of_round(bytes([number]) * 32, ["x"], None, FOUR, confirmed=True)
    memory.of_round(bytes(32), ["x"], None, FOUR, confirmed=True)
    with pytest.raises(Refusal, match="the site records at most 3 sums under masks"):
        memory.of_round(bytes([3]) * 32, ["x"], None, FOUR, confirmed=True)


def test_sets_that_sites_let_through_tell_nothing_of_fewer() -> None:
    """Random sets asked for over one start, each let through if all its members take part: no combination is small."""
    dice, sums = random.Random(0), 0
    for _ in range(40):
        memories = {name: PastSums(None, lasting=False) for name in NAMES}
        summed: list[frozenset[str]] = []
        for _ in range(12):
            sites = frozenset(dice.sample(NAMES, dice.randint(3, 7)))
            try:
                for confirmed in (False, True):
                    for name in sorted(sites):
                        memories[name].of_round(b"start", [name], None, sites, confirmed=confirmed)
            except Refusal:
                continue
            summed.append(sites)
        sums += len(set(summed)) > 1
        assert secure._combinations.revealed(list(dict.fromkeys(summed)), 3) is None
    assert sums


def opened(folder: Path) -> PastSums:
    memory = PastSums(folder)
    memory.open()
    return memory


# -- the states of clients ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_site_that_takes_a_round_alone_is_what_two_sums_of_the_same_sites_differ_by(tmp_path: Path) -> None:
    """Its clients' states have gone on, though the round of it has no sum: the page says that no site refuses that."""
    make = Carried(lambda: ft.personal_layers(sgd(0.1), personal="bias"), masked(GRID, dropouts=0))
    host = sites_in(tmp_path, make, "abc")

    def change(alone: bool) -> torch.Tensor:
        run = run_on(host, "abc", make)
        if alone:
            host.before = lambda name, frame: name == "a" or frames.read(frame, "the server").kind != "round"
            with pytest.raises(RuntimeError, match="nothing of the round was kept"):
                run.step()
            host.before = lambda name, frame: True
            [host.start(name) for name in "bc"]
            run.clients.session.kept[0] = max(host.sites["a"]._session.versions.numbers)
        before = run.server["weight"].clone()
        run.step()
        return int(DATA.counts[:3].sum()) * (run.server["weight"] - before)

    differ = change(alone=True) - change(alone=False)
    client = ft.Run(ft.personal_layers(sgd(0.1), personal="bias"), ft.InProcess(DATA.select([0])), seed=3)
    start, own = client.server["weight"].clone(), list[torch.Tensor]()
    for _ in range(2):
        client.server = {"weight": start}
        client.step()
        own.append(int(DATA.counts[0]) * (client.server["weight"] - start))
    assert own[1].norm() > 0.1
    assert distance(differ, own[1] - own[0]) < 1e-6
