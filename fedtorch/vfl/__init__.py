"""Vertical federation: parties that hold different features of the same rows.

Parties (`Party`) align their rows (`align`), privately.

A model (`augmented`, `power`) is approximated by a guide (`Guide(sums())`) and fitted by `sfvi` in one graph. A
split network (`SplitNetwork`) is such a model with networks as predictors, and is trained by a Lightning `Trainer`.
Among parties, both are trained by the same halves of a protocol (`iteration`), in one process or over ranks (`ranks`).
"""

from fedtorch.vfl.augmented import attenuation, augmented
from fedtorch.vfl.auxiliary import Auxiliary, amortised, mean_field, noiseless, sums
from fedtorch.vfl.data import VerticalData
from fedtorch.vfl.gaussians import GaussianFamily, diagonal, full_covariance, low_rank
from fedtorch.vfl.guide import Guide, Parameters, count_parameters
from fedtorch.vfl.leakage import LabelLeakageWarning
from fedtorch.vfl.lightning import StackedEarlyStopping, VerticalLoader
from fedtorch.vfl.model import VerticalModel, concatenated, summed
from fedtorch.vfl.noise import Noise
from fedtorch.vfl.part import Part, parts
from fedtorch.vfl.parties import Aligned, Party, align, from_table, joined
from fedtorch.vfl.power import power
from fedtorch.vfl.prediction import log_score, lost_score, noise_variance, spread
from fedtorch.vfl.predictors import (
    NetworkPredictor,
    Predictor,
    by_level,
    laplace_prior,
    linear,
    multilevel,
    normal_prior,
    slopes,
)
from fedtorch.vfl.sfvi import VariationalFit, cosine, sfvi
from fedtorch.vfl.soul import Soul, soul
from fedtorch.vfl.split import HierarchicalBayes, SplitNetwork

__all__ = [
    "Aligned",
    "Auxiliary",
    "GaussianFamily",
    "Guide",
    "HierarchicalBayes",
    "LabelLeakageWarning",
    "NetworkPredictor",
    "Noise",
    "Parameters",
    "Part",
    "Party",
    "Predictor",
    "Soul",
    "SplitNetwork",
    "StackedEarlyStopping",
    "VariationalFit",
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
    "parts",
    "power",
    "sfvi",
    "slopes",
    "soul",
    "spread",
    "summed",
    "sums",
]
