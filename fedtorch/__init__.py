"""fedtorch: federated statistical, probabilistic and deep modelling on PyTorch and Lightning.

A federation is an algorithm (what clients and server compute) on a population (where the clients run):
`ft.Federation(ft.fedavg(local), ft.InProcess(data))` is a LightningModule, so a Lightning `Trainer` runs the rounds.
"""

from fedtorch import data, metrics, plots, random, tree, vfl, wire
from fedtorch.federation import graphs
from fedtorch.federation.algorithm import Algorithm, BadClients, Local, LocalSolver, Quadratic, Reply
from fedtorch.federation.algorithms import (
    ditto,
    fedadagrad,
    fedadam,
    fedavg,
    fedbn,
    feddyn,
    fedopt,
    fedprox,
    fedsgd,
    fedyogi,
    personal_layers,
    pooled,
    scaffold,
    separate,
)
from fedtorch.federation.comparison import compare, constant
from fedtorch.federation.coordinator import Round, run
from fedtorch.federation.distributed import Distributed
from fedtorch.federation.evaluation import Score
from fedtorch.federation.exchange import Exchange, Increment, Mean, private_rows, star
from fedtorch.federation.faults import Faults, dropouts, exponential_noise, lognormal_noise, lost_messages, stragglers
from fedtorch.federation.graphs import Network
from fedtorch.federation.history import History
from fedtorch.federation.lightning import ClientSharding, Federation
from fedtorch.federation.local_solvers import gradient_descent, least_squares, lightning_fit
from fedtorch.federation.population import InProcess
from fedtorch.federation.progress import RoundProgressBar
from fedtorch.federation.redelivery import Redelivered
from fedtorch.federation.sampling import fixed_cohort, poisson_cohort, uniform_cohort, weighted_cohort
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
    "History",
    "InProcess",
    "Increment",
    "Local",
    "LocalSolver",
    "Mean",
    "Network",
    "Quadratic",
    "Redelivered",
    "Reply",
    "Round",
    "RoundProgressBar",
    "Score",
    "compare",
    "constant",
    "data",
    "ditto",
    "dropouts",
    "exponential_noise",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedbn",
    "feddyn",
    "fedopt",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "fixed_cohort",
    "functional",
    "gradient_descent",
    "graphs",
    "least_squares",
    "lightning_fit",
    "lognormal_noise",
    "lost_messages",
    "metrics",
    "personal_layers",
    "plots",
    "poisson_cohort",
    "pooled",
    "private_rows",
    "random",
    "run",
    "scaffold",
    "separate",
    "star",
    "stragglers",
    "tree",
    "uniform_cohort",
    "vfl",
    "weighted_cohort",
    "wire",
]
