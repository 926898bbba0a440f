"""Randomness as an argument: every draw is a pure function of a key.

A *key* is an `int64` scalar tensor and stacked keys are `(K,)` or any shape, so that one call draws for all clients.
`draws` makes numbers of keys, `philox` the words that they are made of, `entropy` what nobody may repeat: noise, masks
and secrets of the operating system.

>>> from fedtorch import random
>>> clients = random.split(random.key(0), 3)
>>> random.uniform(clients[0], (2,)).shape
torch.Size([2])
"""

from fedtorch.random.draws import (
    bernoulli as bernoulli,
    beta as beta,
    bits as bits,
    choice as choice,
    exponential as exponential,
    fold_in as fold_in,
    gamma as gamma,
    inverse_gamma as inverse_gamma,
    key as key,
    normal as normal,
    permutation as permutation,
    randint as randint,
    split as split,
    uniform as uniform,
)
