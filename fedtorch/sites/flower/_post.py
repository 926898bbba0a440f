"""Messages over Flower: their content, a node's reply, and the server's exchange over its grid."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedtorch.sites.streams.hub import Hub, Limits, Line

_LOG = logging.getLogger(__name__)
_RECORD, _KIND = "fedtorch", "query"  # the name of the record, and Flower's type of the messages
_LOOK = 2.0  # seconds between checks of the nodes that are online
_LONGEST_PAUSE = 60.0  # longest pause in seconds before a failed node is asked again

Deliver = Callable[[Mapping[str, Any], bool, Sequence[bytes]], tuple[str, Sequence[bytes]]]


class Frames(NamedTuple):
    """The content of a message or a reply."""

    opens: bool  # whether it begins a stream
    name: str  # the site's name, in replies
    frames: list[bytes]


@dataclass
class Node:
    """The server's state of a SuperNode."""

    name: str = ""  # name of its site, once known
    line: Line | None = None  # line to its site, once the name is known
    envelope: str = ""  # the message that it has not answered yet
    until: float = 0.0  # the time until which the answer is waited for
    came: deque[bytes] = field(default_factory=deque)  # its frames for which there was no room yet
    shut: bool = False  # whether it is not asked any more
    failures: int = 0  # successive failures
    rests: float = 0.0  # time before which it is not asked for its name


class Post:
    """Carries the frames of a hub's lines over a grid.

    Args:
        hub: the hub.
        grid: the grid of a `ServerApp`.
        nodes: node number of each site, if known.
        timeout: longest wait for a reply, in seconds.
    """

    def __init__(self, hub: Hub, grid: Any, nodes: Mapping[str, int] | None, timeout: float) -> None:
        self.hub, self._grid, self.timeout = hub, grid, timeout
        self._known = None if nodes is None else dict(nodes)
        self._nodes: dict[int, Node] = {}
        self._online: frozenset[int] = frozenset()
        self._looked = -_LOOK
        self._app = library()

    @property
    def waiting(self) -> bool:
        """Return whether some node has not answered its message."""
        return any(node.envelope for node in self._nodes.values())

    def turn(self) -> None:
        """Process replies, and send waiting frames to nodes that have answered."""
        envelopes = {node.envelope: number for number, node in self._nodes.items() if node.envelope}
        for reply in self._grid.pull_messages(list(envelopes)) if envelopes else ():
            number = envelopes.get(reply.metadata.reply_to_message_id)
            if number is not None:
                self._take(number, self._nodes[number], reply)
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            self._online, self._looked = frozenset(self._grid.get_node_ids()), now
        for number in self._online - self._nodes.keys():
            self._nodes[number] = Node()
        for number, node in self._nodes.items():
            self._give(node)
            if node.envelope and now > node.until:
                self._fail(node, f"its node did not reply within {self.timeout:g} s")
            elif not node.envelope and number not in self._online:
                self._leave(node, ConnectionResetError("its node is not online"))
            elif not node.envelope and not node.came and not node.shut:
                self._write(number, node)

    def _write(self, number: int, node: Node) -> None:
        """Send a node its waiting frames, or ask for its name."""
        opens, frames = node.line is None, self._waiting(node)
        if not frames and (not opens or self.hub.closed or time.monotonic() < node.rests):
            return
        content = self._app.RecordDict({_RECORD: self._app.ConfigRecord({"opens": opens, "frames": frames})})
        message = self._app.Message(content, number, _KIND, ttl=self.timeout)
        try:
            (envelope,) = self._grid.push_messages([message])
        except Exception as error:  # flwr raises errors of its HTTP library, and returns [] for too long a message
            _LOG.warning("the SuperLink did not accept a message: %s: %s", type(error).__name__, error)
            envelope = None
        if envelope:
            node.envelope, node.until = envelope, time.monotonic() + self.timeout
        else:
            self._fail(node, "the SuperLink did not accept a message for it")

    def _waiting(self, node: Node) -> list[bytes]:
        """Return the waiting frames of a node; of an ended line only if the hub is closed."""
        frames: list[bytes] = []
        try:
            while node.line is not None:
                frames.append(node.line.outward.get(0.0))
        except TimeoutError:
            pass
        except PermissionError as error:
            _LOG.warning("site %r is not asked any more: %s", node.name, error)
            node.shut = True
        except OSError:
            node.line = None  # so that it is asked for its name again
            return frames if self.hub.closed else []
        return frames

    def _take(self, number: int, node: Node, reply: Any) -> None:
        """Process a reply, and open a line to a site that gives its name."""
        node.envelope = ""
        try:
            if reply.has_error():
                raise ValueError(f"its app failed: {reply.error.reason}")
            envelope = read(reply.content, self.hub.limits)
            if node.line is None:
                self._check(number, envelope.name)
                node.name, node.line = envelope.name, self.hub.join(envelope.name)
            elif envelope.name != node.name:
                raise ValueError(f"expected the name {node.name!r}, but got {envelope.name!r}")
        except (ValueError, OSError) as error:
            self._fail(node, str(error))
        else:
            node.failures = 0
            node.came.extend(envelope.frames)

    def _check(self, number: int, name: str) -> None:
        """Refuse a name that belongs to another node."""
        if self._known is not None and self._known.get(name) != number:
            raise PermissionError(f"expected a site of a known node, but node {number} gives the name {name!r}")
        other = next((n for n, node in self._nodes.items() if node.name == name and n != number), None)
        if other is not None and other in self._online:
            raise PermissionError(f"expected different names, but nodes {other} and {number} give {name!r}")

    def _give(self, node: Node) -> None:
        """Put a node's frames on its line, as far as there is room."""
        try:
            while node.came and node.line is not None:
                node.line.inward.put(node.came[0], 0.0)
                node.came.popleft()
        except TimeoutError:
            pass
        except PermissionError as error:
            node.came.clear()
            node.shut = True
            self._fail(node, str(error))
        except OSError:
            node.came.clear()

    def _fail(self, node: Node, why: str) -> None:
        """End a node's stream; after a pause it is asked for its name again."""
        _LOG.warning("site %r: %s", node.name, why)
        node.envelope, node.failures = "", node.failures + 1
        node.rests = time.monotonic() + min(2.0**node.failures, _LONGEST_PAUSE)
        self._leave(node, ConnectionResetError(why))

    def _leave(self, node: Node, reason: Exception) -> None:
        if node.line is not None:
            self.hub.leave(node.name, node.line, reason)
            node.line = None
        node.came.clear()


def answer(deliver: Deliver, limits: Limits, message: Any, context: Any) -> Any:
    """Return the reply to a message; see `client_app`."""
    flwr, envelope = library(), read(message.content, limits)
    name, frames = deliver(context.node_config, envelope.opens, envelope.frames)
    record = flwr.ConfigRecord({"name": name, "frames": list(frames)})
    return flwr.Message(flwr.RecordDict({_RECORD: record}), reply_to=message)


def library() -> Any:
    """Return `flwr.app`.

    Raises:
        ImportError: flwr is not installed.
    """
    try:
        import flwr.app
    except ImportError as error:
        raise ImportError(
            "Expected flwr for sites over Flower's engine: pip install flwr==1.41.0, in an environment of its own"
        ) from error
    return flwr.app


def read(content: Any, limits: Limits) -> Frames:
    """Return the content of a message.

    Raises:
        ValueError: the content is malformed or too large.
    """
    record = content.get(_RECORD)
    fields = dict(record) if record is not None else {}
    frames, name = fields.get("frames"), fields.get("name", "")
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise ValueError("expected frames of bytes, but got something else; is its app fedtorch's?")
    if not isinstance(name, str) or len(frames) > 2 * limits.ahead or any(len(f) > limits.frame for f in frames):
        raise ValueError(f"expected a name, and at most {2 * limits.ahead} frames of at most {limits.frame} bytes")
    if sum(map(len, frames)) > limits.member + limits.unasked:
        raise ValueError(f"expected at most {limits.member + limits.unasked} bytes in a message")
    return Frames(fields.get("opens") is True, name, frames)
