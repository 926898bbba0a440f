from . import quiet_gpytorch as quiet_gpytorch
from .deep import DeepGP as DeepGP
from .joining import join as join
from .kernels import ConvolutionProcess as ConvolutionProcess, EmbedCategories as EmbedCategories
from .mixed_likelihood import MixedLikelihood as MixedLikelihood
from .model import ConvolvedGP as ConvolvedGP
from .training import fit as fit, fit_modules as fit_modules
