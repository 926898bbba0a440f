from .graphs import secure_graph as secure_graph
from .grid import ExactSums as ExactSums, Grid as Grid
from .simulation import secure_star as secure_star
from .vertical import masked_party as masked_party, masked_server as masked_server, vertical_session as vertical_session
