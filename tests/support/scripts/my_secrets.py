"""What a site brings to masked sums and sealed envelopes: read by `fedtorch join --data`, as `my_data.py` is."""

import fedtorch as ft
from fedtorch.sites import Policy, masked as under_masks, sealed
from fedtorch.trust import secure
from support.oracles.closed_forms import sgd
from support.scripts.my_data import data as data, scaffold

NETWORK = ft.Network.ring(6)


def masked(rate: float) -> ft.Algorithm:
    """Sums that the server sees as a whole only."""
    return scaffold(rate)


def envelopes(alpha: float) -> ft.Algorithm:
    """Models that neighbours only see."""
    return ft.gtv(sgd(0.05, steps=2, batch_size=3), NETWORK, alpha)


algorithms = {"masked": masked, "envelopes": envelopes}
carry = {"masked": under_masks(secure.Grid(30, 2.0**20), dropouts=0), "envelopes": sealed(NETWORK)}
policy = Policy(carry=carry, minimum=1)
