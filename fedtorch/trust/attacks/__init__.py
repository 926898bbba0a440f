"""What wrong clients do, as values: wrong rows join data with `|`, wrong messages join an algorithm.

`membership` is a yardstick besides: how much somebody finds out who has what a federation gives away.

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
from fedtorch.trust.attacks.lies import (
    claimed_rows as claimed_rows,
    denial_of_service as denial_of_service,
    free_rider as free_rider,
    noise as noise,
    sign_flip as sign_flip,
)
from fedtorch.trust.attacks.membership import Membership as Membership, membership as membership
from fedtorch.trust.attacks.poison import (
    Poison as Poison,
    backdoor as backdoor,
    clean_label as clean_label,
    flipped_labels as flipped_labels,
    shifted_labels as shifted_labels,
    zero_loss as zero_loss,
)
