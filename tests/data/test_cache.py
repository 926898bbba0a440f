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

from fedtorch.data import cache, heart_disease

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


def test_the_data_folder_comes_first(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "set" / "file.csv"
    file.write_bytes(CONTENT)
    assert cache.path("set", "file.csv", SHA256, NOWHERE) == file
    assert cache.path("set", "file.csv", ["0" * 64, SHA256], NOWHERE) == file
    assert not folders[1].exists()


def test_a_wrong_checksum_names_file_and_digests(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "set" / "file.csv"
    file.write_bytes(b"something else")
    actual = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ValueError, match=r"Expected .* with sha256") as caught:
        cache.path("set", "file.csv", SHA256, NOWHERE)
    for part in (str(file), SHA256, actual):
        assert part in str(caught.value)


def test_a_file_is_downloaded_once(folders: tuple[Path, Path], url: str) -> None:
    file = cache.path("set", "file.csv", SHA256, url)
    assert file == folders[1] / "set" / "file.csv"
    assert file.read_bytes() == CONTENT
    assert cache.path("set", "file.csv", SHA256, NOWHERE) == file


def test_a_damaged_cache_is_replaced(folders: tuple[Path, Path], url: str) -> None:
    file = cache.path("set", "file.csv", SHA256, url)
    file.write_bytes(b"half a fi")
    assert cache.path("set", "file.csv", SHA256, url).read_bytes() == CONTENT


def test_a_download_with_another_checksum_is_refused(folders: tuple[Path, Path], url: str) -> None:
    with pytest.raises(FileNotFoundError, match=SHA256):
        cache.path("set", "file.csv", "0" * 64, url)
    assert not (folders[1] / "set" / "file.csv").exists()


@pytest.mark.parametrize("missing", ["address", "file"])
def test_a_failed_download_says_how_to_get_the_file(missing: str, url: str) -> None:
    with pytest.raises(FileNotFoundError, match="FEDTORCH_DATA_DIR") as caught:
        cache.path("set", "file.csv", SHA256, NOWHERE if missing == "address" else url + ".not")
    for part in ("set/file.csv", SHA256, url.rsplit("/", 1)[1]):
        assert part in str(caught.value)


def test_the_cache_has_a_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTORCH_CACHE")
    assert cache.cache_folder().name == "fedtorch"


def test_a_data_set_without_its_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTORCH_DATA_DIR")
    monkeypatch.setattr("fedtorch.data.datasets.HEART_DISEASE_URL", "http://127.0.0.1:1/")
    with pytest.raises(FileNotFoundError, match=r"heart_disease_uci/processed\.cleveland\.data"):
        heart_disease()
