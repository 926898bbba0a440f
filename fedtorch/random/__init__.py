"""Randomness as an argument: every draw is a pure function of a key.

A *key* is an `int64` scalar tensor and stacked keys are `(K,)` or any shape, so that one call draws for all clients.
`draws` turns keys into random numbers, `philox` into random words; `entropy` has unpredictable numbers of the operating
system: noise, masks and secrets.

>>> from fedtorch import random
>>> clients = random.split(random.key(0), 3)
>>> random.uniform(clients[0], (2,)).shape
torch.Size([2])
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
