"""Vertical federation: parties that hold different features of the same rows.

Parties (`Party`) align their rows (`align`), privately.

A model (`augmented`, `power`) is approximated by a guide (`Guide(sums())`) and fitted by `sfvi` in one graph. A
split network (`SplitNetwork`) is such a model with networks as predictors, and is trained by a Lightning `Trainer`.
Among parties, both are trained by the same halves of a protocol (`iteration`), in one process, over ranks
(`ranks`) or between organisations (`remote`; `resuming` where lines break and processes die, `delay=` where lines are
slow). Every fit answers to the verbs of `ft.Run`: `rounds`, `history`, `save`, `load`, `evaluate`, `ft.report.write`.

Features stay where they are, but training shows more than predictions do: gradients of a plain split network give the
parties the labels, and averaging what is sent over steps removes the noise ρ. See `split` and `iteration`.

>>> import torch, fedtorch as ft
>>> clinic = ft.vfl.Party("clinic", ["ann", "bob", "cem"], torch.tensor([[1.0], [2.0], [3.0]]), ["age"])
>>> labels = ft.vfl.Party("registry", ["cem", "ann"], response=torch.tensor([1.0, 0.0]))
>>> ft.vfl.align([clinic, labels]).data.features[0].flatten()  # of the rows that both have
tensor([3., 1.])
"""

from typing import TYPE_CHECKING

import lazy_loader

from fedtorch.vfl.fit.auxiliary import (
    Auxiliary as Auxiliary,
    amortised as amortised,
    mean_field as mean_field,
    noiseless as noiseless,
    sums as sums,
)
from fedtorch.vfl.fit.guide import (
    GaussianFamily as GaussianFamily,
    Guide as Guide,
    Parameters as Parameters,
    count_parameters as count_parameters,
    diagonal as diagonal,
    full_covariance as full_covariance,
    low_rank as low_rank,
)
from fedtorch.vfl.fit.hierarchical_bayes import HierarchicalBayes as HierarchicalBayes
from fedtorch.vfl.fit.noise import Noise as Noise
from fedtorch.vfl.fit.part import Part as Part, parts as parts
from fedtorch.vfl.fit.prediction import log_score as log_score, lost_score as lost_score, spread as spread
from fedtorch.vfl.fit.run import VerticalRun as VerticalRun
from fedtorch.vfl.fit.sfvi import VariationalFit as VariationalFit, cosine as cosine, sfvi as sfvi
from fedtorch.vfl.fit.soul import SoulFit as SoulFit, soul as soul
from fedtorch.vfl.model import likelihoods as likelihoods
from fedtorch.vfl.model.augmented import attenuation as attenuation, augmented as augmented
from fedtorch.vfl.model.collapsed import noise_variance as noise_variance
from fedtorch.vfl.model.power import power as power
from fedtorch.vfl.model.predictors import (
    Predictor as Predictor,
    by_level as by_level,
    laplace_prior as laplace_prior,
    linear as linear,
    multilevel as multilevel,
    normal_prior as normal_prior,
    slopes as slopes,
)
from fedtorch.vfl.model.split_nn import NetworkPredictor as NetworkPredictor
from fedtorch.vfl.model.vertical import VerticalModel as VerticalModel, concatenated as concatenated, summed as summed
from fedtorch.vfl.nodes.run import NodesRun as NodesRun
from fedtorch.vfl.rows.data import VerticalData as VerticalData
from fedtorch.vfl.rows.leakage import LabelLeakageWarning as LabelLeakageWarning
from fedtorch.vfl.rows.parties import (
    Aligned as Aligned,
    Party as Party,
    align as align,
    from_table as from_table,
    joined as joined,
)

if TYPE_CHECKING:
    from fedtorch.vfl.lightning import StackedEarlyStopping as StackedEarlyStopping, VerticalLoader as VerticalLoader
    from fedtorch.vfl.split_network import SplitNetwork as SplitNetwork
else:  # what needs Lightning, which takes seconds to import
    __getattr__, __dir__, _ = lazy_loader.attach(
        __name__,
        submod_attrs={
            "lightning": ["StackedEarlyStopping", "VerticalLoader"],
            "split_network": ["SplitNetwork"],
        },
    )
