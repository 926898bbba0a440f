from . import (
    deviations as deviations,
    directed as directed,
    global_priors as global_priors,
    graphical as graphical,
    imputation as imputation,
    logistic as logistic,
    sparse as sparse,
    splines as splines,
)
from .kernels import LocalKernel as LocalKernel
