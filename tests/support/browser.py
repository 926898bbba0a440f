"""A headless Chromium, asked over a pipe what a page looks like in it (the DevTools protocol, without a library)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


class Browser:
    """One page of a running Chromium.

    Attributes:
        complaints: what the console said, or what could not be loaded.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._number, self._rest = commands, answers, 0, b""
        self.complaints: list[str] = []
        self._loaded, self._session = False, None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what comes before it is noted."""
        number = self._send(method, **parameters)
        while True:
            found = self._read()
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return dict(found["result"])

    def _send(self, method: str, **parameters: Any) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._number

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Opens a page in a window of this size, as a phone would where it is narrow, and waits until it is there."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self._loaded = False
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._read()

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError("Expected an answer of Chromium, but it has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        said = found.get("params", {})
        self._loaded = self._loaded or found.get("method") == "Page.loadEventFired"
        if found.get("method") == "Log.entryAdded":
            self.complaints.append(said["entry"]["text"])
        elif found.get("method") in _COMPLAINTS:
            self.complaints.append(json.dumps(said))
        elif found.get("method") == "Page.javascriptDialogOpening":
            self.complaints.append(said["message"])
            self._send("Page.handleJavaScriptDialog", accept=True)
        return found


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A Chromium with its profile in a folder; it is ended with the context."""
    assert PROGRAM is not None
    ends = [*os.pipe(), *os.pipe()]
    # Out of the way of 3 and 4, which are the ones that Chromium reads and writes.
    commands, to_it, from_it, answers = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    shell = f'exec 3<&{commands} 4>&{answers}; exec "$@"'
    call = ["bash", "-c", shell, "bash", PROGRAM, *_FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(call, pass_fds=(commands, answers), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(to_it, from_it)
    finally:
        os.close(to_it)
        end = time.monotonic() + 5
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
        process.wait()
        os.close(from_it)
