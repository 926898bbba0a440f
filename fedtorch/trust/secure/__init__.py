"""Sums under masks: whoever adds them up learns the sum and nothing of its parts."""

from fedtorch.trust.secure.grid import Grid as Grid
from fedtorch.trust.secure.neighbours import (
    Neighbourhoods as Neighbourhoods,
    neighbourhoods as neighbourhoods,
)
from fedtorch.trust.secure.parties import Aborted as Aborted, Client as Client, Server as Server, Session as Session
from fedtorch.trust.secure.simulation import (
    SecureSum as SecureSum,
    secure_star as secure_star,
    secure_sum as secure_sum,
)
