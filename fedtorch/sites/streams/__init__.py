"""Streams of frames between a server and its sites: complete, in order, and with the name of their sender.

The content of frames is read elsewhere, by `fedtorch.wire`. A hub has a stream to every connected site; a link is a
site's end. A peer that does not read, or sends more than is received, is slowed down by the stream's flow control, and
does not delay others.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
