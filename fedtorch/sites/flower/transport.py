"""Streams of frames over Flower's deployment engine, for organisations that run it already.

A SuperLink holds messages, a SuperNode asks for them every few seconds and starts a process for each, so that a round
takes seconds where gRPC takes milliseconds; use it where connections and enrolment are Flower's affair. A node
can neither speak first nor twice: what waits for it travels together in one message, of which there is one at a time,
and its reply brings its own frames. Both hold bytes only, in one `ConfigRecord`.

The server's side is a hub over the grid of a `ServerApp`; `fedtorch.sites.flower.site.app` is a site's
`ClientApp`. Who may connect, and the code of the app, is settled by Flower: let SuperNodes be authenticated, over TLS,
and let them take apps of trusted entities only.

flwr is imported when it is first needed. It wants older packages than others do: `pip install flwr==1.41.0` goes well
in an environment of its own that has no newer `packaging`.

Both ends, of which Flower calls `main`, and `said` for every message:

>>> from fedtorch.sites.flower import transport as flower
>>> def main(grid, context):  # of a `ServerApp`
...     host = flower.serve(grid, {"ward 7": 1234})  # the number of its node
...     host.receive(600.0)
...     host.close()
>>> def said(settings, opens, frames):  # says hello, and sends back what comes
...     return settings["name"], [*[b"hello"] * opens, *frames]
>>> said({"name": "ward 7"}, True, [b"model"])
('ward 7', [b'hello', b'model'])
>>> from importlib.util import find_spec
>>> app = flower.client_app(said) if find_spec("flwr") else None  # a `ClientApp`, where flwr is installed
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from fedtorch.sites.flower._post import Deliver, Post, answer, library
from fedtorch.sites.streams.hub import LIMITS, Hub, Limits

_LOG = logging.getLogger(__name__)


def serve(
    grid: Any,
    nodes: Mapping[str, int] | None = None,
    limits: Limits = LIMITS,
    *,
    timeout: float = 600.0,
    pause: float = 0.1,
) -> Hub:
    """A hub of the nodes that are online, in the main function of a `ServerApp`; `close` waits for the last replies.

    Args:
        grid: of the app; nothing else may use it meanwhile.
        nodes: the number of each site's node, as `flwr supernode list` shows it. A site of another node is refused;
            without, a node goes by the name that it gives itself, and no other may have that name.
        limits: of every stream.
        timeout: seconds after which a node's reply is not waited for any more, also when the hub closes.
        pause: seconds between looks at what has come.
    """
    hub = Hub(limits)
    post = Post(hub, grid, nodes, timeout)
    thread = threading.Thread(target=_carry, args=(post, pause), name="fedtorch-flower", daemon=True)
    hub.on_close(thread.join)
    thread.start()
    return hub


def client_app(deliver: Deliver, limits: Limits = LIMITS) -> Any:
    """Return a `ClientApp` that gives what comes to `deliver(the node's settings, whether a stream begins, frames)`.

    Args:
        deliver: returns the name of the site and the frames that it has to say.
        limits: of what comes.
    """
    library()
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.query()(partial(answer, deliver, limits))
    return app


def _carry(post: Post, pause: float) -> None:
    """Turn until the hub has closed; then until all nodes have what was said to them last, or time is up."""
    while not post.hub.closed:
        _turn(post, pause)
    ends = time.monotonic() + post.timeout
    _turn(post, pause)
    while post.waiting and time.monotonic() < ends:
        _turn(post, pause)


def _turn(post: Post, pause: float) -> None:
    try:
        post.turn()
    except Exception as error:  # the SuperLink may be away for a while: flwr's errors are those of its HTTP library
        _LOG.warning("the SuperLink does not answer: %s: %s", type(error).__name__, error)
        pause += 1.0
    time.sleep(pause)
