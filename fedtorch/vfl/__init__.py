"""Vertical federation: parties that hold different features of the same rows.

Parties (`Party`) align their rows (`align`), privately.

A model (`augmented`, `power`) is approximated by a guide (`Guide.of(sums())`) and fitted by `sfvi` in one graph, or by
`messages` and `processes` among parties. Split networks (`SplitNetwork`, in `split`) are trained by a Lightning
`Trainer`, or by `split.nodes` and `split.processes` among parties.
"""

from fedtorch.vfl.augmented import attenuation, augmented
from fedtorch.vfl.auxiliary import Auxiliary, amortised, mean_field, noiseless, sums
from fedtorch.vfl.gaussians import GaussianFamily, diagonal, full_covariance, low_rank
from fedtorch.vfl.guide import Guide, Noise, Parameters, count_parameters
from fedtorch.vfl.leakage import LabelLeakageWarning
from fedtorch.vfl.model import VerticalData, VerticalModel
from fedtorch.vfl.parties import Aligned, Party, align, from_table, joined
from fedtorch.vfl.power import power
from fedtorch.vfl.prediction import log_score, lost_score, noise_variance, spread
from fedtorch.vfl.predictors import Predictor, by_level, laplace_prior, linear, multilevel, normal_prior, slopes
from fedtorch.vfl.sfvi import Fit, cosine, sfvi
from fedtorch.vfl.soul import Soul, soul
from fedtorch.vfl.split import (
    HierarchicalBayes,
    SplitNetwork,
    StackedEarlyStopping,
    VerticalLoader,
    concatenated,
    summed,
)

__all__ = [
    "Aligned",
    "Auxiliary",
    "Fit",
    "GaussianFamily",
    "Guide",
    "HierarchicalBayes",
    "LabelLeakageWarning",
    "Noise",
    "Parameters",
    "Party",
    "Predictor",
    "Soul",
    "SplitNetwork",
    "StackedEarlyStopping",
    "VerticalData",
    "VerticalLoader",
    "VerticalModel",
    "align",
    "amortised",
    "attenuation",
    "augmented",
    "by_level",
    "concatenated",
    "cosine",
    "count_parameters",
    "diagonal",
    "from_table",
    "full_covariance",
    "joined",
    "laplace_prior",
    "linear",
    "log_score",
    "lost_score",
    "low_rank",
    "mean_field",
    "multilevel",
    "noise_variance",
    "noiseless",
    "normal_prior",
    "power",
    "sfvi",
    "slopes",
    "soul",
    "spread",
    "summed",
    "sums",
]
