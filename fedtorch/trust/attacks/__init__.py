"""What wrong clients do, as values: wrong rows join data with `|`, wrong messages join an algorithm.

The others are yardsticks: how much somebody finds out who has what a federation gives away, of who was trained on
(`membership`), of rows (`gradient_inversion`, `model_inversion`, `split_inversion`), of labels (`label_scores`) and of
private attributes (`local_problem`, `learnt_attribute`).

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import attacks
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
>>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
>>> attacked = average | attacks.sign_flip([0, 1], scale=3.0) | attacks.claimed_rows([0, 1], factor=10.0)
>>> ft.run(attacked, ft.InProcess(data | attacks.shifted_labels([2], by=100.0)), rounds=3).number
3
"""

from fedtorch.trust.attacks.attack import Attack as Attack
from fedtorch.trust.attacks.collusion import (
    a_little_is_enough as a_little_is_enough,
    inner_product_manipulation as inner_product_manipulation,
    min_max as min_max,
)
from fedtorch.trust.attacks.inversion import (
    Inversion as Inversion,
    gradient_inversion as gradient_inversion,
    linear_inputs as linear_inputs,
    model_inversion as model_inversion,
    representative as representative,
)
from fedtorch.trust.attacks.lies import (
    claimed_rows as claimed_rows,
    denial_of_service as denial_of_service,
    free_rider as free_rider,
    noise as noise,
    sign_flip as sign_flip,
)
from fedtorch.trust.attacks.membership import Membership as Membership, membership as membership
from fedtorch.trust.attacks.neighbour import (
    Quadratics as Quadratics,
    learnt_attribute as learnt_attribute,
    local_problem as local_problem,
    nearest_problem as nearest_problem,
)
from fedtorch.trust.attacks.poison import (
    Poison as Poison,
    backdoor as backdoor,
    clean_label as clean_label,
    flipped_labels as flipped_labels,
    shifted_labels as shifted_labels,
    zero_loss as zero_loss,
)
from fedtorch.trust.attacks.split import (
    gram_matrix as gram_matrix,
    guessed_labels as guessed_labels,
    label_scores as label_scores,
    split_inversion as split_inversion,
    tapped as tapped,
    values_error as values_error,
)
