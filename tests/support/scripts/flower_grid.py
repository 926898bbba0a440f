"""What `sites.flower.transport` uses of flwr, in this process: messages, and a grid whose nodes answer at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from fedtorch.sites.flower import _post
from fedtorch.sites.streams.hub import LIMITS


class Message:
    """Of Flower, with a number that it has once it is pushed."""

    def __init__(
        self, content: Any, node: int = 0, kind: str = "", *, ttl: float | None = None, reply_to: Any = None
    ) -> None:
        self.content, self.node, self.kind, self.ttl = content, node, kind, ttl
        self.number = ""
        self.metadata = SimpleNamespace(reply_to_message_id="" if reply_to is None else reply_to.number)
        self.error: Any = None

    def has_error(self) -> bool:
        """Whether it stands for a failure."""
        return self.error is not None


LIBRARY = SimpleNamespace(Message=Message, RecordDict=dict, ConfigRecord=dict)


class Grid:
    """Nodes by number, each with what its app does with a delivery; a node that raises gives a reply with an error.

    Attributes:
        online: the nodes that are.
        slow: nodes that do not answer for now.
        pushed: all messages, as (node, whether a stream opens, frames).
    """

    def __init__(self, apps: dict[int, _post.Deliver]) -> None:
        self.apps = {number: partial(_post.answer, deliver, LIMITS) for number, deliver in apps.items()}
        self.online, self.slow = set(apps), set[int]()
        self.pushed: list[tuple[int, bool, list[bytes]]] = []
        self._waiting: dict[str, Callable[[], Message]] = {}

    def get_node_ids(self) -> list[int]:
        """Of the nodes that are online."""
        return sorted(self.online)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Takes messages; returns their numbers."""
        numbers = []
        for message in messages:
            message.number = f"message {len(self.pushed)}"
            record = message.content["fedtorch"]
            self.pushed.append((message.node, record["opens"], record["frames"]))
            self._waiting[message.number] = partial(self._reply, message)
            numbers.append(message.number)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        """The replies that are there."""
        ready = [n for n in numbers if n in self._waiting and self._waiting[n].args[0].node not in self.slow]
        return [self._waiting.pop(number)() for number in ready]

    def _reply(self, message: Message) -> Message:
        try:
            return self.apps[message.node](message, SimpleNamespace(node_config={}))
        except Exception as error:
            failed = Message(None, reply_to=message)
            failed.error = SimpleNamespace(reason=str(error))
            return failed
