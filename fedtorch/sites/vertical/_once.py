"""Drivers of halves over streams without resuming: a lost node ends the protocol at all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedtorch.protocol.halves import Half, Traffic, drive
from fedtorch.sites.streams.hub import Hub, Link
from fedtorch.sites.vertical._peers import Peer, drive_with, give_up, meet


def serve(half: Half, hub: Hub, parties: Sequence[str], seconds: float, timeout: float) -> tuple[Any, Traffic]:
    """Run the server's half; return (its result, the traffic)."""
    try:
        peers = meet(hub, parties, seconds, timeout)
        result = drive_with(half, peers)
        for peer in peers.values():
            peer.receive_end()
        for peer in peers.values():
            peer.send_end()
    except BaseException as error:
        give_up(hub, parties, error)
        raise
    return result, Traffic(sum(peer.received for peer in peers.values()), sum(peer.sent for peer in peers.values()))


def take_part(half: Half, link: Link, seconds: float) -> tuple[Any, Traffic]:
    """Run a party's half; return (its result, the traffic)."""
    server = Peer("the server", link, seconds)
    try:
        result = drive(half, server.send, server.receive)
        server.send_end()
        server.receive_end()
    except BaseException:
        link.close()
        raise
    return result, Traffic(server.sent, server.received)
