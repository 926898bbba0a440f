"""Streams over gRPC with TLS on both sides.

There is one method, a stream of bytes in both directions that the site opens. HTTP/2 provides flow control, keepalive
and deadlines for connections; certificates provide the names. A site accepts only a server whose certificate its
authority has made for serving, and the server only a site that the roster lists with the same key.

grpcio is imported when it is first needed (`pip install 'fedtorch[remote]'`).

>>> import tempfile
>>> from fedtorch.sites import Roster, connect, serve
>>> from fedtorch.sites.identity import identity
>>> folder = tempfile.TemporaryDirectory()
>>> authority = f"{folder.name}/authority"
>>> server, site = identity.make_server(authority), identity.make_site(authority, "ward 7")
>>> roster = Roster(f"{folder.name}/roster.json")
>>> roster.add("ward 7", identity.fingerprint(site.certificate))
>>> host = serve("127.0.0.1:0", server, roster)
>>> link = connect(f"127.0.0.1:{host.port}", site)
>>> link.send(b"hello")
>>> host.receive(5.0)
('ward 7', b'hello')
>>> link.close()
>>> host.close()
>>> folder.cleanup()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fedtorch.protocol.rates import Gate
from fedtorch.sites.identity.identity import Identity, check_site_certificate, fingerprint
from fedtorch.sites.identity.roster import Roster
from fedtorch.sites.streams._chunks import join, split
from fedtorch.sites.streams._pipe import Pipe
from fedtorch.sites.streams.grpc_settings import dial, library, listen, listening
from fedtorch.sites.streams.hub import LIMITS, Hub, Limits, Line, Link
from fedtorch.sites.streams.idle import IdleConnections

_SERVICE, _METHOD = "fedtorch.Sites", "Frames"  # frames in chunks; another encoding would get another method
_STOP = 10.0  # most seconds to end all streams
_SPARE = 4  # threads besides one for each peer, to refuse further ones


def serve(address: str, identity: Identity, roster: Roster, limits: Limits = LIMITS) -> Hub:
    """Return a hub that listens at `address`, such as `0.0.0.0:9443`; with port 0, `Hub.port` is the chosen one.

    Args:
        address: host and port.
        identity: the server's identity, see `identity.make_server`.
        roster: the sites that may connect, read again whenever its file has changed.
        limits: limits of every stream.

    Raises:
        OSError: the address cannot be used.
        PermissionError: the identity is not a server's.
        ValueError: the certificate is not valid at the time of this machine's clock.
    """
    grpc = library()
    identity.check_server()
    hub = Hub(limits)
    workers = ThreadPoolExecutor(limits.peers + _SPARE, "fedtorch-site")
    most = limits.peers + _SPARE
    server = grpc.server(workers, options=listening(limits, limits.peers), maximum_concurrent_rpcs=most)
    hub.port = listen(server, address, identity, both=True)
    connections = IdleConnections(hub.port, limits, besides=hub.end_stalled)
    stream = partial(_stream, hub, roster, Gate(limits.each, limits.all), connections, grpc)
    handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    server.start()
    hub.on_close(partial(_stop, server, workers))
    hub.on_close(connections.close)
    return hub


def connect(address: str, identity: Identity, limits: Limits = LIMITS) -> Link:
    """Return a link to the server at `address`, as the site that `identity` names.

    Raises:
        ConnectionError: no server answers in time, or not the one that enrolled the site.
        PermissionError: the identity is not a site's.
        ValueError: the certificate is not valid at the time of this machine's clock.
    """
    grpc = library()
    identity.check_site()
    channel = dial(address, identity.authority, identity, limits)
    limits.check()
    line = Line(Pipe(limits.ahead, limit=limits.member), Pipe(limits.ahead))
    call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(split(line.outward))
    threading.Thread(target=_listen, args=(grpc, call, line, limits), name="fedtorch-link", daemon=True).start()
    return Link(line, limits, partial(_hang_up, line, call, channel))


def _stop(server: Any, workers: ThreadPoolExecutor) -> None:
    server.stop(1.0).wait(_STOP)
    workers.shutdown(wait=False)


def _hang_up(line: Line, call: Any, channel: Any) -> None:
    line.outward.end(ConnectionAbortedError("this side has closed the stream"))
    call.cancel()
    channel.close()


def _stream(
    hub: Hub,
    roster: Roster,
    gate: Gate,
    connections: IdleConnections,
    grpc: Any,
    requests: Iterator[bytes],
    context: Any,
) -> Iterator[bytes]:
    """Serve a site's stream: yield outgoing chunks, while a thread receives incoming ones."""
    try:
        gate.enter(context.peer())
        (certificate,) = context.auth_context()["x509_pem_cert"]
        check_site_certificate(certificate)
        peer = roster.name_of(certificate)
        line = hub.join(peer, partial(roster.check, peer, fingerprint(certificate)))
    except (PermissionError, ConnectionRefusedError) as error:
        code = "PERMISSION_DENIED" if isinstance(error, PermissionError) else "RESOURCE_EXHAUSTED"
        context.abort(getattr(grpc.StatusCode, code), str(error))
    connections.enter(context.peer())
    context.add_callback(partial(connections.leave, context.peer()))
    context.add_callback(partial(hub.leave, peer, line, ConnectionAbortedError(f"{peer!r} has left")))
    take = threading.Thread(target=_take, args=(requests, hub, peer, line), name=f"fedtorch-{peer}", daemon=True)
    take.start()
    yield from split(_until_refused(line, context, grpc))


def _until_refused(line: Line, context: Any, grpc: Any) -> Iterator[bytes]:
    while True:
        try:
            yield line.outward.get()
        except PermissionError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except OSError:
            return


def _take(requests: Iterator[bytes], hub: Hub, peer: str, line: Line) -> None:
    """Receive a site's frames until its stream ends, or it sends a frame that is refused."""
    try:
        join(requests, line.inward, hub.limits.frame)
    except (ValueError, PermissionError) as error:
        hub.leave(peer, line, PermissionError(str(error)))
    except Exception as error:  # a stream ends with many kinds of errors, and its callback ends the line
        error.__traceback__ = None  # gRPC stores the error, whose traceback would keep waiting frames in memory


def _listen(grpc: Any, call: Any, line: Line, limits: Limits) -> None:
    """Receive the server's frames until the stream ends."""
    reason: Exception = ConnectionAbortedError("the server has ended the stream")
    try:
        join(call, line.inward, limits.frame)
    except ValueError as error:
        reason = ConnectionAbortedError(str(error))
    except OSError:
        pass
    except grpc.RpcError as error:
        reason = _reason(grpc, error.code(), error.details())
    line.end(reason)


def _reason(grpc: Any, code: Any, details: str) -> Exception:
    """Return the error for a stream that the server, or the network, has ended."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PermissionError("the server has other streams; install the same version of fedtorch on both sides")
    refused = code is grpc.StatusCode.PERMISSION_DENIED
    kind: Callable[[str], Exception] = PermissionError if refused else ConnectionResetError
    return kind(f"the server has ended the stream: {details}")
