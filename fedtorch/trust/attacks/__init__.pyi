from .attack import Attack as Attack
from .collusion import (
    a_little_is_enough as a_little_is_enough,
    inner_product_manipulation as inner_product_manipulation,
    min_max as min_max,
)
from .inversion import (
    gradient_inversion as gradient_inversion,
    linear_inputs as linear_inputs,
    model_inversion as model_inversion,
)
from .lies import (
    denial_of_service as denial_of_service,
    free_rider as free_rider,
    noise as noise,
    sign_flip as sign_flip,
)
from .membership import membership as membership
from .neighbour import (
    Quadratics as Quadratics,
    learnt_attribute as learnt_attribute,
    local_problem as local_problem,
)
from .poison import (
    Poison as Poison,
    backdoor as backdoor,
    clean_label as clean_label,
    flipped_labels as flipped_labels,
    shifted_labels as shifted_labels,
)
from .split import guessed_labels as guessed_labels, tapped as tapped
