from . import quiet_gpytorch as quiet_gpytorch
from .kernels import ConvolutionProcess as ConvolutionProcess
from .model import ConvolvedGP as ConvolvedGP
from .training import fit as fit
