"""Privacy that is accounted for: what a run tells of one client or one example, and how it is bounded."""

from fedtorch.random.entropy import (
    Entropy as Entropy,
    Purpose as Purpose,
    from_seed as from_seed,
    from_system as from_system,
)
from fedtorch.trust.privacy.accounting.accountant import (
    Release as Release,
    epsilon as epsilon,
    noise_for as noise_for,
    rounds_for as rounds_for,
    spent as spent,
)
from fedtorch.trust.privacy.accounting.analytic import (
    gaussian_delta as gaussian_delta,
    gaussian_epsilon as gaussian_epsilon,
    gaussian_noise as gaussian_noise,
)
from fedtorch.trust.privacy.accounting.auditing import (
    Audit as Audit,
    area as area,
    audit as audit,
    audit_outputs as audit_outputs,
    gaussian_detections as gaussian_detections,
    learnt_attack as learnt_attack,
    most_detections as most_detections,
    roc as roc,
)
from fedtorch.trust.privacy.accounting.ledger import Claim as Claim, Ledger as Ledger
from fedtorch.trust.privacy.accounting.renyi import renyi_epsilon as renyi_epsilon
from fedtorch.trust.privacy.clipping import AdaptiveClip as AdaptiveClip
from fedtorch.trust.privacy.examples.examples import Cut as Cut, example_level as example_level
from fedtorch.trust.privacy.features.discriminant import (
    Discriminant as Discriminant,
    private_discriminant as private_discriminant,
)
from fedtorch.trust.privacy.features.features import (
    Funnel as Funnel,
    privacy_funnel as privacy_funnel,
    private_projection as private_projection,
    reconstruction_error as reconstruction_error,
)
from fedtorch.trust.privacy.features.variational_funnel import (
    LearntFunnel as LearntFunnel,
    variational_funnel as variational_funnel,
)
from fedtorch.trust.privacy.mechanisms.clients import client_level as client_level
from fedtorch.trust.privacy.mechanisms.local import local_level as local_level
from fedtorch.trust.privacy.mechanisms.nodes import node_level as node_level
from fedtorch.trust.privacy.mechanisms.preprocessing import (
    RandomisedCrossEntropy as RandomisedCrossEntropy,
    label_frequencies as label_frequencies,
    noised_features as noised_features,
    normal_rows as normal_rows,
    randomised_response as randomised_response,
    replaced_rows as replaced_rows,
    subsampling_delta as subsampling_delta,
)
from fedtorch.trust.privacy.mechanisms.processes import private_process as private_process
from fedtorch.trust.privacy.mechanisms.split_labels import noised_gradients as noised_gradients
from fedtorch.trust.privacy.mechanisms.sums import (
    NoisedSums as NoisedSums,
    sufficient_statistics as sufficient_statistics,
)
from fedtorch.trust.privacy.noise import Mechanism as Mechanism, gaussian as gaussian, laplace as laplace
