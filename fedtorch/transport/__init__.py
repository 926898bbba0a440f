"""Frames between a server and its sites: who is there, and bytes that arrive whole, in order and from whom they say.

A site opens one stream to the server, which firewalls let out, and both sides put frames of bytes on it. What is in a
frame is nobody's business here; `fedtorch.wire` says it. A host has a stream to every site that is connected, a link is
a site's end. Waits are bounded, and so are frames and what is held of them (`Limits`): a peer that does not read, or
sends more than is taken, is made to wait by the flow control of the stream, and holds up nobody else; long frames come
only when they were asked for. New streams are counted by address, and so are attempts to enrol (`rates`); connections
without a stream are few and short, see `Limits`. A flood of packets is for a firewall.

`serve` and `connect` go over gRPC with TLS on both sides; `flower.serve` over Flower's deployment engine, where that is
there already; `memory.link` is for sites in the same process.
"""

from fedtorch.transport.grpc_streams import connect as connect, serve as serve
from fedtorch.transport.hub import Hub as Hub, Limits as Limits, Link as Link
from fedtorch.transport.identity import Identity as Identity
from fedtorch.transport.roster import Roster as Roster
