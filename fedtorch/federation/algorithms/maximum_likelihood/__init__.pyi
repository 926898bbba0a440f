from .algorithm import maximised as maximised, maximum_likelihood as maximum_likelihood
from .estimates import devices as devices, estimates as estimates
