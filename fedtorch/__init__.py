"""fedtorch: federated statistical, probabilistic and deep modelling on PyTorch and Lightning.

A federation is an algorithm (what clients and server compute) on a population (where the clients run):
`ft.Federation(ft.fedavg(local), ft.InProcess(data))` is a LightningModule, so a Lightning `Trainer` runs the rounds.
"""

from fedtorch import data, metrics, random, tree, wire
from fedtorch.federation.algorithm import Algorithm, BadClients, Local, LocalSolver, Quadratic, Reply
from fedtorch.federation.algorithms import fedavg, fedprox, personal_layers, pooled, separate
from fedtorch.federation.comparison import compare, constant
from fedtorch.federation.coordinator import Faults, Round, run, uniform_cohort
from fedtorch.federation.distributed import Distributed
from fedtorch.federation.evaluation import Score
from fedtorch.federation.exchange import Exchange, Increment, Mean, private_rows, star
from fedtorch.federation.lightning import ClientSharding, Federation
from fedtorch.federation.local_solvers import gradient_descent, least_squares, lightning_fit
from fedtorch.federation.population import InProcess
from fedtorch.federation.progress import RoundProgressBar
from fedtorch.models import functional
from fedtorch.module_randomness import Drawn

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "BadClients",
    "ClientSharding",
    "Distributed",
    "Drawn",
    "Exchange",
    "Faults",
    "Federation",
    "InProcess",
    "Increment",
    "Local",
    "LocalSolver",
    "Mean",
    "Quadratic",
    "Reply",
    "Round",
    "RoundProgressBar",
    "Score",
    "compare",
    "constant",
    "data",
    "fedavg",
    "fedprox",
    "functional",
    "gradient_descent",
    "least_squares",
    "lightning_fit",
    "metrics",
    "personal_layers",
    "pooled",
    "private_rows",
    "random",
    "run",
    "separate",
    "star",
    "tree",
    "uniform_cohort",
    "wire",
]
