"""Split networks of arbitrary bottom modules, plain and hierarchical Bayes.

`network` is the model, a LightningModule; `party` and `server` are its parts, which `nodes` trains by messages in one
process and `processes` with one process per party; `training` is what a Lightning `Trainer` needs.
"""

from fedtorch.vfl.split import nodes, processes
from fedtorch.vfl.split.bayes import HierarchicalBayes
from fedtorch.vfl.split.network import SplitNetwork
from fedtorch.vfl.split.party import PartyNetwork
from fedtorch.vfl.split.server import ServerNetwork, concatenated, summed
from fedtorch.vfl.split.training import StackedEarlyStopping, VerticalLoader

__all__ = [
    "HierarchicalBayes",
    "PartyNetwork",
    "ServerNetwork",
    "SplitNetwork",
    "StackedEarlyStopping",
    "VerticalLoader",
    "concatenated",
    "nodes",
    "processes",
    "summed",
]
