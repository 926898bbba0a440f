"""Files of data sets: the user's folder first, then the cache, then the publisher; checksums always."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedtorch.data import cache, catalogue, data_sets, heart_disease, locate
from fedtorch.data.catalogue import DataSet, File, describe

CONTENT = b"1,2\n3,4\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NOWHERE = "http://127.0.0.1:1/file.csv"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An empty data folder and an empty cache, and nothing between this machine and itself."""
    given, cached = tmp_path / "given", tmp_path / "cache"
    (given / "set").mkdir(parents=True)
    monkeypatch.setenv("FEDTORCH_DATA_DIR", str(given))
    monkeypatch.setenv("FEDTORCH_CACHE", str(cached))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    return given, cached


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a file with `CONTENT` on a server of our own."""
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "file.csv").write_bytes(CONTENT)
    handler = partial(Quiet, directory=str(tmp_path / "published"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/file.csv"
        server.shutdown()
        thread.join()


def path(url: str | None, *sha256: str) -> Path:
    file = File("file.csv", sha256 or (SHA256,), len(CONTENT), url, note="in an archive")
    return cache.path(DataSet("name", "what", "clients", "licence", "https://page", "citation", "set", (file,)), file)


def test_the_data_folder_comes_first(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "set" / "file.csv"
    file.write_bytes(CONTENT)
    assert path(NOWHERE) == path(None) == path(NOWHERE, "0" * 64, SHA256) == file
    assert not folders[1].exists()


@pytest.mark.parametrize("content", [b"something else", CONTENT[:5]])
def test_a_wrong_checksum_names_file_and_digests(content: bytes, folders: tuple[Path, Path]) -> None:
    file = folders[0] / "set" / "file.csv"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"Expected .* with 8 bytes and sha256") as caught:
        path(NOWHERE)
    for part in (str(file), SHA256, hashlib.sha256(content).hexdigest(), f"got {len(content)} bytes"):
        assert part in str(caught.value)


def test_a_file_is_downloaded_once(folders: tuple[Path, Path], url: str) -> None:
    file = path(url)
    assert file == folders[1] / "set" / "file.csv"
    assert file.read_bytes() == CONTENT
    assert path(NOWHERE) == path(None) == file


def test_a_damaged_cache_is_replaced(url: str) -> None:
    path(url).write_bytes(b"half a fi")
    assert path(url).read_bytes() == CONTENT


def test_a_download_with_another_checksum_is_refused(folders: tuple[Path, Path], url: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"another sha256, {SHA256}") as caught:
        path(url, "0" * 64)
    assert "0" * 64 in str(caught.value)
    assert not (folders[1] / "set" / "file.csv").exists()


@pytest.mark.parametrize("missing", ["address", "file", "publisher"])
def test_a_file_that_cannot_be_had_says_how_to_get_it(missing: str, url: str) -> None:
    address = {"address": NOWHERE, "file": url + ".not", "publisher": None}[missing]
    with pytest.raises(FileNotFoundError, match="set the environment variable FEDTORCH_DATA_DIR") as caught:
        path(address)
    for part in ("set/file.csv", SHA256, "8 bytes", "https://page", "in an archive", address or "no address"):
        assert part in str(caught.value)


def test_the_cache_has_a_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTORCH_CACHE")
    assert cache.cache_folder().name == "fedtorch"


def test_a_data_set_without_its_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTORCH_DATA_DIR")
    hearts = describe("heart_disease")
    files = tuple(file._replace(url=NOWHERE) for file in hearts.files)
    monkeypatch.setattr(catalogue, "DATA_SETS", (hearts._replace(files=files),))
    with pytest.raises(FileNotFoundError, match=r"heart_disease_uci/processed\.cleveland\.data"):
        heart_disease()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected a data set in \['battery', .*, but got 'hearts'"):
        locate("hearts", "heart.csv")
    with pytest.raises(ValueError, match=r"Expected a file of heart_failure, \['heart.csv'\], but got 'heart'"):
        locate("heart_failure", "heart")


def test_the_catalogue_is_complete() -> None:
    names = [data_set.name for data_set in data_sets()]
    assert names == sorted(set(names))
    files = [(d.folder, file) for d in data_sets() for file in d.files]
    assert len({(folder, file.name) for folder, file in files}) == len(files) == 27
    for data_set in data_sets():
        assert all([data_set.what, data_set.clients, data_set.licence, data_set.citation])
        assert data_set.page.startswith("http")
        assert bool(data_set.files) == bool(data_set.folder)
    for _, file in files:
        assert all(len(sha256) == 64 for sha256 in file.sha256)
        assert file.url is None or file.url.endswith("/" + file.name)
        assert file.url or file.note, f"{file.name} needs a way to come by"
