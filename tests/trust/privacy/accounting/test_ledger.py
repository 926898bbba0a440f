"""Ledgers only grow: what was spent stays spent, in any order of runs, checkpoints and accidents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.oracles.closed_forms import linear_clients, sgd

import fedtorch as ft
from fedtorch.trust import privacy
from fedtorch.trust.privacy.accounting import accountant, ledger as accounting_ledger
from fedtorch.trust.privacy.accounting.accountant import Release, spent
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, Claim, Ledger

CLAIM = Claim("client", "zero-out", "everybody", "of the operating system")
DELTA = 1e-3
DATA = linear_clients([5, 3, 8, 4, 6])


def private(path: Path | None, **settings) -> ft.Algorithm:
    settings = {"clip": 1.0, "noise": 3.0, "delta": DELTA, **settings}
    return ft.fedavg(sgd(0.1)) | privacy.client_level(ledger=path, **settings)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_round_is_a_line_with_its_epsilon(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run = ft.run(private(path), ft.InProcess(DATA), rounds=3)
    head, *rows = lines(path)
    expected = [privacy.epsilon(noise=3.0, rounds=t, delta=DELTA) for t in (1, 2, 3)]
    assert [row["epsilon"] for row in rows] == pytest.approx(expected)
    assert run.history["epsilon"].tolist() == pytest.approx(expected)
    assert run.history["delta"].tolist() == [DELTA] * 3
    assert (head["unit"], head["entropy"]) == ("client", "of the operating system")
    assert "zero-out" in head["adjacency"]
    assert "not the server" in head["adversary"]


def test_a_ledger_knows_how_likely_batches_were_cut(tmp_path: Path) -> None:
    claim = accounting_ledger.Claim("example", "one row", "all", "of the system")
    release = accountant.Release(2.0, 0.1, excess=1e-9)
    accounting_ledger.Ledger(tmp_path / "ledger", claim, 1e-5).spend(0, release, 7)
    again = accounting_ledger.Ledger(tmp_path / "ledger", claim, 1e-5)
    assert again.releases == {release: 7}
    assert again.epsilon > spent({release._replace(excess=0.0): 7}, 1e-5, 20_000)


def test_a_seed_guarantees_nothing_and_the_ledger_says_so(tmp_path: Path) -> None:
    ft.run(private(tmp_path / "seeded", entropy=privacy.from_seed(0)), ft.InProcess(DATA), rounds=1)
    assert lines(tmp_path / "seeded")[0]["entropy"].startswith("no guarantee")
    with pytest.raises(ValueError, match="expected entropy"):
        private(tmp_path / "seeded")


def test_runs_on_one_ledger_add_up_also_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    one, two = (ft.Run(private(path, noise=noise), ft.InProcess(DATA)) for noise in (3.0, 5.0))
    one.step()
    two.step()
    last = one.step()
    together = spent({Release(3.0): 2, Release(5.0): 1}, DELTA)
    assert last.report["epsilon"] == pytest.approx(together)
    third = ft.Run(private(path), ft.InProcess(DATA))
    assert third.step().report["epsilon"] == pytest.approx(spent({Release(3.0): 3, Release(5.0): 1}, DELTA))


def by_hand(everybody: list[float], sampled: list[tuple[float, float]]) -> float:
    """The epsilon of Gaussian rounds with everybody and of sampled ones, by dp-accounting alone."""
    distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    parts = [distributions.from_gaussian_mechanism(noise) for noise in everybody]
    parts += [distributions.from_gaussian_mechanism(noise, sampling_prob=rate) for noise, rate in sampled]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return whole.get_epsilon_for_delta(DELTA)


def test_a_sampled_run_and_one_of_everybody_add_up_against_who_does_not_know_the_sample(tmp_path: Path) -> None:
    """Begun with the sampled run, the claim is the weaker one, under which both are counted as they are."""
    path = tmp_path / "ledger"
    ft.run(private(path, sampling_rate=0.4), ft.InProcess(DATA), rounds=2)
    after = ft.Run(private(path, noise=5.0), ft.InProcess(DATA))
    assert after.algorithm.budget.claim.adversary.endswith("and nobody who knows which clients were asked")
    assert after.step().report["epsilon"] == pytest.approx(by_hand([5.0], 2 * [(3.0, 0.4)]), rel=1e-3)
    again = ft.Run(private(path, sampling_rate=0.4), ft.InProcess(DATA))
    wanted = by_hand([5.0], 3 * [(3.0, 0.4)])
    assert wanted <= again.step().report["epsilon"] < 1.001 * wanted
    assert wanted < by_hand([5.0, 3.0, 3.0, 3.0], [])
    assert [row["rate"] for row in lines(path)[1:]] == [0.4, 0.4, 1.0, 0.4]


def test_where_the_sample_may_be_known_sampled_rounds_count_like_those_of_everybody(tmp_path: Path) -> None:
    """Begun with everybody, the claim holds against who knows the sample, and no round weakens it."""
    path = tmp_path / "ledger"
    ft.run(private(path, noise=5.0), ft.InProcess(DATA), rounds=1)
    wanted = spent({Release(5.0): 1, Release(3.0): 2}, DELTA)
    assert wanted == pytest.approx(by_hand([5.0, 3.0, 3.0], []), rel=1e-3)
    sampled = private(path, sampling_rate=0.4, budget=1.01 * wanted)
    run = ft.run(sampled, ft.InProcess(DATA), rounds=5)
    assert run.number == 2  # the budget has room for no more
    assert run.history["epsilon"].iloc[-1] == pytest.approx(wanted)
    assert not sampled.budget.claim.adversary.endswith("which clients were asked")
    run.save(tmp_path / "checkpoint")
    resumed = ft.Run(private(path, sampling_rate=0.4), ft.InProcess(DATA)).load(tmp_path / "checkpoint", anyway=True)
    assert resumed.algorithm.budget.report()["epsilon"] == pytest.approx(wanted)
    rows = [(row["rate"], row.get("sampled")) for row in lines(path)[1:]]
    assert rows == [(1.0, None), (1.0, 0.4), (1.0, 0.4)]


def test_claims_that_differ_in_more_than_the_sample_have_ledgers_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger(path, CLAIM._replace(adversary="peers"), DELTA)
    for adversary in ("the server", "the server, and nobody who knows which clients were asked"):
        with pytest.raises(ValueError, match="a ledger has one claim"):
            Ledger(path, CLAIM._replace(adversary=adversary), DELTA)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_budget_stops_before_the_round_that_would_exceed_it(tmp_path: Path, in_file: bool) -> None:
    most = privacy.epsilon(noise=3.0, rounds=4, delta=DELTA)
    path = tmp_path / "ledger" if in_file else None
    for budget, rounds in ((most, 4), (0.999 * most, 3)):
        run = ft.run(private(path, budget=budget), ft.InProcess(DATA), rounds=10)
        assert run.number == rounds
        assert run.history["epsilon"].max() <= budget
        before = run.server
        with pytest.raises(RuntimeError, match="above the budget"):
            run.step()
        assert run.server is before
        assert run.number == rounds
        if path is not None:
            path.unlink()
            path.with_name("ledger.head").unlink()


def test_an_earlier_checkpoint_spends_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    run = ft.Run(private(path), ft.InProcess(DATA))
    run.step()
    run.save(tmp_path / "checkpoint")
    first = run.step().server
    run.load(tmp_path / "checkpoint")
    again = run.step()
    assert again.number == 2
    assert again.report["epsilon"] == pytest.approx(privacy.epsilon(noise=3.0, rounds=3, delta=DELTA))
    assert not torch.equal(again.server["weight"], first["weight"])
    assert [row["round"] for row in lines(path)[1:]] == [0, 1, 1]
    other = ft.Run(private(path), ft.InProcess(DATA)).load(tmp_path / "checkpoint")
    assert other.step().report["epsilon"] == pytest.approx(privacy.epsilon(noise=3.0, rounds=4, delta=DELTA))


def test_a_lost_ledger_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    run = ft.run(private(path), ft.InProcess(DATA), rounds=2)
    whole = path.read_bytes()
    run.save(tmp_path / "checkpoint")
    resumed = lambda: ft.Run(private(path), ft.InProcess(DATA)).load(tmp_path / "checkpoint", anyway=True)
    head = path.with_name("ledger.head")
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))  # a copy of yesterday
    with pytest.raises(ValueError, match=r"at least 2 rounds in .*, by ledger.head beside it, but got one of 1"):
        resumed()
    head.unlink()
    with pytest.raises(ValueError, match=r"at least 2 rounds in .*, as the checkpoint knows it, but got one of 1"):
        resumed()
    path.unlink()
    with pytest.raises(ValueError, match="it is lost"):
        run.step()
    with pytest.raises(ValueError, match=r"with the 1 rounds of ledger.head, but it is lost; restore it, or"):
        resumed()
    head.unlink()
    with pytest.raises(ValueError, match="pass the file that belongs to it"):
        resumed()  # which has begun a new one
    with pytest.raises(ValueError, match="in memory"):
        ft.Run(private(None), ft.InProcess(DATA)).load(tmp_path / "checkpoint")
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"Expected the ledger .* by ledger\.head beside it, but got"):
        resumed()
    head.unlink()
    assert resumed().step().report["epsilon"] == pytest.approx(privacy.epsilon(noise=3.0, rounds=3, delta=DELTA))


def test_a_run_without_privacy_has_no_checkpoint_for_one_with(tmp_path: Path) -> None:
    ft.run(ft.fedavg(sgd(0.1)), ft.InProcess(DATA), rounds=1).save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="without"):
        ft.Run(private(None), ft.InProcess(DATA)).load(tmp_path / "checkpoint", anyway=True)


def test_damaged_ledgers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, CLAIM, DELTA)
    for round in range(4):
        ledger.spend(round, Release(2.0, 0.5))
    whole = path.read_bytes().splitlines(keepends=True)
    wrong = {
        "does not follow": whole[:2] + whole[3:],
        "Line 5": [*whole[:3], whole[3].replace(b"2.0", b"9.0"), whole[4]],
        "Line 1": [b"{}\n"],
        "cannot be used": [whole[0], b"\xff\n"],
    }
    for said, text in wrong.items():
        path.write_bytes(b"".join(text))
        with pytest.raises(ValueError, match=said):
            Ledger(path, CLAIM, DELTA).spend(0, Release(2.0))
    path.write_bytes(b"".join(whole))
    expected = privacy.epsilon(noise=2.0, sampling_rate=0.5, rounds=4, delta=DELTA)
    assert expected <= Ledger(path, CLAIM, DELTA).epsilon < 1.001 * expected


EARLIER = (
    '{"ledger": "4505a10deef79c6f9a7e3fb6aabb471e", "delta": 0.001, "unit": "client", "adjacency": "zero-out", '
    '"adversary": "everybody", "entropy": "of the operating system", "previous": ""}\n'
    '{"entry": 1, "round": 0, "mechanism": "gaussian", "noise": 3.0, "rate": 1.0, "releases": 1, '
    '"epsilon": 0.8335281018046351, "previous": "a943b63818a3bbd0769c13eb356336d9"}\n'
    '{"entry": 2, "round": 1, "mechanism": "gaussian", "noise": 3.0, "rate": 0.5, "releases": 1, '
    '"epsilon": 0.9759533342343636, "previous": "c6f79a4b0e260f40e2b4d82020dd90d1"}\n'
)


def test_a_ledger_of_an_earlier_version_is_refused_with_what_it_has_spent(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for rest in ("", '{"entry": 3, "rou'):
        path.write_text(EARLIER + rest)
        with pytest.raises(
            ValueError, match=r"earlier version, which has spent epsilon 0.9759\d+ .* in 2 entries. Keep it"
        ):
            Ledger(path, CLAIM, DELTA)
        assert path.read_text() == EARLIER + rest


def test_one_ledger_has_one_claim(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger", CLAIM, DELTA)
    for claim, delta, said in ((CLAIM, 1e-4, "delta"), (CLAIM._replace(unit="example"), DELTA, "unit")):
        with pytest.raises(ValueError, match=f"expected {said}"):
            Ledger(tmp_path / "ledger", claim, delta)


def test_a_ledger_that_was_cut_under_a_run_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", CLAIM, DELTA)
    before = (tmp_path / "ledger").read_bytes()
    ledger.spend(0, Release(1.0))
    (tmp_path / "ledger").write_bytes(before)
    with pytest.raises(ValueError, match="only to grow"):
        ledger.spend(1, Release(1.0))


def test_a_ledger_that_is_brought_back_with_its_head_is_noticed_by_a_later_checkpoint_alone(tmp_path: Path) -> None:
    """As from a backup of the folder: nothing beside it knows more, and `what_is_private.md` says so."""
    path, head = tmp_path / "ledger", tmp_path / "ledger.head"
    run = ft.run(private(path), ft.InProcess(DATA), rounds=1)
    run.save(tmp_path / "early")
    backup = path.read_bytes(), head.read_bytes()
    run.step()
    run.save(tmp_path / "late")
    path.write_bytes(backup[0])
    head.write_bytes(backup[1])
    resumed = lambda name: ft.Run(private(path), ft.InProcess(DATA)).load(tmp_path / name)
    with pytest.raises(ValueError, match=r"at least 2 rounds in .*, as the checkpoint knows it, but got one of 1"):
        resumed("late")
    assert resumed("early").number == 1


def test_a_ledger_that_was_cut_beyond_the_checkpoint_is_noticed(tmp_path: Path) -> None:
    """The checkpoint knows two rounds, the ledger had four."""
    path = tmp_path / "ledger"
    run = ft.run(private(path), ft.InProcess(DATA), rounds=2)
    run.save(tmp_path / "checkpoint")
    yesterday = path.read_bytes()
    run.step(), run.step()
    whole = path.read_bytes().splitlines(keepends=True)
    resumed = lambda: ft.Run(private(path), ft.InProcess(DATA)).load(tmp_path / "checkpoint")
    for cut in (yesterday, b"".join(whole[:4])):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=r"at least 4 rounds in .* but got one of \d: it was cut, or an old copy"):
            resumed()
    path.write_bytes(b"".join(whole))
    assert resumed().step().report["epsilon"] == pytest.approx(privacy.epsilon(noise=3.0, rounds=5, delta=DELTA))


def test_copies_of_a_ledger_that_have_grown_apart_are_noticed(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger", tmp_path / "copy"
    ft.run(private(path), ft.InProcess(DATA), rounds=1)
    other.write_bytes(path.read_bytes())
    ft.run(private(path), ft.InProcess(DATA), rounds=3).save(tmp_path / "checkpoint")
    ft.run(private(other, noise=4.0), ft.InProcess(DATA), rounds=4)
    with pytest.raises(ValueError, match=r"Expected round 4 of the ledger in .*copy.* two copies of one ledger"):
        ft.Run(private(other), ft.InProcess(DATA)).load(tmp_path / "checkpoint")
    path.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"Expected round 4 of the ledger in .* by ledger\.head beside it"):
        private(path)


@pytest.mark.parametrize("keep", [0, 3])
def test_a_last_line_that_is_not_whole_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, CLAIM, DELTA)
    for round in range(keep):
        ledger.spend(round, Release(2.0))
    whole = path.read_bytes() if keep else b""
    path.write_bytes(whole + b'{"entry": 4, "rou')
    if not keep:
        path.with_name("ledger.head").unlink()  # a kill at the very first line
    again = Ledger(path, CLAIM, DELTA)
    assert "was incomplete (17 bytes), as after a kill" in caplog.text
    assert path.with_name("ledger.partial").read_bytes() == b'{"entry": 4, "rou\n'
    again.spend(keep, Release(2.0))
    assert path.read_bytes().startswith(whole)
    assert Ledger(path, CLAIM, DELTA).entries == keep + 1


def test_a_full_disk_leaves_a_whole_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, CLAIM, DELTA)
    ledger.spend(0, Release(2.0))
    whole = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            ledger.spend(1, Release(2.0))
    assert path.read_bytes() == whole
    assert Ledger(path, CLAIM, DELTA).entries == 1


def test_a_simulation_resumes_without_a_file(tmp_path: Path) -> None:
    """It guarantees nothing, so its entries may be made up; the numbers are those of a run that went through."""
    make = lambda: ft.Run(private(None, entropy=privacy.from_seed(3), sampling_rate=0.6), ft.InProcess(DATA))
    whole = make()
    for _ in whole.rounds(4):
        pass
    half = make()
    half.step()
    half.step()
    half.save(tmp_path / "checkpoint")
    resumed = make().load(tmp_path / "checkpoint")
    for _ in resumed.rounds(4):
        pass
    assert torch.equal(resumed.server["weight"], whole.server["weight"])
    assert resumed.history["epsilon"].tolist() == whole.history["epsilon"].tolist()
    assert resumed.algorithm.budget.claim.entropy == NO_GUARANTEE


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_no_budget_is_not_a_budget(budget: float) -> None:
    with pytest.raises(ValueError, match="positive budget"):
        Ledger(None, CLAIM, DELTA, budget)
