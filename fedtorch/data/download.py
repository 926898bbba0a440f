"""Resumable download of one file, which gets its name only when it is complete.

The bytes go to `<file>.part`. If the connection breaks, the part stays and the next call requests only the rest; a
server without range requests sends everything again. Processes that want the same file wait for each other. A symbolic
link in place of the part is removed, and its target is not touched.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from filelock import FileLock

from fedtorch.progress import Progress

BLOCK = 1 << 16


def download(
    url: str,
    file: Path,
    sha256: Collection[str],
    *,
    max_bytes: int = 1 << 30,
    timeout: float = 30.0,
    deadline: float = 3600.0,
) -> None:
    """Download `url` to `file`, unless it is there already.

    Args:
        url: an http or https address.
        file: the destination; its folder is made. `<file>.part` and `<file>.lock` beside it are used too.
        sha256: the accepted checksums.
        max_bytes: a larger file is refused.
        timeout: the longest silence of the server, in seconds.
        deadline: the longest time that one call may take, in seconds.

    Raises:
        ValueError: a wrong checksum, or too large a file; nothing of it stays on disk.
        OSError: the server was not reached, refused, was silent, or cut the connection; the received part stays for the
            next call.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    end = time.monotonic() + deadline
    with FileLock(f"{file}.lock", timeout=deadline):
        if file.is_file() and digest(file) in sha256:
            return
        if os.path.lexists(part) and not _ours(part):
            part.unlink()
        if not (part.is_file() and digest(part) in sha256):
            resumed = _receive(url, part, max_bytes, timeout, end)
            if resumed and digest(part) not in sha256:  # the beginning may be of an older or damaged file
                part.unlink()
                _receive(url, part, max_bytes, timeout, end)
        if (actual := digest(part)) not in sha256:
            size = part.stat().st_size
            part.unlink()
            raise ValueError(f"a file of {size} bytes with another sha256, {actual}, which was deleted")
        os.replace(part, file)


def digest(file: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _ours(part: Path) -> bool:
    """Return whether a path is a regular file without other hard links, so that writing to it changes no other file."""
    status = part.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _no_link(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _receive(url: str, part: Path, max_bytes: int, timeout: float, end: float) -> bool:
    """Append the missing bytes to `part`, or write it from the start; return whether it appended."""
    have = part.stat().st_size if part.is_file() else 0
    with _request(url, have, timeout) as response:
        resumed = have > 0 and response.status == 206
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        received = start
        try:
            shown = Progress(part.stem, total, unit="B", initial=start)
            with shown, open(part, "ab" if resumed else "wb", opener=_no_link) as stream:
                while received <= max_bytes and (block := response.read1(BLOCK)):
                    stream.write(block)
                    received += len(block)
                    shown.update(len(block))
                    if time.monotonic() > end:
                        raise TimeoutError("the download took too long")
                stream.flush()
                os.fsync(stream.fileno())
        except (HTTPException, OSError) as error:
            raise ConnectionError(f"{_cut(received, total)} ({error or type(error).__name__})") from error
    if received > max_bytes:
        part.unlink()
        raise ValueError(f"a file of more than {max_bytes} bytes, which was deleted")
    if total is not None and received < total:
        raise ConnectionError(_cut(received, total))
    return resumed


def _request(url: str, have: int, timeout: float) -> HTTPResponse:
    """Request the bytes from `have` on (status 206 if the server supports ranges); return the server's answer."""
    headers = {"User-Agent": "fedtorch", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response: HTTPResponse = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # the server's file is not longer than the part
            return _request(url, 0, timeout)
        raise
    except HTTPException as error:
        raise ConnectionError(f"no valid answer ({error or type(error).__name__})") from error
    if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        response.close()
        if not have:
            raise ConnectionError("a part of the file that was not asked for")
        return _request(url, 0, timeout)
    return response


def _cut(received: int, total: int | None) -> str:
    of = "" if total is None else f" of {total}"
    return f"the connection was cut after {received}{of} bytes; they are kept, so call again to get the rest"
