"""Compiled programs: kept where nobody else can write, read whole, and done without where numba is not there."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from fedtorch.programs import cache, choice, engine
from fedtorch.programs.engine import Program, program

pytest.importorskip("numba")
FACTOR = 2


@program(inline=True)
def times(number):
    return FACTOR * number


def scaled() -> Program:
    """A program that no process has compiled yet."""

    @program("void(int64[::1])")
    def scale(numbers):
        for i in range(len(numbers)):
            numbers[i] = times(numbers[i])

    return scale


def of_seven(made: Program) -> int:
    numbers = numpy.array([7])
    made(numbers)
    return int(numbers[0])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(choice.VARIABLE, "on")
    cache._once.cache_clear()
    return tmp_path / "cache" / "fedtorch" / "programs"


def kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.Cache, "save_overload", lambda *a: pytest.fail("compiled again"))


def test_a_program_is_compiled_once_and_kept_for_this_user_alone(folder, monkeypatch) -> None:
    assert of_seven(scaled()) == 14
    (file,) = kept(folder)
    assert [path.stat().st_mode & 0o777 for path in (file, folder, folder.parent, folder.parent.parent)] == [
        *(0o600, 0o700, 0o700, 0o700)
    ]
    not_compiled(monkeypatch)
    assert of_seven(scaled()) == 14


def test_what_a_program_names_is_part_of_it(folder, monkeypatch) -> None:
    assert of_seven(scaled()) == 14
    monkeypatch.setitem(globals(), "FACTOR", 3)
    monkeypatch.setitem(globals(), "times", program(inline=True)(times._function))
    assert of_seven(scaled()) == 21
    assert len(kept(folder)) == 2


@pytest.mark.parametrize("damage", ["torn", "zeroed", "foreign", "empty", "flipped"])
def test_a_damaged_file_is_compiled_anew(damage: str, folder: Path, caplog: Any) -> None:
    assert of_seven(scaled()) == 14
    (file,) = kept(folder)
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    zeroed = bytes(len(data))
    texts = {"torn": data[:-9], "zeroed": zeroed, "foreign": b"x" * 99, "empty": b"", "flipped": bytes(flipped)}
    file.write_bytes(texts[damage])
    assert of_seven(scaled()) == 14
    assert "again, because its file could not be read: Expected" in caplog.text
    caplog.clear()
    assert of_seven(scaled()) == 14  # it was written anew
    assert "could not be read" not in caplog.text


def test_a_file_that_others_can_write_to_is_not_read(folder: Path, caplog: Any) -> None:
    assert of_seven(scaled()) == 14
    kept(folder)[0].chmod(0o666)
    assert of_seven(scaled()) == 14
    assert "to be this user's alone, but others can write to it" in caplog.text


def test_a_link_is_not_followed(folder: Path, tmp_path: Path, caplog: Any) -> None:
    assert of_seven(scaled()) == 14
    (file,) = kept(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert of_seven(scaled()) == 14
    assert "could not be read" in caplog.text


@pytest.mark.parametrize("above", [0, 1, 2])
def test_folders_that_others_write_to_are_not_used(above: int, folder: Path, caplog: Any) -> None:
    """Another user's script exchanges a folder for one of his own: it needs to write to the one above."""
    folder.mkdir(parents=True, mode=0o700)
    place = (folder, *folder.parents)[above]
    place.chmod(0o777)
    assert of_seven(scaled()) == 14
    assert f"Expected {place.resolve()}, above compiled programs, to belong to this user or root" in caplog.text
    assert kept(folder) == []


def test_a_sticky_folder_above_is_as_good_as_a_private_one(folder: Path) -> None:
    """As in /tmp, others cannot rename there what is this user's."""
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o1777)
    assert of_seven(scaled()) == 14
    assert len(kept(folder)) == 1


def test_a_full_disk_costs_the_cache_only(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert [of_seven(scaled()) for _ in range(2)] == [14, 14]
    assert caplog.text.count("compiled programs are not cached") == 1
    assert kept(folder) == []


def _in_a_process(folder: str, out: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    out.put(of_seven(scaled()))


@pytest.mark.slow
def test_parts_of_the_same_name_that_processes_have_kept_are_not_mixed_up(tmp_path: Path) -> None:
    """Each process numbers its functions from the same number on, and the compiler links them by name and number."""
    begin = (
        "import torch\n"
        "from fedtorch import random\n"
        "from fedtorch.random import philox\n"
        "def mean(draw): return float(draw(random.key(3), (99,), torch.float64).mean())\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def said(lines: str) -> list[str]:
        command = [sys.executable, "-c", begin + lines]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    normal, exponential = (said(f"print(mean(philox.{name}))") for name in ("normal", "exponential"))
    assert normal != exponential
    assert said("print(mean(philox.normal), mean(philox.exponential))") == normal + exponential
    assert said("print(mean(philox.exponential), mean(philox.normal))") == exponential + normal


def test_processes_at_once_do_not_disturb_each_other(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out: Any = context.Queue()
    cache_home = str(tmp_path / "cache")
    processes = [context.Process(target=_in_a_process, args=(cache_home, out)) for _ in range(8)]
    for process in processes:
        process.start()
    assert [out.get(timeout=120) for _ in processes] == [14] * 8
    for process in processes:
        process.join()
    assert len(kept(folder)) == 1


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read(folder: Path, tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal\n"
        "from tests.programs import test_cache\n"
        "pathlib.Path.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "test_cache.of_seven(test_cache.scaled())\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert ended.returncode == -9
    assert len(kept(folder)) == 1
    assert of_seven(scaled()) == 14
    assert sum(not file.name.startswith(".") for file in kept(folder)) == 1


def test_a_cache_of_a_relative_path_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a folder that somebody else has prepared would be one of programs wherever Python is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert of_seven(scaled()) == 14
    assert not (tmp_path / "here").exists()
    assert len(kept(tmp_path / "home" / ".cache" / "fedtorch" / "programs")) == 1


def test_without_a_home_programs_are_compiled_in_memory(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert of_seven(scaled()) == 14
    assert "compiled programs are not cached" in caplog.text


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        scaled()(numpy.array([7.5]))


def test_off_and_without_numba_there_is_no_program(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert scaled().usable()
    with monkeypatch.context() as patch:
        patch.setenv(choice.VARIABLE, "off")
        assert not scaled().usable()
    engine._importable.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        assert not any(scaled().usable() for _ in range(2))
    engine._importable.cache_clear()
    assert caplog.text.count("operations run without compiled programs, more slowly") == 1


def test_what_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(engine, "_PATIENCE", 0.0)
    assert of_seven(scaled()) == 14
    assert "compiling the program" in caplog.text
    assert "`python -m fedtorch.programs` compiles all in advance" in caplog.text
    caplog.clear()
    assert of_seven(scaled()) == 14  # it is read
    assert caplog.text == ""


def test_all_programs_are_compiled_ahead(folder: Path) -> None:
    from fedtorch.programs.__main__ import every

    names = {each.name for each in every()}
    assert {"draw_normal", "fold_keys", "write_limbs"} <= names
