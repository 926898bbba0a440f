"""Frames between a server and its sites: who is there, and bytes that arrive whole, in order and from whom they say.

The content of frames is not looked at here; `fedtorch.wire` reads it. A host has a stream to every site that is
connected, a link is a site's end. A peer that does not read, or sends more than is taken, is made to wait by the flow
control of the stream, and holds up nobody else.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
