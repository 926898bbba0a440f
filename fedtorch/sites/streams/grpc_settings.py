"""gRPC ports and channels with TLS, for streams and enrolment; grpcio is imported when it is first needed."""

from __future__ import annotations

import socket
import ssl
import time
from queue import Empty, SimpleQueue
from typing import Any

from fedtorch.sites.identity.identity import SERVER, Identity
from fedtorch.sites.streams._chunks import CHUNK, HEAD
from fedtorch.sites.streams.hub import Limits

_PROBE = 5.0  # longest wait for a diagnosis of a failed connection, in seconds
_IDLE = 0.25  # seconds after which an idle channel is asked to connect again


def library() -> Any:
    """Import grpcio.

    Raises:
        ImportError: grpcio is not installed.
    """
    try:
        import grpc
    except ImportError as error:
        raise ImportError("Expected grpcio for sites on other machines: pip install 'fedtorch[remote]'") from error
    return grpc


def listen(server: Any, address: str, identity: Identity, both: bool) -> int:
    """Open a port of a gRPC server and return its number; with `both`, peers must have certificates, too."""
    credentials = library().ssl_server_credentials(
        [(identity.key, identity.certificate)], identity.authority if both else None, both
    )
    try:
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"Expected to listen at {address}, but got: {error}; choose another port") from error


def dial(address: str, authority: bytes, identity: Identity | None, limits: Limits) -> Any:
    """Return a channel to a server of this authority, once it is ready."""
    grpc = library()
    pair = (None, None) if identity is None else (identity.key, identity.certificate)
    once = ("grpc.enable_retries", 0)  # otherwise a stream that a closing server refuses is reopened, and may hang
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
    """Wait until a channel is ready, and return whether this happens in time.

    A connection may be made and closed again before this function sees that it was ready, for example by a server with
    too many connections without a stream. The channel then stays idle unless it is asked to connect again.
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
    """Return the reason for a failed connection, by a handshake without a client certificate."""
    context, (host, _, port) = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), address.rpartition(":")
    context.load_verify_locations(cadata=authority.decode())
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE) as plain:
            context.wrap_socket(plain, server_hostname=SERVER).close()
    except ssl.SSLCertVerificationError as error:
        return (
            "what listens there has no valid certificate of a server by the authority of this identity "
            f"({error.verify_message}); check whether it is the server that enrolled this site, whether both "
            "clocks are right, and whether the server's certificate has expired"
        )
    except (OSError, ValueError) as error:
        return f"{error or type(error).__name__}; check whether the server runs and whether the address is right"
    whose = "" if identity is None else f", as if it did not accept the certificate of {identity.name!r}"
    return (
        f"the server answers, but ends every connection{whose}; if it is only starting, wait a little, and otherwise "
        "ask whether its authority made the certificate, and whether the server's clock is right"
    )


def listening(limits: Limits, streams: int) -> list[tuple[str, int]]:
    """Return a server's gRPC options for the limits and for at most `streams` streams, with those of `options`."""
    milliseconds = int(1000 * limits.idle_seconds)
    return [
        *options(limits),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.max_connection_idle_ms", milliseconds),
        ("grpc.max_allowed_incoming_connections", streams + limits.idle),
    ]


def options(limits: Limits) -> list[tuple[str, int]]:
    """Return the gRPC options for the limits that servers and channels share."""
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
