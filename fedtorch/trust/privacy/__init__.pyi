from fedtorch.random.entropy import from_seed as from_seed

from .accounting.accountant import epsilon as epsilon, noise_for as noise_for, rounds_for as rounds_for
from .accounting.analytic import gaussian_noise as gaussian_noise
from .accounting.auditing import audit as audit, audit_outputs as audit_outputs
from .accounting.renyi import renyi_divergence as renyi_divergence, renyi_epsilon as renyi_epsilon
from .clipping import AdaptiveClip as AdaptiveClip
from .examples.examples import example_level as example_level
from .features.discriminant import private_discriminant as private_discriminant
from .features.features import privacy_funnel as privacy_funnel, private_projection as private_projection
from .features.variational_funnel import variational_funnel as variational_funnel
from .mechanisms.clients import client_level as client_level
from .mechanisms.local import local_level as local_level
from .mechanisms.nodes import node_level as node_level
from .mechanisms.preprocessing import (
    RandomisedCrossEntropy as RandomisedCrossEntropy,
    noised_features as noised_features,
    randomised_response as randomised_response,
)
from .mechanisms.processes import private_process as private_process
from .mechanisms.split_labels import noised_gradients as noised_gradients
from .mechanisms.sums import NoisedSums as NoisedSums, sufficient_statistics as sufficient_statistics
from .noise import laplace as laplace
