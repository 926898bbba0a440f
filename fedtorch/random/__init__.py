"""Randomness as an argument: every draw is a pure function of a key.

A *key* is an `int64` scalar tensor and stacked keys are `(K,)` or any shape, so that one call draws for all clients.
`draws` makes numbers of keys, `philox` the words that they are made of, `entropy` what nobody may repeat: noise, masks
and secrets of the operating system.

>>> from fedtorch import random
>>> clients = random.split(random.key(0), 3)
>>> random.uniform(clients[0], (2,)).shape
torch.Size([2])
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
