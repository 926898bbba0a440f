from . import generalised as generalised, hyperpriors as hyperpriors, pyro_factor as pyro_factor, shrinkage as shrinkage
from .factor import Model as Model, of as of
from .hierarchy import Hierarchy as Hierarchy, normal as normal
from .linear_devices import linear as linear
from .regressions import regression as regression
