"""Expected rounds in closed form."""

import math

from fedtorch.networks.bounds import chebyshev_rounds, conjugate_gradient_rounds, gradient_rounds


def test_rounds_in_closed_form():
    assert gradient_rounds(1.0, 1e-8) == chebyshev_rounds(1.0, 1e-8) == conjugate_gradient_rounds(1.0, 1e-8) == 1
    assert gradient_rounds(3.0, 2.0**-20) == 20  # (κ − 1)/(κ + 1) = 1/2
    for condition in (2.0, 100.0, 1e6):
        rounds = chebyshev_rounds(condition, 1e-8)
        shrink = (math.sqrt(condition) - 1) / (math.sqrt(condition) + 1)
        error, before = (2 * shrink**k / (1 + shrink ** (2 * k)) for k in (rounds, rounds - 1))
        assert error <= 1e-8 < before
