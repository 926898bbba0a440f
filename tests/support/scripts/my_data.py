"""What a site of the tests brings: the file that `fedtorch join --data` reads. `SITE` in the environment says which."""

import os

import fedtorch as ft
from fedtorch.sites import Policy
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import parts

SIZES = [5, 2, 9, 4, 17, 6]
DATA = linear_clients(SIZES)


def scaffold(rate: float) -> ft.Algorithm:
    """An algorithm whose clients have states, and tell something for good."""
    return ft.scaffold(sgd(rate, epochs=1, batch_size=4))


data = parts(DATA, 3)["abc".index(os.environ.get("SITE", "a"))]
algorithms = {"scaffold": scaffold}
policy = Policy(minimum=1)  # its clients have few rows
