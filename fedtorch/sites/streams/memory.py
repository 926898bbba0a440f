"""Sites in the same process as their server, for tests and experiments.

>>> from fedtorch.sites import Hub
>>> from fedtorch.sites.streams import memory
>>> host = Hub()
>>> site = memory.link(host, "ward-7")
>>> site.send(b"here")
>>> host.receive(1.0)
('ward-7', b'here')
>>> host.send("ward-7", b"welcome")
>>> site.receive(1.0)
b'welcome'
"""

from __future__ import annotations

from collections.abc import Callable

from fedtorch._lazy import only
from fedtorch.sites.streams.hub import Hub, Line, Link

__all__ = ["link"]
__dir__ = only(__all__)


def link(host: Hub, name: str, admitted: Callable[[], None] | None = None) -> Link:
    """Return a link of the site called `name` to a hub in this process; see `Hub.join`."""
    line = host.join(name, admitted)
    gone = ConnectionAbortedError("the site has closed the stream")
    return Link(Line(line.outward, line.inward), host.limits, lambda: host.leave(name, line, gone))
