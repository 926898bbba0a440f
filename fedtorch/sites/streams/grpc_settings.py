"""gRPC's ports and channels with TLS, for streams and for enrolment; it is imported when it is first needed."""

from __future__ import annotations

import socket
import ssl
import time
from queue import Empty, SimpleQueue
from typing import Any

from fedtorch.sites.identity.identity import SERVER, Identity
from fedtorch.sites.streams._chunks import CHUNK, HEAD
from fedtorch.sites.streams.hub import Limits

_PROBE = 5.0  # seconds in which a server is asked why it cannot be spoken to
_IDLE = 0.25  # seconds after which a channel that is idle is asked again to connect


def library() -> Any:
    """Import grpcio.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import grpc
    except ImportError as error:
        raise ImportError("Expected grpcio for sites on other machines: pip install 'fedtorch[remote]'") from error
    return grpc


def listen(server: Any, address: str, identity: Identity, both: bool) -> int:
    """Open a port of a gRPC server; `both` wants certificates of those who connect. Returns the port."""
    credentials = library().ssl_server_credentials(
        [(identity.key, identity.certificate)], identity.authority if both else None, both
    )
    try:
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"Expected to listen at {address}, but got: {error}; choose another port") from error


def dial(address: str, authority: bytes, identity: Identity | None, limits: Limits) -> Any:
    """Return a channel to a server of this authority, once it is there."""
    grpc = library()
    pair = (None, None) if identity is None else (identity.key, identity.certificate)
    once = ("grpc.enable_retries", 0)  # else a stream that a closing server turns away is opened anew, and may hang
    settings = [*options(limits), once, ("grpc.ssl_target_name_override", SERVER)]
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, *pair), settings)
    if not is_ready(channel, limits.seconds):
        channel.close()
        raise ConnectionError(
            f"Expected the server of this identity at {address} within {limits.seconds:g} s, but got no connection: "
            f"{_why_none(address, authority, identity)}"
        )
    return channel


def is_ready(channel: Any, seconds: float) -> bool:
    """Wait until a channel is ready, and return whether it is in time.

    A connection may be made and closed again, as by a server that has too many without a stream, before anybody sees
    that it was ready. The channel is idle then, for good unless it is asked anew to connect.
    """
    states, state, ends = SimpleQueue[Any](), library().ChannelConnectivity, time.monotonic() + seconds
    seen, last = states.put, None
    channel.subscribe(seen, try_to_connect=True)
    try:
        while last is not state.READY and (left := ends - time.monotonic()) > 0:
            try:
                last = states.get(timeout=min(left, _IDLE))
            except Empty:
                if last is state.IDLE:
                    channel.unsubscribe(seen)
                    channel.subscribe(seen, try_to_connect=True)
    finally:
        channel.unsubscribe(seen)
    return last is state.READY


def _why_none(address: str, authority: bytes, identity: Identity | None) -> str:
    """Return why a server cannot be spoken to: a handshake without a certificate of our own tells whose fault it is."""
    context, (host, _, port) = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), address.rpartition(":")
    context.load_verify_locations(cadata=authority.decode())
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE) as plain:
            context.wrap_socket(plain, server_hostname=SERVER).close()
    except ssl.SSLCertVerificationError as error:
        return (
            "who listens there shows no certificate that the authority of this identity has made for a server and that "
            f"is valid now ({error.verify_message}); see whether it is the one that was enrolled with, whether both "
            "clocks are right, and whether the server's certificate has ended"
        )
    except (OSError, ValueError) as error:
        return f"{error or type(error).__name__}; see whether it is up and whether the address is right"
    whose = "" if identity is None else f", as one does that does not believe the certificate of {identity.name!r}"
    return (
        f"the server is there, but ends every connection{whose}; if it is only starting, wait a little, and otherwise "
        "ask whether its authority made it, and whether the server's clock is right"
    )


def listening(limits: Limits, streams: int) -> list[tuple[str, int]]:
    """Return a server's options for the limits, besides those of both sides, with so many streams at most."""
    milliseconds = int(1000 * limits.idle_seconds)
    return [
        *options(limits),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.max_connection_idle_ms", milliseconds),
        ("grpc.max_allowed_incoming_connections", streams + limits.idle),
    ]


def options(limits: Limits) -> list[tuple[str, int]]:
    """Return the options of a server and of a channel for the limits."""
    milliseconds, longest = int(1000 * limits.keepalive), min(limits.frame, CHUNK) + HEAD.size
    return [
        ("grpc.max_send_message_length", longest),
        ("grpc.max_receive_message_length", longest),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", milliseconds // 2),
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
