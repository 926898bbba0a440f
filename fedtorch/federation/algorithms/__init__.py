"""One algorithm, one file; `fedavg.py` is the one to read first."""

from fedtorch.federation.algorithms.ditto import ditto
from fedtorch.federation.algorithms.fedavg import fedavg, fedprox
from fedtorch.federation.algorithms.fedbn import fedbn
from fedtorch.federation.algorithms.feddyn import feddyn
from fedtorch.federation.algorithms.fedopt import fedadagrad, fedadam, fedopt, fedyogi
from fedtorch.federation.algorithms.fedsgd import fedsgd
from fedtorch.federation.algorithms.gtv import gtv
from fedtorch.federation.algorithms.personal import personal_layers
from fedtorch.federation.algorithms.pooled import pooled
from fedtorch.federation.algorithms.scaffold import scaffold
from fedtorch.federation.algorithms.separate import separate

__all__ = [
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedbn",
    "feddyn",
    "fedopt",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "gtv",
    "personal_layers",
    "pooled",
    "scaffold",
    "separate",
]
