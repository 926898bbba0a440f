"""Streams of frames over Flower's deployment engine, for organisations that already run it.

A SuperLink stores messages; a SuperNode polls it every few seconds and starts a process for each message. So a round
takes seconds where gRPC takes milliseconds; use this if Flower manages connections and enrolment. A node can only
reply, once for each message. All frames that wait for it travel in one message, one message at a time, and its reply
contains its own frames. Both contain only bytes, in one `ConfigRecord`.

The server's side is a hub over the grid of a `ServerApp`; `fedtorch.sites.flower.site.app` is a site's `ClientApp`.
Flower decides who may connect, and the code of the app: authenticate SuperNodes, over TLS, and let them accept only
apps of trusted entities.

flwr is imported when it is first needed. It needs older packages than others: install it by `pip install flwr==1.41.0`
in its own environment without a newer `packaging`.

The two ends; Flower calls `main` once, and `reply` for every message:

>>> from fedtorch.sites.flower import transport as flower
>>> def main(grid, context):  # of a `ServerApp`
...     host = flower.serve(grid, {"ward 7": 1234})  # its node's number
...     host.receive(600.0)
...     host.close()
>>> def reply(settings, opens, frames):  # sends hello, and returns the frames
...     return settings["name"], [*[b"hello"] * opens, *frames]
>>> reply({"name": "ward 7"}, True, [b"model"])
('ward 7', [b'hello', b'model'])
>>> from importlib.util import find_spec
>>> app = flower.client_app(reply) if find_spec("flwr") else None  # a `ClientApp`, if flwr is installed
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
    """Return a hub of the online nodes, in the main function of a `ServerApp`; `close` waits for the last replies.

    Args:
        grid: the app's grid; nothing else may use it meanwhile.
        nodes: node number of each site, as shown by `flwr supernode list`. Sites of other nodes are refused. Without
            `nodes` each node chooses its name, and no two may have the same.
        limits: limits of every stream.
        timeout: longest wait for a node's reply, also when the hub closes, in seconds.
        pause: seconds between checks for replies.
    """
    hub = Hub(limits)
    post = Post(hub, grid, nodes, timeout)
    thread = threading.Thread(target=_carry, args=(post, pause), name="fedtorch-flower", daemon=True)
    hub.on_close(thread.join)
    thread.start()
    return hub


def client_app(deliver: Deliver, limits: Limits = LIMITS) -> Any:
    """Return a `ClientApp` that answers each message by `deliver`.

    Args:
        deliver: (the node's settings, whether a stream begins, frames) -> (the site's name, its frames).
        limits: limits of messages.
    """
    library()
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.query()(partial(answer, deliver, limits))
    return app


def _carry(post: Post, pause: float) -> None:
    """Exchange messages until the hub has closed, and then until all nodes have replied or time is up."""
    while not post.hub.closed:
        _turn(post, pause)
    ends = time.monotonic() + post.timeout
    _turn(post, pause)
    while post.waiting and time.monotonic() < ends:
        _turn(post, pause)


def _turn(post: Post, pause: float) -> None:
    try:
        post.turn()
    except Exception as error:  # the SuperLink may be unreachable for a while: flwr raises errors of its HTTP library
        _LOG.warning("the SuperLink does not answer: %s: %s", type(error).__name__, error)
        pause += 1.0
    time.sleep(pause)
