"""What goes wrong at a site or at the server, frame by frame: the run goes on, and both stand on the same round."""

from __future__ import annotations

import errno
import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loopback import Clock, Killed, Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from support.sites import offers

import fedtorch as ft
from fedtorch import _files as files, checkpoint, tree, wire
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import frames as frames, sites as meeting
from fedtorch.trust import privacy

SIZES = [5, 2, 9, 4, 17, 6]
DATA = linear_clients(SIZES)


def scaffold(**settings: Any) -> ft.Algorithm:
    """An algorithm whose clients have states, and tell something for good."""
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4), **settings)


def fedavg(rate: float = 0.1) -> ft.Algorithm:
    return ft.fedavg(sgd(rate))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines pass while nothing comes, however long sites take."""
    monkeypatch.setattr(meeting, "time", Clock)


class Federation:
    """Three sites that can be watched and killed, and a run on them."""

    def __init__(self, folder: Path | None = None, make: Callable[..., ft.Algorithm] = scaffold, **more: Any) -> None:
        configuration = {name: more.pop(name) for name in ("policy",) if name in more}
        self.make, self.host = make, Loopback(offers(DATA, make, **configuration), folder)
        self.more = {"seconds": 0.2, "quorum": 1.0, **more}

    def sites(self, **more: Any) -> Remote:
        return Remote(self.host, list(self.host.brought), "it", **{**self.more, **more})

    def run(self, **more: Any) -> ft.Run:
        return ft.Run(self.make(), self.sites(**more), seed=3)


def alone(rounds: int, make: Callable[..., ft.Algorithm] = scaffold, **settings: Any) -> ft.Run:
    """The same run in one process."""
    return ft.run(make(), ft.InProcess(DATA), rounds=rounds, seed=3, **settings)


def states(made: Federation) -> dict[str, dict[str, torch.Tensor]]:
    """What sites hold now."""
    return {name: site._session.clients.state_dict() for name, site in made.host.sites.items()}


def in_process(run: ft.Run) -> dict[str, dict[str, torch.Tensor]]:
    """What they would hold of a run in one process."""
    flat = run.clients.state_dict()
    shares = {name: torch.tensor([2 * i, 2 * i + 1]) for i, name in enumerate("abc")}
    return {name: {key: leaf[ids] for key, leaf in flat.items()} for name, ids in shares.items()}


def test_an_answer_that_is_lost_leaves_the_site_where_it_was() -> None:
    made = Federation(quorum=0.5, seconds=0.01)
    run = made.run()
    run.step()
    made.host.after = lambda name, reply: None if name == "b" else reply
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert run.population.troubles == {"b": "it is late"}
    assert (run.last.late.tolist(), run.last.lost_before.tolist()) == ([2, 3], [])
    made.host.after = lambda name, reply: reply
    made.host.frames.append(("b", made.host.sites["b"].hello()))  # it has connected anew
    run.step()
    away = ft.Faults(before=lambda keys, ids: (ids == 2) | (ids == 3))
    wanted = ft.Run(scaffold(), ft.InProcess(DATA), seed=3)
    wanted.step()
    wanted.faults = away
    wanted.step()
    wanted.faults = None
    wanted.step()
    assert distance(run.server, wanted.server) < ROUNDING
    assert distance(run.server.total, run.clients.total()) < ROUNDING
    assert distance(states(made), in_process(wanted)) < ROUNDING


def test_a_site_that_says_twice_who_it_is_on_one_stream_is_asked_once() -> None:
    """It connects, and is asked who it is before what it says by itself arrives: a round counts once there."""
    made, asked = Federation(), list[str]()
    made.host.before = lambda name, frame: asked.append(frames.read(frame, "server").kind) or True
    made.host.frames.extend((name, site.answer(frames.encode("who"))) for name, site in made.host.sites.items())
    run = made.run()
    made.host.frames.extend((name, site.answer(frames.encode("who"))) for name, site in made.host.sites.items())
    run.step()
    assert [kind for kind in asked if kind != "who"] == ["begin", "round"] * 3
    assert distance(run.server, alone(rounds=1).server) < ROUNDING


def test_a_late_answer_is_not_taken_for_another_round() -> None:
    made, late = Federation(quorum=0.5, seconds=0.01), []
    run = made.run()
    made.host.after = lambda name, reply: late.append((name, reply)) if name == "b" else reply
    run.step()
    made.host.after = lambda name, reply: reply
    assert run.step().ids.tolist() == [0, 1, 4, 5]  # it is not asked for more before it has answered
    made.host.frames.extend(late)
    assert run.step().ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert distance(run.server.total, run.clients.total()) < ROUNDING


def test_a_round_without_quorum_can_be_done_again() -> None:
    made = Federation(quorum=0.6, seconds=0.01)
    run = made.run()
    run.step()
    made.host.kill("a"), made.host.kill("c")
    assert run.history["answered"].tolist() == [6]
    with pytest.raises(RuntimeError, match=r"at least 2 of 3 sites, but got 1, without 'a': it is not connected; 'c'"):
        run.step()
    made.host.start("a"), made.host.start("c")
    run.population.plan.sites.meet(0.1)
    made.host.sites["a"], made.host.sites["c"]
    with pytest.raises(RuntimeError, match="does not have version"):  # their states were in memory
        run.step()


@pytest.mark.parametrize("moment", ["before the request", "before the answer", "after the answer"])
def test_a_site_that_is_killed_goes_on_from_its_files(tmp_path: Path, moment: str) -> None:
    """And is asked again within the round, as soon as it is back."""
    made = Federation(tmp_path)
    run = made.run()
    run.step()

    def killed(name: str, frame: bytes) -> bool:
        if name == "b" and moment == "before the request":
            made.host.before = lambda name, frame: True
            made.host.kill("b"), made.host.start("b")
            return False
        return True

    def silenced(name: str, reply: bytes) -> bytes | None:
        if name == "b" and moment != "before the request":
            made.host.after = lambda name, reply: reply
            made.host.start("b")
            return None if moment == "before the answer" else reply
        return reply

    made.host.before, made.host.after = killed, silenced
    for _ in range(3):
        run.step()
    assert distance(run.server, alone(4).server) < ROUNDING
    assert distance(states(made), in_process(alone(4))) < ROUNDING


def test_sites_keep_few_versions(tmp_path: Path) -> None:
    made = Federation(tmp_path)
    run = made.run()
    for number in range(8):
        run.step()
        run.save(tmp_path / "run.safetensors")
        kept = [path for path in (tmp_path / "a" / run.clients.run).iterdir() if path.stem.isdecimal()]
        assert len(kept) <= 3, (number, kept)


@pytest.mark.parametrize("moment", ["in a round", "after a round", "in a save", "after a save"])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path, moment: str, monkeypatch: Any) -> None:
    made, file = Federation(tmp_path), tmp_path / "run.safetensors"
    run = made.run()
    for _ in range(2):
        run.step()
        run.save(file)

    def kill(*arguments: Any, **how: Any) -> Any:
        raise Killed

    if moment == "in a round":
        made.host.after = lambda name, reply: kill() if name == "b" else reply
    write = checkpoint.write
    if moment == "in a save":
        monkeypatch.setattr(checkpoint, "write", kill)
    with pytest.raises(Killed):  # noqa: PT012
        run.step()
        if moment != "after a round":
            run.save(file)
        kill()
    monkeypatch.setattr(checkpoint, "write", write)
    made.host.after = lambda name, reply: reply
    again = made.run().load(file)
    assert again.number == (3 if moment == "after a save" else 2)
    for _ in range(5 - again.number):
        again.step()
    assert distance(again.server, alone(5).server) < ROUNDING
    assert distance(states(made), in_process(alone(5))) < ROUNDING


@pytest.mark.parametrize("seed", range(2))
def test_random_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    random_kills(tmp_path, random.Random(seed), kills=10)


@pytest.mark.slow
def test_a_hundred_random_kills_lose_nothing(tmp_path: Path) -> None:
    random_kills(tmp_path, random.Random(99), kills=100)


def random_kills(folder: Path, dice: random.Random, kills: int) -> None:
    """Sites and server are killed between any two frames; every round that was saved stays, and the end is the same."""
    made, file, left, saved = Federation(folder, seconds=1.0), folder / "run.safetensors", kills, 0

    def falls() -> bool:
        nonlocal left
        hit = left > 0 and dice.random() < 0.15
        left -= hit
        return hit

    def before(name: str, frame: bytes) -> bool:
        if falls():
            if dice.random() < 0.4:
                raise Killed
            made.host.start(name)
            return False
        return True

    def after(name: str, reply: bytes) -> bytes | None:
        if falls():
            if dice.random() < 0.4:
                raise Killed
            made.host.start(name)
            return dice.choice([None, reply])
        return reply

    made.host.before, made.host.after = before, after
    run = made.run()
    run.save(file)
    while left or run.number < 6:
        try:
            run.step()
            if falls():
                raise Killed
            run.save(file)
            saved = run.number
        except Killed:
            made.host.frames.clear()
            for name in made.host.brought:
                made.host.start(name)
            run = made.run().load(file)
            assert run.number == saved
    wanted = alone(run.number)
    assert distance(run.server, wanted.server) < ROUNDING
    assert distance(run.clients.total(), wanted.clients.total()) < ROUNDING
    assert distance(states(made), in_process(wanted)) < ROUNDING


@pytest.mark.parametrize("resumed", [False, True])
def test_a_site_that_leaves_has_what_it_told_withdrawn(tmp_path: Path, resumed: bool) -> None:
    """The total is then that of a site that was never asked, also after a checkpoint."""
    made, file = Federation(tmp_path, withdrawals=True), tmp_path / "run.safetensors"
    run = made.run()
    run.step(), run.step()
    run.save(file)
    run = made.run().load(file) if resumed else run
    run.population.withdraw(run, "b")
    held, initial = in_process(alone(2)), run.clients.session.local.table.initial
    told = [scaffold().told.of(tree.unflatten(held[name], initial, "state")) for name in "ac"]
    wanted = tree.add(*(tree.map(lambda leaf: leaf.sum(0), each) for each in told))
    assert distance(run.server.total, wanted) < ROUNDING
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert distance(run.server.total, run.clients.total()) < ROUNDING
    with pytest.raises(ValueError, match="withdrawn before"):
        run.population.withdraw(run, "b")
    with pytest.raises(ValueError, match="Expected one of the sites"):
        run.population.withdraw(run, "d")
    run.save(file)
    assert made.run().load(file).step().ids.tolist() == [0, 1, 4, 5]


def test_what_was_not_kept_cannot_be_withdrawn() -> None:
    run = Federation().run()
    with pytest.raises(ValueError, match="withdrawals=True"):
        run.population.withdraw(run, "b")


def test_a_full_disk_at_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    made = Federation(tmp_path, quorum=0.5)
    run = made.run()
    run.step()
    write = checkpoint.write

    def full(path: Path, flat: Any, **how: Any) -> None:
        if "/b/" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, flat, **how)

    monkeypatch.setattr(checkpoint, "write", full)
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert (run.last.late.tolist(), run.last.lost_before.tolist()) == ([], [2, 3])
    assert "the site failed with OSError; see what it says itself" in run.population.troubles["b"]
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(checkpoint, "write", write)
    assert run.step().ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert distance(run.server.total, run.clients.total()) < ROUNDING


def test_a_site_that_fails_tells_the_server_no_more_than_that(caplog: Any) -> None:
    """What its errors say may be about its rows."""
    made = Federation(make=fedavg, quorum=0.5)
    run = made.run()
    run.step()
    session = made.host.sites["b"]._session

    def broken(*arguments: Any) -> Any:
        raise ArithmeticError("patient 12 weighs 300 kg")

    assert session is not None
    session.clients.algorithm = replace(session.clients.algorithm, client=broken)
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert run.population.troubles == {"b": "the site failed with ArithmeticError; see what it says itself"}
    assert "300 kg" in caplog.text


def hello(**changes: Any) -> Callable[[Loopback], None]:
    """A site "b" that says something else than it should."""

    def say(host: Loopback) -> None:
        about = {**wire.metadata(host.sites["b"].hello()), **changes}
        host.frames = type(host.frames)(frame for frame in host.frames if frame[0] != "b")
        host.frames.append(("b", wire.encode(None, about)))

    return say


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"protocol": 1}, "speaks protocol 6, but 'b' speaks 1; install the same version"),
        ({"protocol": "x"}, "expected protocol between"),
        ({"rows": [9, 4000]}, "Expected at most 100 rows, as agreed, but 'b' reports 4009"),
        ({"rows": [9]}, "as many numbers of rows, but got 2 and 1"),
        ({"clients": ["x", "x"]}, "clients that differ"),
        ({"kind": 3}, "expected a kind of frame"),
    ],
)
def test_sites_that_cannot_take_part_hear_why(change: dict[str, Any], expected: str) -> None:
    made = Federation()
    hello(**change)(made.host)
    with pytest.raises(TimeoutError, match="'b': "):
        made.sites(timeout=0.05, agreed={"b": 100})
    assert expected in made.host.dropped["b"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"clients": ["x", "y"]}, "that 'b' first reported"),
        ({"rows": [9, 5]}, "that 'b' first reported"),
        ({"schema": {"fields": [{"dtype": "float32", "shape": [3]}]}}, "that 'b' first reported"),
        ({"protocol": 1}, "speaks protocol 6, but 'b' speaks 1; install the same version"),
    ],
)
def test_the_run_goes_on_without_a_site_that_comes_back_as_another(
    change: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for another run, and its log says why; one that speaks another protocol is disconnected."""
    made = Federation(make=fedavg, quorum=0.5)
    run = made.run()
    run.step()
    hello(**change)(made.host)
    run.step()
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert expected in run.population.troubles["b"]
    assert ("b" in made.host.dropped) == ("protocol" in change)
    if "protocol" not in change:
        assert made.host.sites["b"].unlisted
        assert any("first reported" in each.getMessage() for each in caplog.records if each.name.endswith("_site_log"))


def test_a_disk_on_which_a_site_cannot_count_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be counted is not answered, and nobody else is disturbed."""
    made = Federation(tmp_path, fedavg, policy=Policy(rounds=5, minimum=1), quorum=0.5)
    run = made.run()
    run.step()
    replace_file = files.replace

    def full(path: Path, payload: bytes, **how: Any) -> None:
        if "/b/" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, payload, **how)

    monkeypatch.setattr(files, "replace", full)
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    monkeypatch.setattr(files, "replace", replace_file)
    assert run.step().ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_site_that_lies_about_its_rows_is_left_out() -> None:
    made = Federation(make=fedavg, quorum=0.5)

    def lying(name: str, reply: bytes) -> bytes:
        about = {key: value for key, value in frames.read(reply, name).about.items() if key != frames.EVERYBODY}
        if name != "b" or about["kind"] != "answer":
            return reply
        mean = {"value": {"weight": torch.zeros(1, 3).double(), "bias": torch.zeros(1).double()}}
        partial = {"change": {**mean, "weight": torch.tensor(1e6).double()}}
        info = {key: torch.zeros(2).double() for key in about["info"]}
        return frames.encode(tensors={"ids": torch.tensor([2, 3]), "info": info, "partial": partial}, **about)

    made.host.after = lying
    run = made.run()
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert (
        "expected a weight of at most 13, the rows that the site has reported, but got '1000000.0'"
        in run.population.troubles["b"]
    )


@pytest.mark.parametrize(
    ("make", "more", "expected"),
    [
        (lambda: ft.fedavg(sgd(0.2)), {}, "under 'it' the site runs local.optimizer"),
        (fedavg, {"algorithm": "other"}, r"offers the algorithms \['it'\], but not 'other'"),
        (fedavg, {"settings": {"nonsense": 1}}, "does not run 'it' with settings .*TypeError"),
    ],
)
def test_what_a_site_does_not_run(make: Callable[[], ft.Algorithm], more: dict[str, Any], expected: str) -> None:
    made = Federation(make=fedavg)
    sites = Remote(made.host, ["a", "b", "c"], **{"algorithm": "it", "settings": {}, **more})
    with pytest.raises(RuntimeError, match=expected):
        ft.Run(make(), sites).step()


def test_settings_come_as_data() -> None:
    made = Federation(make=fedavg)
    sites = Remote(made.host, ["a", "b", "c"], "it", {"rate": 0.25})
    run = ft.run(fedavg(0.25), sites, rounds=2, seed=3)
    assert distance(run.server, alone(2, lambda: fedavg(0.25)).server) < ROUNDING


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(rounds=1, minimum=1), "has answered 1 round, and does not answer more"),
        (Policy(epsilon=1.0, minimum=1), "noise that it adds itself"),
    ],
)
def test_a_site_holds_to_its_terms(policy: Policy, expected: str) -> None:
    run = Federation(make=fedavg, policy=policy, seconds=0.05).run()
    with pytest.raises(RuntimeError, match=expected):
        run.step(), run.step()


def test_rounds_are_counted_over_restarts_and_runs(tmp_path: Path) -> None:
    made = Federation(tmp_path, fedavg, policy=Policy(rounds=3, minimum=1))
    made.run().step()
    for name in made.host.brought:
        made.host.start(name)
    run = made.run()
    run.step(), run.step()
    with pytest.raises(RuntimeError, match="has answered 3 rounds"):
        run.step()


def example_level(folder: Path | None, **more: Any) -> ft.Algorithm:
    path = None if folder is None else folder / f"{secrets.token_hex(4)}.ledger"
    local = privacy.example_level(
        linear(), clip=1.0, noise=1.0, sampling_rate=0.1, steps=5, delta=1e-2, ledger=path,
        loss=lambda output, target: torch.nn.functional.mse_loss(output[:, 0], target),
        optimizer=one_step, **more,
    )  # fmt: skip
    return ft.fedavg(local)


def one_step(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_epsilon_counts_the_noise_that_a_site_adds_itself(tmp_path: Path) -> None:
    make = lambda: example_level(tmp_path)
    made = Federation(make=make, policy=Policy(epsilon=1.7, minimum=1), seconds=0.5)
    run = made.run()
    run.step()
    with pytest.raises(RuntimeError, match=r"spends no more than epsilon = 1\.7"):
        [run.step() for _ in range(20)]
    assert run.number > 1
    for make in (lambda: example_level(None), lambda: example_level(tmp_path, entropy=privacy.from_seed(1))):
        made = Federation(make=make, policy=Policy(epsilon=1.7, minimum=1), seconds=0.5)
        with pytest.raises(RuntimeError, match="noise that it adds itself, with a ledger in a file"):
            made.run().step()


def test_messages_that_are_not_finite_are_named_and_left_out() -> None:
    huge = torch.ones(sum(SIZES), 1, dtype=torch.float64)
    huge[8] = 1e300
    bad = DATA.map(lambda rows: (rows[0] * huge, rows[1]))
    host = Loopback(offers(bad, fedavg), None)
    sites = Remote(host, ["a", "b", "c"], "it")
    with pytest.raises(ValueError, match="client 'client 2' sent NaN, Inf or a negative weight"):
        ft.Run(fedavg(), sites).step()
    run = ft.Run(fedavg(), sites, on_bad_message="drop")
    assert run.step().ids.tolist() == [0, 1, 3, 4, 5]
    assert run.last.refused.tolist() == [2]


def test_a_site_says_what_is_not_for_it() -> None:
    made = Federation(make=fedavg)
    site = made.host.sites["a"]
    assert site.answer(frames.encode("total", run="0" * 32, sequence=5)) is None  # it has said hello, and will hear
    made.run().step()
    reason = lambda frame: frames.read(site.answer(frame), "a").text("reason")
    assert "another run" in reason(frames.encode("total", run="0" * 32, sequence=5))
    assert "run of 32 hexadecimal digits" in reason(frames.encode("total", run="../../etc", sequence=5))
    run = site._session.run
    assert "expected one of ['ask', 'envelopes', 'evaluate', 'round', 'total'], but got 'fetch'" in reason(
        frames.encode("fetch", run=run, sequence=5)
    )
    assert "have no persistent contributions" in reason(frames.encode("total", run=run, sequence=5, kept=0, keep=[]))
    assert tree.leaves(made.run().clients.state_dict())


def held_back(made: Federation, name: str, run: ft.Run) -> bytes:
    """The request for the next round, which the site does not get."""
    requests: list[bytes] = []
    made.host.before = lambda site, frame: site != name or requests.append(frame) is not None
    with pytest.raises(RuntimeError, match="it is late"):
        run.step()
    made.host.before = lambda site, frame: True
    return requests[-1]


def test_old_states_are_deleted_when_the_answer_has_left(tmp_path: Path) -> None:
    """Both are there until then, so that nobody waits for a file to be deleted."""
    made = Federation(tmp_path)
    run = made.run()
    run.step(), run.step()
    request, site = held_back(made, "b", run), made.host.sites["b"]
    versions = site._session.versions
    before, half = versions.numbers, site.half("server")
    assert len(before) == 3
    half.send(None), half.send(None)
    answer = half.send(request)
    new = frames.read(request, "server").integer("sequence")
    assert frames.read(answer.message, "b").integer("sequence") == new
    assert versions.numbers == before | {new}
    half.send(None)
    assert versions.numbers == {0, frames.read(request, "server").integer("kept"), new}
    assert {int(path.stem) for path in (tmp_path / "b" / run.clients.run).glob("*[0-9].safetensors")} == {
        *versions.numbers - {0}
    }


def test_a_site_goes_on_where_old_states_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Federation(tmp_path)
    run = made.run()
    run.step(), run.step()
    with monkeypatch.context() as denied:
        denied.setattr(Path, "unlink", lambda *arguments, **options: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
        run.step()
        assert "old states could not be deleted" in caplog.text
        assert not run.population.troubles
    run.step()
    assert all(len(site._session.versions.numbers) == 3 for site in made.host.sites.values())
    assert distance(run.server, alone(rounds=4).server) < ROUNDING
