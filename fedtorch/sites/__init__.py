"""Federations between organisations: the server's population `Remote`, and what a site runs to take part, `join`.

A site is like a rank of `Distributed`: it holds clients and their states, runs them stacked, and answers with a partial
aggregate. Unlike a rank it decides for itself: it runs the algorithms that its configuration names, within its own
policy, and may come late, fail, or leave, and the run goes on.

`streams` carries frames of bytes between a server and its sites, `identity` says who is who, `rounds` is a federation's
round at both ends, `vertical` drives vertical protocols over the same streams, and `secure` adds up what nobody may
read. A site opens one stream to the server, which firewalls let out. Waits are bounded, and so are frames and what is
held of them. `serve` and `connect` go over gRPC with TLS on both sides; `flower` over Flower's deployment engine, where
that is there already; `streams.memory.link` is for sites in the same process.

>>> import fedtorch as ft
>>> hub = ft.sites.Hub()  # of a server; `ft.sites.serve` connects it to a port
>>> sorted(hub.connected)
[]
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
