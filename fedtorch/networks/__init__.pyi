from . import clustering as clustering, discrepancy as discrepancy, learning as learning, solvers as solvers
from .diagnostics import diagnose as diagnose
from .network import Network as Network
