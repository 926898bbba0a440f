"""Vertical federation: parties that hold different features of the same rows.

A model (`augmented`, `power`) is approximated by a guide (`Guide.of(sums())`) and fitted by `sfvi` in one graph, or by
`messages` and `processes` among parties.
"""

from fedtorch.vfl.augmented import attenuation, augmented
from fedtorch.vfl.auxiliary import Auxiliary, amortised, mean_field, noiseless, sums
from fedtorch.vfl.gaussians import GaussianFamily, diagonal, full_covariance, low_rank
from fedtorch.vfl.guide import Guide, Noise, Parameters, count_parameters
from fedtorch.vfl.model import VerticalData, VerticalModel
from fedtorch.vfl.power import power
from fedtorch.vfl.prediction import log_score, noise_variance, spread
from fedtorch.vfl.predictors import Predictor, by_level, laplace_prior, linear, multilevel, normal_prior, slopes
from fedtorch.vfl.sfvi import Fit, cosine, sfvi
from fedtorch.vfl.soul import Soul, soul

__all__ = [
    "Auxiliary",
    "Fit",
    "GaussianFamily",
    "Guide",
    "Noise",
    "Parameters",
    "Predictor",
    "Soul",
    "VerticalData",
    "VerticalModel",
    "amortised",
    "attenuation",
    "augmented",
    "by_level",
    "cosine",
    "count_parameters",
    "diagonal",
    "full_covariance",
    "laplace_prior",
    "linear",
    "log_score",
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
    "sums",
]
