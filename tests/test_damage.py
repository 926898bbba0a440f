"""Whatever is damaged in a file is one `ValueError` that names it; files of sites and servers are their owner's."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.certified import certified
from support.loopback import Loopback
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.sites import Carried, carry_of, offers

import fedtorch as ft
from fedtorch import _files as files, checkpoint
from fedtorch.checkpoint_io import PlainCheckpointIO
from fedtorch.data import FederatedData
from fedtorch.data.agreement.disclosure import AnswerLog
from fedtorch.protocol.versions import Versions
from fedtorch.report import folder
from fedtorch.sites import Policy, Remote, SiteConfiguration
from fedtorch.sites.enrolment import invite
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.roster import Roster
from fedtorch.sites.rounds import past_sums
from fedtorch.sites.rounds.past_sums import PastSums
from fedtorch.sites.rounds.policy import Refusal, Watch
from fedtorch.sites.rounds.session import check_begun
from fedtorch.sites.rounds.site import deliver
from fedtorch.sites.secure.masked import masked
from fedtorch.trust import secure
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import Claim, Ledger
from fedtorch.vfl.fit.guide import Guide, initial
from fedtorch.vfl.fit.part import Part, parts
from fedtorch.vfl.rows.daily_limit import DailyLimit

DATA = linear_clients([2, 3])
posix = pytest.mark.skipif(os.name == "nt", reason="modes are those of POSIX")


hidden = Carried(lambda: ft.scaffold(sgd(0.05)), masked(secure.Grid(30, 2.0**20), dropouts=0))


def averaging() -> ft.Algorithm:
    return ft.fedavg(sgd(0.05))


def run() -> ft.Run:
    return ft.Run(averaging(), ft.InProcess(DATA))


def part() -> Part:
    model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(1)], rho=1.0)
    key = ft.random.key(0)
    return parts(model, Guide(), initial(model, Guide(), 2, 1, key), key=key)[1]


def saved(path: Path) -> None:
    begun = run()
    begun.step()
    begun.save(path)


def remembered(path: Path) -> None:
    past_sums.begin(path.parent)
    memory = PastSums(path.parent)
    memory.open()
    for start in (b"1" * 32, b"2" * 32):
        memory.of_round(start, ["x"], None, frozenset("abc"), confirmed=True)


def released(path: Path) -> Ledger:
    made = Ledger(path, Claim("example", "zero out", "the server", "system"), 1e-5)
    if made.entries == 0:
        made.spend(0, Release(1.0))
    return made


TARGET, PART = run(), part()
KINDS: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path], Any]]] = {
    "run": ("run.safetensors", saved, TARGET.load),
    "trainer": (
        "last.ckpt",
        lambda path: PlainCheckpointIO().save_checkpoint({"numbers": torch.arange(100.0), "epoch": 3}, path),
        lambda path: PlainCheckpointIO().load_checkpoint(path),
    ),
    "rows": ("rows.safetensors", DATA.to_file, FederatedData.from_file),
    "part of a fit": ("party.safetensors", PART.save, PART.load),
    "states of a site": (
        "3.safetensors",
        lambda path: Versions(path.parent).put(3, {"theta": torch.ones(4)}),
        lambda path: Versions(path.parent).get(3),
    ),
    "what a run began with": (
        "began.safetensors",
        lambda path: check_begun(Versions(path.parent), "fedavg", DATA, anyway=False),
        lambda path: check_begun(Versions(path.parent), "fedavg", DATA, anyway=False),
    ),
    "history": (
        "history.safetensors",
        lambda path: ft.report.write(ft.run(averaging(), ft.InProcess(DATA), rounds=1), path.parent),
        lambda path: folder.read(path.parent),
    ),
    "rounds of a policy": (
        "rounds.json",
        lambda path: Watch(Policy(rounds=3), path.parent).count(),
        lambda path: Watch(Policy(rounds=3), path.parent),
    ),
    "answers": (
        "answers.jsonl",
        lambda path: AnswerLog(path.parent).once("mean of age", 10, lambda: [200, 61.5, "ü"]),
        lambda path: AnswerLog(path.parent).once("mean of age", 10, lambda: [200, 61.5, "ü"]),
    ),
    "roster": (
        "roster.json",
        lambda path: Roster(path).add("ward 7", "a1b2", rows=10),
        lambda path: Roster(path).sites,
    ),
    "guesses": (
        "guesses.json",
        lambda path: DailyLimit(path, 5).take(1, "clinic"),
        lambda path: DailyLimit(path, 5).take(0, "clinic"),
    ),
    "head of a ledger": (
        "spent.jsonl.head",
        lambda path: released(path.with_suffix("")),
        lambda path: released(path.with_suffix("")),
    ),
    "ledger": ("spent.jsonl", released, released),
    "sums under masks": ("sums.jsonl", remembered, lambda path: PastSums(path.parent).open()),
}
TENSORS = ["run", "rows", "part of a fit", "states of a site", "what a run began with", "history"]
LOGS = ["ledger", "sums under masks", "answers"]  # which grow, and are mended after a kill


def written(kind: str, where: Path) -> tuple[Path, Callable[[Path], Any]]:
    """A file of a kind, alone in its folder with what belongs to it, and how it is read."""
    name, write, read = KINDS[kind]
    path = where / kind / name
    path.parent.mkdir()
    write(path)
    read(path)
    return path, read


def is_refused(path: Path, read: Callable[[Path], Any], content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        read(path)
    assert path.stem in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_that_has_flipped_loads(kind: str, tmp_path: Path) -> None:
    """300 bits of the whole file, its last byte, and of a header all bits by which the digest is found."""
    path, read = written(kind, tmp_path)
    good = path.read_bytes()
    bits = {*random.Random(kind).sample(range(8 * len(good)), min(300, 8 * len(good)))}
    bits |= {*range(8 * (len(good) - 1), 8 * len(good)), *(range(8 * 40) if kind in TENSORS[:2] else ())}
    for bit in sorted(bits):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        is_refused(path, read, bytes(bad))
    path.write_bytes(good)
    read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_torn_zeroed_or_something_else_are_refused(kind: str, tmp_path: Path) -> None:
    path, read = written(kind, tmp_path)
    good = path.read_bytes()
    is_refused(path, read, bytes(len(good)))
    is_refused(path, read, b"")
    if kind in LOGS:
        return
    for size in (1, 7, 8, 40, len(good) // 2, len(good) - 1):
        is_refused(path, read, good[:size])
    for other in (good + b"\0", good[8:], b"x" * 100, b"{}", b"[]", b"null", good + good):
        is_refused(path, read, other)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"folder|directory|path of a checkpoint"):
        read(path)


@pytest.mark.parametrize("kind", TENSORS)
def test_what_is_in_a_header_counts(kind: str, tmp_path: Path) -> None:
    """Names, places and digits are exchanged so that any reader of the format takes the file."""
    path, read = written(kind, tmp_path)
    good = path.read_bytes()
    header = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    digits = header["__metadata__"]["sha256"].encode()
    is_refused(path, read, good.replace(digits, digits[::-1]))
    is_refused(path, read, good.replace(digits, digits.upper()))
    is_refused(path, read, good.replace(b'"sha256"', b'"sha255"'))
    names = [name for name in header if name != "__metadata__"]
    is_refused(path, read, good.replace(f'"{names[0]}":'.encode(), f'"{names[0][:-1]}_":'.encode()))
    twins = [name for name in names if header[name]["dtype"] == header[names[0]]["dtype"]]
    if len(twins) > 1:
        one, other = (f'"{name}":'.encode() for name in twins[:2])
        is_refused(path, read, good.replace(one, b"\0").replace(other, one).replace(b"\0", other))


def test_tensors_that_have_changed_places_are_refused(tmp_path: Path) -> None:
    path, one, other = tmp_path / "two.safetensors", torch.randn(8), torch.randn(8)
    checkpoint.write(path, {"one": one, "other": other})
    good = path.read_bytes()
    numbers = one.numpy().tobytes(), other.numpy().tobytes()
    assert good.endswith(b"".join(numbers))
    is_refused(path, checkpoint.read, good[:-64] + b"".join(numbers[::-1]))


@pytest.mark.parametrize("kind", TENSORS)
def test_a_file_without_a_digest_says_what_it_may_be(kind: str, tmp_path: Path) -> None:
    """Of another program, or of a version that wrote none."""
    path, read = written(kind, tmp_path)
    with checkpoint.opened(path) as content:
        flat, about = {name: content.tensor(name).clone() for name in content.names}, content.about
    save_file(flat, path, {"fedtorch": json.dumps(about)})
    with pytest.raises(ValueError, match=rf"{path.stem}.* an earlier version or another program has written it"):
        read(path)


def test_rows_of_other_programs_are_read(tmp_path: Path) -> None:
    """Nothing says whether they are as they were written, and where to stop is up to who writes them."""
    save_file({"0": torch.ones(5, 2), "counts": torch.tensor([2, 3])}, path := tmp_path / "rows", {"format": "pt"})
    assert FederatedData.from_file(path).counts.tolist() == [2, 3]
    with pytest.raises(ValueError, match="has written it"):
        checkpoint.read(path)


def test_rows_are_compared_in_blocks_and_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DATA.to_file(path := tmp_path / "rows")
    header = int.from_bytes(path.read_bytes()[:8], "little")
    read: list[int] = []
    block = memoryview(bytearray(64))
    monkeypatch.setattr(files, "_BLOCK", len(block))
    opened = Path.open

    def counted(self: Path, *arguments: Any) -> Any:
        file = opened(self, *arguments)

        class Counted:
            seek, readinto = file.seek, lambda self, room: read.append(len(room)) or file.readinto(room)  # type: ignore[func-returns-value]

            def read(self, size: int) -> bytes:
                read.append(size)
                return file.read(size)

            def __enter__(self) -> Counted:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

        return Counted()

    monkeypatch.setattr(Path, "open", counted)
    assert FederatedData.from_file(path).on_disk
    assert len(read) > 5
    assert max(size for size in read if size != header) == 64  # the header is read whole, and checked


@pytest.mark.parametrize("place", [0, 1, 63, 64, 65, 100, 136])
@pytest.mark.parametrize("block", [1, 64, 100, 200, 2**20])
def test_digits_may_stand_anywhere_in_a_file(place: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK", block)
    content = bytes(range(136))
    digits = hashlib.sha256(content).hexdigest().encode()
    assert files.digest_fits(io.BytesIO(content[:place] + digits + content[place:]), place)
    assert not files.digest_fits(io.BytesIO(content[:place] + digits + content[place:] + b"\0"), place)


def test_a_trainers_file_of_another_writer_is_held_against_its_checksums(tmp_path: Path) -> None:
    torch.save({"numbers": torch.arange(100.0)}, path := tmp_path / "other.ckpt")
    good, plain = path.read_bytes(), PlainCheckpointIO()
    assert plain.load_checkpoint(path)["numbers"].sum() == 4950
    place = good.index(torch.arange(100.0).numpy().tobytes())
    for byte in (0, 200, 399):
        bad = bytearray(good)
        bad[place + byte] ^= 1
        is_refused(path, plain.load_checkpoint, bytes(bad))


# -- who may read them -------------------------------------------------------------------------------------------------

PRIVATE = [kind for kind in KINDS if kind not in ("run", "trainer", "rows", "history")]


@pytest.fixture(params=[0o022, 0o002], ids=["022", "002"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(where: Path) -> tuple[set[int], set[int]]:
    """The modes of all files below a folder, and of all folders."""
    every = [(path, stat.S_IMODE(path.stat().st_mode)) for path in where.rglob("*")]
    return {mode for path, mode in every if path.is_file()}, {mode for path, mode in every if path.is_dir()}


@posix
def test_what_sites_and_servers_keep_is_their_owners(umask: int, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    for kind in PRIVATE:
        name, write, _ = KINDS[kind]
        files.private_folder(mine / kind / "deep")
        write(mine / kind / "deep" / name)
    server = identity.make_server(mine / "authority")
    server.save(mine / "servers" / "own")
    invite(mine / "authority", "ward 7", "127.0.0.1:1")
    Roster(mine / "rosters" / "roster.json").add("ward 7", "a1b2")
    configuration = SiteConfiguration(DATA, {"it": averaging}, policy=Policy(rounds=5, minimum=1))
    deliver(configuration, mine / "flower" / "states", True, [])
    host = Loopback(offers(linear_clients([4, 4, 4]), hidden), mine / "sites" / "states", certified("abc").identities)
    settings = {"rows": DATA.rows, "carry": carry_of(hidden), "roster": certified("abc").roster}
    sites = Remote(host, ["a", "b", "c"], "it", **settings)  # type: ignore[arg-type]
    there = ft.Run(hidden(), sites)
    there.step()
    there.save(mine / "servers" / "run.safetensors")
    sites.finish(there)
    host.sites["a"].ended.save(mine / "sites" / "models" / "a.safetensors")  # type: ignore[union-attr]
    names = {path.name for path in mine.rglob("*")}
    assert {"key.pem", "over", "began.safetensors", "sums.jsonl", "rounds.json", "lock", "a.safetensors"} <= names
    assert modes(tmp_path) == ({0o600}, {0o700})


@posix
def test_what_a_user_asks_for_keeps_the_umask(umask: int, tmp_path: Path) -> None:
    done = ft.run(averaging(), ft.InProcess(DATA), rounds=1)
    ft.report.write(done, tmp_path / "reports" / "page")
    done.save(tmp_path / "reports" / "run.safetensors")
    DATA.to_file(tmp_path / "reports" / "rows.safetensors")
    PlainCheckpointIO().save_checkpoint({}, tmp_path / "reports" / "last.ckpt")
    assert modes(tmp_path) == ({0o666 & ~umask}, {0o777 & ~umask})


@posix
@pytest.mark.parametrize(
    ("mode", "lets"), [(0o755, "see which files"), (0o770, "change which files"), (0o777, "change which"), (0o700, "")]
)
def test_a_folder_of_others_is_not_changed_and_said_once_where_it_is_open(
    mode: int, lets: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_folder = tmp_path / "shared"
    open_folder.mkdir()
    open_folder.chmod(mode)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            Watch(Policy(rounds=3), open_folder)
            Versions(open_folder)
            Roster(open_folder / "roster.json").add("a", "key")
    said = [record.getMessage() for record in caplog.records if str(open_folder) in record.getMessage()]
    assert len(said) == (lets != "")
    if said:
        assert f"lets others {lets}" in said[0]
        assert f"`chmod 700 {open_folder}`" in said[0]
    assert stat.S_IMODE(open_folder.stat().st_mode) == mode
    assert modes(open_folder)[0] == {0o600}


# -- a site's memory, by two processes at once -------------------------------------------------------------------------


def test_two_memories_on_one_folder_know_of_each_other(tmp_path: Path) -> None:
    """As two processes would hold them: what one has confirmed the other refuses, without being opened again."""
    past_sums.begin(tmp_path)
    one, other = PastSums(tmp_path), PastSums(tmp_path)
    one.open(), other.open()
    start, seven = b"1" * 32, frozenset("abcdefg")
    one.of_round(start, ["x"], None, seven, confirmed=False)
    other.of_round(start, ["x"], None, seven - {"g"}, confirmed=False)
    one.of_round(start, ["x"], None, seven, confirmed=True)
    with pytest.raises(Refusal, match="has taken part in a sum over the same start"):
        other.of_round(start, ["x"], None, seven - {"g"}, confirmed=True)
    other.of_round(b"2" * 32, ["x"], None, seven - {"g"}, confirmed=True)
    one.of_round(b"3" * 32, ["x"], None, frozenset("ab"), confirmed=True)
    again = PastSums(tmp_path)
    again.open()
    for known in (one, other, again):
        for first, sites in ((start, seven), (b"2" * 32, seven - {"g"}), (b"3" * 32, frozenset("ab"))):
            known.of_round(first, ["x"], None, sites, confirmed=False)
            with pytest.raises(Refusal):
                known.of_round(first, ["x"], None, sites | {"h"}, confirmed=False)


def test_a_set_of_very_many_sites_is_remembered(tmp_path: Path) -> None:
    past_sums.begin(tmp_path)
    memory, sites = PastSums(tmp_path), frozenset(f"{i:063d}" for i in range(1200))
    memory.open()
    memory.of_round(b"1" * 32, ["x"], None, sites, confirmed=True)
    again = PastSums(tmp_path)
    again.open()
    again.of_round(b"1" * 32, ["x"], None, sites, confirmed=True)
    with pytest.raises(Refusal, match="1200 in all"):
        again.of_round(b"1" * 32, ["x"], None, sites - {f"{7:063d}"}, confirmed=True)


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "authority.pem"])
def test_an_identity_that_is_damaged_is_refused_or_the_same(name: str, tmp_path: Path) -> None:
    """A letter of PEM may have spare bits, which mean nothing."""
    identity.make_server(tmp_path / "authority").save(tmp_path / "own")
    path, whole = tmp_path / "own" / name, identity.read(tmp_path / "own")
    good, same = path.read_bytes(), 0
    for bit in random.Random(name).sample(range(8 * len(good)), 150):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(bad))
        try:
            found = identity.read(tmp_path / "own")
        except ValueError as error:
            assert name in str(error)  # noqa: PT017
            continue
        same += 1
        assert identity.fingerprint(found.certificate) == identity.fingerprint(whole.certificate)
    assert same < 15


def test_numbers_are_read_as_they_were(tmp_path: Path) -> None:
    flat = {"z": torch.randn(3, dtype=torch.complex128), "b": torch.tensor([True]), "x": torch.randn(2, 3).T}
    checkpoint.write(path := tmp_path / "some", flat, {"of": "ü"})
    assert same_bits(checkpoint.read(path), flat)
    assert checkpoint.read(path, lambda name: name == "b").keys() == {"b"}
    with checkpoint.opened(path) as content:
        assert content.about["of"] == "ü"


@pytest.mark.parametrize("before", [1, 2, 3])
def test_complex_numbers_are_read_from_wherever_they_are_in_the_file(tmp_path: Path, before: int) -> None:
    """A file has its numbers at multiples of eight bytes, and kernels of complex128 want them at multiples of 16."""
    flat = {"a": torch.ones(before, dtype=torch.float64), "z": torch.linspace(0, 1, 65).to(torch.complex128) * (1 + 2j)}
    checkpoint.write(tmp_path / "file", flat)
    found = checkpoint.read(tmp_path / "file")
    assert all(torch.equal(found[name], leaf) for name, leaf in flat.items())
