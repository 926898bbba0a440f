"""Streams of gRPC with TLS on both sides and nothing else: what the same bytes take where no frame is read or written.

A thread of gRPC's own at either end hands a message to the one that waits for it; there is no protocol, no limit on
what waits, and no computation. The library's streams are the same method, with the same settings of gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.streams.grpc_settings import dial, library, listen, listening
from fedtorch.sites.streams.hub import Limits

_SERVICE, _METHOD = "benchmark.Bare", "Bytes"


class BareServer:
    """Listens for streams of sites; the first message on each is the site's name.

    Args:
        own: the server's identity.
        limits: of gRPC.
        sites: how many will come.

    Attributes:
        port: at which it listens.
    """

    def __init__(self, own: Identity, limits: Limits, sites: int) -> None:
        grpc = library()
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        self._outboxes: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(sites)]
        self._free = list(self._outboxes)
        self._server = grpc.server(ThreadPoolExecutor(sites), options=listening(limits, sites))
        self.port = listen(self._server, "127.0.0.1:0", own, both=True)
        handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(self._stream)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self._server.start()

    def meet(self) -> None:
        """Wait until all sites are there."""
        for _ in self._outboxes:
            self._inbox.get(timeout=60.0)

    def round(self, requests: Sequence[bytes]) -> None:
        """Send each site its bytes, and wait for all answers."""
        for outbox, request in zip(self._outboxes, requests, strict=True):
            outbox.put(request)
        for _ in requests:
            self._inbox.get(timeout=60.0)

    def close(self) -> None:
        """End all streams."""
        for outbox in self._outboxes:
            outbox.put(None)
        self._server.stop(1.0).wait()

    def _stream(self, came: Iterator[bytes], context: Any) -> Iterator[bytes]:
        outbox = self._free.pop()
        for message in came:
            self._inbox.put(message)
            said = outbox.get()
            if said is None:
                return
            yield said


def site(folder: Path, address: str, names: Sequence[str], limits: Limits, size: int) -> None:
    """Answers every message by `size` bytes, until the stream ends."""
    channel = dial(address, (own := identity.read(folder / names[0])).authority, own, limits)
    outbox: SimpleQueue[bytes] = SimpleQueue()
    outbox.put(b"")
    call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(iter(outbox.get, None))
    answer: Callable[[], None] = partial(outbox.put, bytes(size))
    for _ in call:
        answer()
