"""fedtorch: federated statistical, probabilistic and deep modelling on PyTorch and Lightning.

A federation is an algorithm (what clients and server compute) on a population (where the clients run):
`ft.Federation(ft.fedavg(local), ft.InProcess(data))` is a LightningModule, so a Lightning `Trainer` runs the rounds.
"""

from typing import TYPE_CHECKING

from fedtorch import (
    data as data,
    functional as functional,
    metrics as metrics,
    networks as networks,
    plots as plots,
    random as random,
    tree as tree,
    vfl as vfl,
    wire as wire,
)
from fedtorch.data import BadClients as BadClients
from fedtorch.federation import recipes as recipes
from fedtorch.federation.algorithm import (
    Algorithm as Algorithm,
    Local as Local,
    LocalSolver as LocalSolver,
    Quadratic as Quadratic,
    Reply as Reply,
    Turn as Turn,
)
from fedtorch.federation.algorithms.consensus import without_server as without_server
from fedtorch.federation.algorithms.ditto import ditto as ditto
from fedtorch.federation.algorithms.ep import ep as ep
from fedtorch.federation.algorithms.fedavg import fedavg as fedavg, fedprox as fedprox
from fedtorch.federation.algorithms.fedbn import fedbn as fedbn
from fedtorch.federation.algorithms.feddyn import feddyn as feddyn
from fedtorch.federation.algorithms.fedopt import (
    fedadagrad as fedadagrad,
    fedadam as fedadam,
    fedopt as fedopt,
    fedyogi as fedyogi,
)
from fedtorch.federation.algorithms.fedsgd import fedsgd as fedsgd
from fedtorch.federation.algorithms.gibbs import gibbs as gibbs
from fedtorch.federation.algorithms.gtv import gtv as gtv
from fedtorch.federation.algorithms.matrix_normal import matrix_normal as matrix_normal
from fedtorch.federation.algorithms.multi_output_gp import fedmgp as fedmgp, fedmgp_average as fedmgp_average
from fedtorch.federation.algorithms.personal import personal_layers as personal_layers
from fedtorch.federation.algorithms.pooled import pooled as pooled
from fedtorch.federation.algorithms.pooled_covariance import pooled_covariance as pooled_covariance
from fedtorch.federation.algorithms.regressors import gtv_regressors as gtv_regressors
from fedtorch.federation.algorithms.scaffold import scaffold as scaffold
from fedtorch.federation.algorithms.separate import separate as separate
from fedtorch.federation.comparison import compare as compare, constant as constant
from fedtorch.federation.distributed import Distributed as Distributed
from fedtorch.federation.evaluation import Score as Score
from fedtorch.federation.exchange import (
    Exchange as Exchange,
    Mean as Mean,
    Sum as Sum,
    graph as graph,
    private_rows as private_rows,
    star as star,
)
from fedtorch.federation.faults import (
    Faults as Faults,
    dropouts as dropouts,
    exponential_noise as exponential_noise,
    lognormal_noise as lognormal_noise,
    lost_messages as lost_messages,
    stragglers as stragglers,
)
from fedtorch.federation.growing import Growing as Growing
from fedtorch.federation.history import History as History, Round as Round
from fedtorch.federation.local_solvers.gradient_descent import gradient_descent as gradient_descent
from fedtorch.federation.local_solvers.least_squares import least_squares as least_squares
from fedtorch.federation.local_solvers.reading import reading as reading
from fedtorch.federation.local_solvers.unlabelled import unlabelled as unlabelled
from fedtorch.federation.population import InProcess as InProcess
from fedtorch.federation.redelivery import Redelivered as Redelivered
from fedtorch.federation.run import Run as Run, run as run
from fedtorch.federation.sampler import Sampler as Sampler
from fedtorch.federation.sampling import (
    fixed_cohort as fixed_cohort,
    poisson_cohort as poisson_cohort,
    uniform_cohort as uniform_cohort,
    weighted_cohort as weighted_cohort,
)
from fedtorch.federation.tuning import Grid as Grid, grid as grid
from fedtorch.federation.unreliable_edges import unreliable_edges as unreliable_edges
from fedtorch.lazy import attributes as _attributes
from fedtorch.models.linear import LinearHead as LinearHead
from fedtorch.module_randomness import Drawn as Drawn
from fedtorch.networks import Network as Network

if TYPE_CHECKING:
    from fedtorch.federation.client_sharding import ClientSharding as ClientSharding
    from fedtorch.federation.lightning import Federation as Federation
    from fedtorch.federation.local_solvers.lightning_fit import lightning_fit as lightning_fit
    from fedtorch.federation.remote import Remote as Remote
    from fedtorch.federation.round_progress_bar import RoundProgressBar as RoundProgressBar
else:  # what needs Lightning, which takes seconds to import, or cryptography
    __getattr__, __dir__ = _attributes(
        __name__,
        {
            "ClientSharding": "fedtorch.federation.client_sharding",
            "Federation": "fedtorch.federation.lightning",
            "Remote": "fedtorch.federation.remote.population",
            "RoundProgressBar": "fedtorch.federation.round_progress_bar",
            "lightning_fit": "fedtorch.federation.local_solvers.lightning_fit",
        },
    )

__version__ = "0.1.0"
