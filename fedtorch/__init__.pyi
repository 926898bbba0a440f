from . import (
    data as data,
    inference as inference,
    metrics as metrics,
    models as models,
    networks as networks,
    plots as plots,
    progress as progress,
    random as random,
    report as report,
    sites as sites,
    tree as tree,
    trust as trust,
    vfl as vfl,
)
from .data import BadClients as BadClients
from .federation.algorithm import (
    Algorithm as Algorithm,
    LocalSolver as LocalSolver,
    Quadratic as Quadratic,
    Reply as Reply,
)
from .federation.algorithms.acyclic import acyclic_graphs as acyclic_graphs
from .federation.algorithms.consensus import without_server as without_server
from .federation.algorithms.ditto import ditto as ditto
from .federation.algorithms.edge_weights import edge_weights as edge_weights
from .federation.algorithms.ep import ep as ep
from .federation.algorithms.ep.fitting import settled as settled
from .federation.algorithms.fedavg import fedavg as fedavg, fedprox as fedprox
from .federation.algorithms.fedbn import fedbn as fedbn
from .federation.algorithms.feddyn import feddyn as feddyn
from .federation.algorithms.fednova import fednova as fednova
from .federation.algorithms.fedopt import (
    fedadagrad as fedadagrad,
    fedadam as fedadam,
    fedopt as fedopt,
    fedyogi as fedyogi,
)
from .federation.algorithms.fedsgd import fedsgd as fedsgd
from .federation.algorithms.gibbs import gibbs as gibbs
from .federation.algorithms.gtv import gtv as gtv
from .federation.algorithms.matrix_normal.algorithm import matrix_normal as matrix_normal
from .federation.algorithms.maximum_likelihood import maximum_likelihood as maximum_likelihood
from .federation.algorithms.multi_output_gp import fedmgp as fedmgp, fedmgp_average as fedmgp_average
from .federation.algorithms.neighbour_search import neighbour_search as neighbour_search
from .federation.algorithms.normal_em import normal_em as normal_em
from .federation.algorithms.personal import personal_layers as personal_layers
from .federation.algorithms.regressors import gtv_regressors as gtv_regressors
from .federation.algorithms.regressors.algorithm import fitted as fitted
from .federation.algorithms.scaffold import scaffold as scaffold
from .federation.algorithms.separate import pooled as pooled, separate as separate
from .federation.algorithms.shared_body import shared_body as shared_body
from .federation.exchanges.exchange import Exchange as Exchange, Mean as Mean, Sum as Sum
from .federation.exchanges.graph import graph as graph
from .federation.exchanges.rows import private_rows as private_rows
from .federation.exchanges.star import star as star
from .federation.exchanges.unreliable_edges import unreliable_edges as unreliable_edges
from .federation.lightning.client_sharding import ClientSharding as ClientSharding
from .federation.lightning.federation import Federation as Federation
from .federation.lightning.round_progress_bar import RoundProgressBar as RoundProgressBar
from .federation.populations.distributed import Distributed as Distributed
from .federation.populations.growing import Growing as Growing
from .federation.populations.in_process import InProcess as InProcess
from .federation.runs import recipes as recipes
from .federation.runs.cohorts import (
    poisson_cohort as poisson_cohort,
    weighted_cohort as weighted_cohort,
)
from .federation.runs.faults import (
    Faults as Faults,
    dropouts as dropouts,
    duplicated as duplicated,
    lost_messages as lost_messages,
    partial_work as partial_work,
    stragglers as stragglers,
)
from .federation.runs.load_module import load_module as load_module
from .federation.runs.run import Run as Run, run as run
from .federation.runs.sampler import Sampler as Sampler
from .federation.runs.search.benchmark import benchmark as benchmark
from .federation.runs.search.studies import tune as tune
from .federation.runs.search.tuning import grid as grid
from .federation.solvers.gradient_descent import gradient_descent as gradient_descent
from .federation.solvers.lazy_loading import lazy_loading as lazy_loading
from .federation.solvers.least_squares import least_squares as least_squares
from .federation.solvers.lightning_fit import lightning_fit as lightning_fit
from .federation.told import Averages as Averages, Told as Told
from .federation.turn import Turn as Turn
from .federation.wrapper import Stage as Stage, Wrapper as Wrapper
from .history import Round as Round
from .metrics.scores import Score as Score
from .models.device_posterior import interval as interval
from .models.linear import LinearHead as LinearHead
from .networks import Network as Network
from .report.callback import Report as Report
from .sites import Remote as Remote

__version__: str
