"""One algorithm, one file; `fedavg.py` is the one to read first."""

from fedtorch.federation.algorithms.fedavg import fedavg, fedprox
from fedtorch.federation.algorithms.personal import personal_layers
from fedtorch.federation.algorithms.pooled import pooled
from fedtorch.federation.algorithms.separate import separate

__all__ = ["fedavg", "fedprox", "personal_layers", "pooled", "separate"]
