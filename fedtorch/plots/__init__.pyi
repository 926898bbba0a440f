from .checks import calibration as calibration, predictive_check as predictive_check
from .clients import client_distribution as client_distribution
from .grids import heat_map as heat_map
from .matrices import device_correlation as device_correlation, inclusion_map as inclusion_map
from .networks import directed_network as directed_network, network as network
from .runs import curves as curves, groups as groups
from .sites import forest as forest, funnel as funnel, shrinkage as shrinkage
