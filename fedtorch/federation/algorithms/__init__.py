"""One algorithm, one file; `fedavg.py` is the one to read first."""

from fedtorch.federation.algorithms.ditto import ditto
from fedtorch.federation.algorithms.ep import ep
from fedtorch.federation.algorithms.fedavg import fedavg, fedprox
from fedtorch.federation.algorithms.fedbn import fedbn
from fedtorch.federation.algorithms.feddyn import feddyn
from fedtorch.federation.algorithms.fedopt import fedadagrad, fedadam, fedopt, fedyogi
from fedtorch.federation.algorithms.fedsgd import fedsgd
from fedtorch.federation.algorithms.gibbs import gibbs
from fedtorch.federation.algorithms.gtv import gtv
from fedtorch.federation.algorithms.matrix_normal import matrix_normal
from fedtorch.federation.algorithms.multi_output_gp import fedmgp, fedmgp_average
from fedtorch.federation.algorithms.personal import personal_layers
from fedtorch.federation.algorithms.pooled import pooled
from fedtorch.federation.algorithms.scaffold import scaffold
from fedtorch.federation.algorithms.separate import separate

__all__ = [
    "ditto",
    "ep",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedbn",
    "feddyn",
    "fedmgp",
    "fedmgp_average",
    "fedopt",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "gibbs",
    "gtv",
    "matrix_normal",
    "personal_layers",
    "pooled",
    "scaffold",
    "separate",
]
