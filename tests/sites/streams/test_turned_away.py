"""A server that closes a connection whose stream it has not seen yet, in frames of HTTP/2 written here."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedtorch.sites import connect
from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.streams.hub import Limits

pytest.importorskip("grpc")
PREFACE, HEAD = 24, 9  # bytes
HEADERS, SETTINGS, GOAWAY, ACK = 1, 4, 7, 1


def frame(kind: int, flags: int = 0, body: bytes = b"") -> bytes:
    """A frame of the whole connection."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + body


class TurnsAway:
    """Answers every stream by GOAWAY, with no stream as the last that was seen, then listens no more where it `closes`.

    Attributes:
        streams: how many were opened.
    """

    def __init__(self, folder: Path, own: Identity, closes: bool) -> None:
        (folder / "certificate").write_bytes(own.certificate)
        (folder / "key").write_bytes(own.key)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "certificate", folder / "key")
        self._context.set_alpn_protocols(["h2"])
        self._listener, self._closes, self.streams = socket.create_server(("127.0.0.1", 0)), closes, 0
        self._heard = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._heard.set()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                with suppress(EOFError), self._context.wrap_socket(plain, server_side=True) as stream:
                    self._turn_away(stream)

    def _turn_away(self, stream: ssl.SSLSocket) -> None:
        exactly(stream, PREFACE)
        stream.sendall(frame(SETTINGS))
        while (kind := self._next(stream)) != HEADERS:
            if kind == SETTINGS:
                stream.sendall(frame(SETTINGS, ACK))
        self.streams += 1
        if self._closes:
            self._listener.close()
        stream.sendall(frame(GOAWAY, body=bytes(8)))
        self._heard.wait(0.5)  # then the connection ends

    def _next(self, stream: ssl.SSLSocket) -> int | None:
        """Return the kind of the next frame; None for one that acknowledges."""
        head = exactly(stream, HEAD)
        exactly(stream, int.from_bytes(head[:3], "big"))
        return None if head[3] == SETTINGS and head[4] & ACK else head[3]


def exactly(stream: ssl.SSLSocket, count: int) -> bytes:
    """So many bytes of a stream."""
    came = b""
    while len(came) < count:
        part = stream.recv(count - len(came))
        if not part:
            raise EOFError
        came += part
    return came


@pytest.fixture(params=[False, True], ids=["listens", "closes"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TurnsAway]:
    made = TurnsAway(tmp_path, identity.make_server(tmp_path / "server"), request.param)
    yield made
    made.close()


def test_a_stream_that_was_not_seen_ends_and_is_not_opened_again(server: TurnsAway, tmp_path: Path) -> None:
    """gRPC would open it anew on another connection, and where nobody listens any more its end would be lost at times.

    A site connects again by itself, and says who it is on the new stream.
    """
    link = connect(server.address, identity.make_site(tmp_path / "server", "a"), Limits(seconds=1.0))
    with pytest.raises(ConnectionResetError, match="GOAWAY"):
        link.receive(5.0)
    link.close()
    assert server.streams == 1
