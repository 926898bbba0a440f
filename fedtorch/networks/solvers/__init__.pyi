from .chebyshev import chebyshev as chebyshev
from .conjugate_gradient import conjugate_gradient as conjugate_gradient
from .direct import direct as direct
from .fedgd import fedgd as fedgd
from .fedrelax import fedrelax as fedrelax
from .penalties import norm1 as norm1, norm2 as norm2, squared as squared
from .problem import LinearProblem as LinearProblem, linear_problem as linear_problem
from .robust_loss import robust_loss as robust_loss
from .solution import Solution as Solution
