"""fedtorch: federated statistical, probabilistic and deep modelling on PyTorch and Lightning.

A federation is an algorithm (what clients and server compute) on a population (where the clients run):
`ft.Federation(ft.fedavg(local), ft.InProcess(data))` is a LightningModule, so a Lightning `Trainer` runs the rounds.
"""

from fedtorch import data, functional, metrics, networks, plots, random, tree, vfl, wire
from fedtorch.data import BadClients
from fedtorch.federation import recipes
from fedtorch.federation.algorithm import Algorithm, Local, LocalSolver, Quadratic, Reply
from fedtorch.federation.algorithms.consensus import without_server
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
from fedtorch.federation.algorithms.pooled_covariance import pooled_covariance
from fedtorch.federation.algorithms.regressors import gtv_regressors
from fedtorch.federation.algorithms.scaffold import scaffold
from fedtorch.federation.algorithms.separate import separate
from fedtorch.federation.comparison import compare, constant
from fedtorch.federation.distributed import Distributed
from fedtorch.federation.evaluation import Score
from fedtorch.federation.exchange import Exchange, Mean, Sum, graph, private_rows, star
from fedtorch.federation.faults import Faults, dropouts, exponential_noise, lognormal_noise, lost_messages, stragglers
from fedtorch.federation.history import History, Round
from fedtorch.federation.lightning import ClientSharding, Federation
from fedtorch.federation.local_solvers.gradient_descent import gradient_descent
from fedtorch.federation.local_solvers.least_squares import least_squares
from fedtorch.federation.local_solvers.lightning_fit import lightning_fit
from fedtorch.federation.local_solvers.unlabelled import unlabelled
from fedtorch.federation.population import InProcess
from fedtorch.federation.progress import RoundProgressBar
from fedtorch.federation.redelivery import Redelivered
from fedtorch.federation.run import Run, run
from fedtorch.federation.sampler import Sampler
from fedtorch.federation.sampling import fixed_cohort, poisson_cohort, uniform_cohort, weighted_cohort
from fedtorch.federation.tuning import Grid, grid
from fedtorch.federation.unreliable_edges import unreliable_edges
from fedtorch.models.linear import LinearHead
from fedtorch.module_randomness import Drawn
from fedtorch.networks import Network

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
    "Grid",
    "History",
    "InProcess",
    "LinearHead",
    "Local",
    "LocalSolver",
    "Mean",
    "Network",
    "Quadratic",
    "Redelivered",
    "Reply",
    "Round",
    "RoundProgressBar",
    "Run",
    "Sampler",
    "Score",
    "Sum",
    "compare",
    "constant",
    "data",
    "ditto",
    "dropouts",
    "ep",
    "exponential_noise",
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
    "fixed_cohort",
    "functional",
    "gibbs",
    "gradient_descent",
    "graph",
    "grid",
    "gtv",
    "gtv_regressors",
    "least_squares",
    "lightning_fit",
    "lognormal_noise",
    "lost_messages",
    "matrix_normal",
    "metrics",
    "networks",
    "personal_layers",
    "plots",
    "poisson_cohort",
    "pooled",
    "pooled_covariance",
    "private_rows",
    "random",
    "recipes",
    "run",
    "scaffold",
    "separate",
    "star",
    "stragglers",
    "tree",
    "uniform_cohort",
    "unlabelled",
    "unreliable_edges",
    "vfl",
    "weighted_cohort",
    "wire",
    "without_server",
]
