from ._problem import maximised as maximised
from .algorithm import maximum_likelihood as maximum_likelihood
from .estimates import devices as devices, estimates as estimates
