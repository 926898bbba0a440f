from fedtorch.vfl.model import likelihoods as likelihoods

from .fit.auxiliary import amortised as amortised, mean_field as mean_field, noiseless as noiseless, sums as sums
from .fit.guide import Guide as Guide, Parameters as Parameters, diagonal as diagonal
from .fit.hierarchical_bayes import HierarchicalBayes as HierarchicalBayes
from .fit.prediction import log_score as log_score
from .fit.pyro_guide import pyro_guide as pyro_guide
from .fit.sfvi import VariationalFit as VariationalFit, sfvi as sfvi
from .lightning import StackedEarlyStopping as StackedEarlyStopping, VerticalLoader as VerticalLoader
from .model.augmented import attenuation as attenuation, augmented as augmented
from .model.collapsed import noise_variance as noise_variance
from .model.power import power as power
from .model.predictors import by_level as by_level, linear as linear, multilevel as multilevel
from .model.split_nn import mlp as mlp
from .model.vertical import VerticalModel as VerticalModel, concatenated as concatenated
from .nodes.iteration import party_half as party_half, server_half as server_half
from .nodes.node import (
    Iteration as Iteration,
    PartyNode as PartyNode,
    ServerNode as ServerNode,
)
from .nodes.run import NodesRun as NodesRun
from .rows.alignment import Holder as Holder
from .rows.daily_limit import DailyLimit as DailyLimit
from .rows.data import VerticalData as VerticalData
from .rows.parties import Party as Party, align as align
from .split_network import SplitNetwork as SplitNetwork
