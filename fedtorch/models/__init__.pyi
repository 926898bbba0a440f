from . import (
    device_posterior as device_posterior,
    encoders as encoders,
    gaussian_process as gaussian_process,
    gibbs as gibbs,
    hierarchical as hierarchical,
    linear as linear,
    low_rank as low_rank,
    matrix_normal as matrix_normal,
)
