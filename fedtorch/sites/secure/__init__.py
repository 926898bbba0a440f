"""Sums under masks: whoever adds them up learns the sum and nothing of its parts."""

from fedtorch.sites.secure.graphs import masked_graph as masked_graph
from fedtorch.sites.secure.grid import ExactSums as ExactSums, Grid as Grid
from fedtorch.sites.secure.masked import Masked as Masked, masked as masked
from fedtorch.sites.secure.messages import (
    Aborted as Aborted,
    Session as Session,
    most_down as most_down,
    most_up as most_up,
    session_of as session_of,
)
from fedtorch.sites.secure.neighbours import Neighbourhoods as Neighbourhoods, neighbourhoods as neighbourhoods
from fedtorch.sites.secure.parties import Client as Client
from fedtorch.sites.secure.server import Server as Server
from fedtorch.sites.secure.simulation import (
    SecureSum as SecureSum,
    secure_sum as secure_sum,
)
from fedtorch.sites.secure.vertical import (
    masked_party as masked_party,
    masked_server as masked_server,
    vertical_session as vertical_session,
)
