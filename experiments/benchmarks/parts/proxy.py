"""A proxy in user space between sites and their server: it delays, cuts connections, and falls silent for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from queue import SimpleQueue


class Proxy:
    """Passes on what comes to `port` to another port of this machine.

    Args:
        target: the port.
        delay: seconds that every byte takes in each direction.
    """

    def __init__(self, target: int, delay: float = 0.0) -> None:
        self.target, self.delay, self.silent = target, delay, 0.0
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections there are."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
            self.cuts += len(sockets) // 2
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def fall_silent(self, seconds: float) -> None:
        """Passes on nothing for so long; connections stay as they are."""
        self.silent = time.monotonic() + seconds

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._sockets |= {near, far}
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                    threading.Thread(target=self._read, args=(one, queue), daemon=True).start()
                    threading.Thread(target=self._write, args=(other, queue), daemon=True).start()

    def _read(self, stream: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = stream.recv(2**16)
            except OSError:
                data = b""
            queue.put((time.monotonic() + self.delay, data))

    def _write(self, stream: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            when, data = queue.get()
            time.sleep(max(0.0, when - time.monotonic(), self.silent - time.monotonic()))
            try:
                if not data:
                    stream.shutdown(socket.SHUT_WR)
                    return
                stream.sendall(data)
            except OSError:
                return
