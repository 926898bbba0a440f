from . import (
    directed as directed,
    graphical as graphical,
    imputation as imputation,
    logistic as logistic,
    sparse as sparse,
)
from .kernels import LocalKernel as LocalKernel
