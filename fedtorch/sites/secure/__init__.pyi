from .graphs import masked_graph as masked_graph
from .grid import ExactSums as ExactSums, Grid as Grid
from .vertical import masked_party as masked_party, masked_server as masked_server
