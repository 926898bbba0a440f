"""Downloads against servers of our own that cut, refuse, or cannot resume."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedtorch.data.download import digest, download

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CUT = 100_000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        if server.silent:
            server.woken.wait(10)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranged else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start or (asked and server.ranged) else 200)
        if start:
            shown = start + server.shift
            self.send_header("Content-Range", f"bytes {shown}-{len(CONTENT) - 1}/{len(CONTENT)}")
        body = CONTENT[start:]
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of `CONTENT`: `cuts` says after how many bytes the next answers break off."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        it: Any = running
        it.ranges, it.cuts, it.ranged, it.length, it.shift, it.silent = [], [], True, True, 0, False
        it.woken = threading.Event()
        it.url = f"http://127.0.0.1:{running.server_address[1]}/file"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it
        it.woken.set()
        running.shutdown()
        thread.join()


def part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def test_a_cut_download_is_resumed(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "new" / "file"
    server.cuts = [CUT]
    with pytest.raises(ConnectionError, match=f"cut after {CUT} of {len(CONTENT)} bytes; they are kept"):
        download(server.url, file, [SHA256])
    assert not file.exists()
    assert part(file).read_bytes() == CONTENT[:CUT]
    download(server.url, file, [SHA256])
    assert server.ranges == [None, f"bytes={CUT}-"]
    assert file.read_bytes() == CONTENT
    assert not part(file).exists()
    download(server.url, file, [SHA256])
    assert len(server.ranges) == 2


def test_it_may_be_cut_again_and_again(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    server.cuts = [1000, 2000, 3000]
    for kept in (1000, 3000, 6000):
        with pytest.raises(ConnectionError, match=f"cut after {kept} of"):
            download(server.url, file, [SHA256])
    download(server.url, file, [SHA256])
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("way", ["no ranges", "another range"])
def test_a_server_that_cannot_resume_starts_again(way: str, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    part(file).write_bytes(CONTENT[:CUT])
    server.ranged, server.shift = way != "no ranges", 7
    download(server.url, file, [SHA256])
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [CUT, len(CONTENT), len(CONTENT) + 5])
def test_a_damaged_part_is_replaced(size: int, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    part(file).write_bytes(b"x" * size)
    download(server.url, file, [SHA256])
    assert file.read_bytes() == CONTENT


def test_a_whole_part_is_not_asked_for_again(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    part(file).write_bytes(CONTENT)
    download(server.url, file, [SHA256])
    assert server.ranges == []
    assert file.read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(ValueError, match=f"another sha256, {SHA256}, which was deleted"):
        download(server.url, file, ["0" * 64])
    assert not file.exists()
    assert not part(file).exists()


def test_a_file_that_is_too_large_is_refused(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        download(server.url, file, [SHA256], max_bytes=1000)
    assert not file.exists()
    assert not part(file).exists()
    download(server.url, file, [SHA256], max_bytes=len(CONTENT))


def test_a_length_is_not_needed(server: Any, tmp_path: Path) -> None:
    server.length = False
    download(server.url, tmp_path / "file", [SHA256])
    assert digest(tmp_path / "file") == SHA256


def test_time_is_bounded(server: Any, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="took too long"):
        download(server.url, tmp_path / "file", [SHA256], deadline=0.0)
    server.silent = True
    with pytest.raises(OSError, match="timed out"):
        download(server.url, tmp_path / "other", [SHA256], timeout=0.1)
    assert not (tmp_path / "other").exists()


def test_many_at_once_download_once(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    threads = [threading.Thread(target=download, args=(server.url, file, [SHA256])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == CONTENT
    assert server.ranges == [None]


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("content", [b"precious", CONTENT, CONTENT[:CUT]], ids=["other", "the file", "a beginning"])
def test_a_link_in_place_of_the_part_leaves_its_target_alone(
    server: Any, hard: bool, content: bytes, tmp_path: Path
) -> None:
    file, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(content)
    if hard:
        part(file).hardlink_to(target)
    else:
        part(file).symlink_to(target)
    download(server.url, file, [SHA256])
    assert target.read_bytes() == content
    assert file.read_bytes() == CONTENT
    assert not file.is_symlink()
    assert file.stat().st_nlink == 1
    assert server.ranges == [None]


def test_a_link_to_nothing_makes_nothing_elsewhere(server: Any, tmp_path: Path) -> None:
    file, target = tmp_path / "file", tmp_path / "target"
    part(file).symlink_to(target)
    download(server.url, file, [SHA256])
    assert not target.exists()
    assert file.read_bytes() == CONTENT
