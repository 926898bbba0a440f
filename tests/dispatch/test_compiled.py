"""Programs in C: compiled once, kept where nobody else can write, and done without where there is no compiler."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedtorch.dispatch import choice, compiled

needs = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")
SOURCE = "int times(int number) { return FACTOR * number; }\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which nothing has been found yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(choice.VARIABLE, "on")
    compiled._loaded.cache_clear()
    return tmp_path / "cache" / "fedtorch" / "compiled"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "times.c"
    file.write_text(SOURCE)
    return file


@needs
def test_a_program_is_compiled_once_and_kept(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [compiled.library(source, FACTOR=factor).times(7) for factor in ("2", "3")] == [14, 21]  # type: ignore[union-attr]
    assert len(list(cache.glob("times-*.so"))) == 2
    assert cache.stat().st_mode & 0o77 == 0
    compiled._loaded.cache_clear()
    monkeypatch.setattr(compiled, "_compile", lambda *a: pytest.fail("compiled again"))
    assert compiled.library(source, FACTOR="2").times(7) == 14  # type: ignore[union-attr]


@needs
def test_another_text_is_another_program(source: Path) -> None:
    assert compiled.library(source, FACTOR="2").times(7) == 14  # type: ignore[union-attr]
    source.write_text(SOURCE.replace("*", "+"))
    compiled._loaded.cache_clear()
    assert compiled.library(source, FACTOR="2").times(7) == 9  # type: ignore[union-attr]


def test_off_means_no_program(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "off")
    assert compiled.library(source, FACTOR="2") is None
    assert not cache.exists()


def test_without_a_compiler_there_is_no_program(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiler", lambda: None)
    assert compiled.library(source, FACTOR="2") is None


@needs
def test_what_does_not_compile_is_said_with_the_compilers_words(source: Path, caplog: Any) -> None:
    source.write_text("int times(int number) { return missing; }\n")
    assert compiled.library(source, FACTOR="2") is None
    assert "times.c could not be compiled, and runs without its program" in caplog.text
    assert "missing" in caplog.text


def test_a_compiler_that_hangs_is_not_waited_for(source: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def hang(*a: Any, timeout: float, **k: Any) -> None:
        raise subprocess.TimeoutExpired("cc", timeout)

    monkeypatch.setattr(compiled, "_compiler", lambda: ("cc", "1"))
    monkeypatch.setattr(subprocess, "run", hang)
    assert compiled.library(source, FACTOR="2") is None
    assert "timed out after 60" in caplog.text


@needs
def test_a_folder_that_others_write_to_is_not_used(source: Path, cache: Path, caplog: Any) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert compiled.library(source, FACTOR="2") is None
    assert "to belong to this user and nobody else to write to it, but its mode is drwxrwxrwx" in caplog.text
    assert list(cache.iterdir()) == []


@needs
def test_another_header_is_another_program(source: Path) -> None:
    """Headers count that a header includes, too."""
    for name, text in (("outer.h", '#include "inner.h"\n'), ("inner.h", "enum { FACTOR = 5 };\n")):
        (source.parent / name).write_text(text)
    source.write_text('#include "outer.h"\n' + SOURCE)
    assert compiled.library(source).times(7) == 35  # type: ignore[union-attr]
    (source.parent / "inner.h").write_text("enum { FACTOR = 6 };\n")
    compiled._loaded.cache_clear()
    assert compiled.library(source).times(7) == 42  # type: ignore[union-attr]


@needs
def test_a_cache_of_a_relative_path_is_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Else a folder that somebody else has prepared would be one of programs wherever Python is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiled.library(source, FACTOR="2").times(7) == 14  # type: ignore[union-attr]
    assert not (tmp_path / "here").exists()
    made = [tmp_path / "home" / each for each in (".cache", ".cache/fedtorch", ".cache/fedtorch/compiled")]
    assert [each.stat().st_mode & 0o777 for each in made] == [0o700] * 3
