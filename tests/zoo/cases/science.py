"""Graphs, operators, differential equations, tables and sound: PyTorch Geometric, neuralop, torchdiffeq and others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Case, Project

NODES, EDGES = 6, 14


def graphs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Graphs of six nodes: features, edges both ways, labels of nodes."""
    ends = torch.stack([torch.randperm(NODES * NODES)[: EDGES // 2] for _ in range(n)])
    pairs = torch.stack([ends // NODES, ends % NODES], 1)
    return torch.randn(n, NODES, 4), torch.cat([pairs, pairs.flip(1)], 2), torch.randint(3, (n, NODES))


def joined(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Graphs of a batch as one, as a loader of PyTorch Geometric makes it."""
    x, edges, y = batch
    shift = NODES * torch.arange(len(x), device=x.device)[:, None, None]
    return x.flatten(0, 1), (edges + shift).transpose(0, 1).flatten(1), y.flatten()


def node_loss(net: nn.Module, batch: Any) -> Tensor:
    x, edges, y = joined(batch)
    return F.cross_entropy(net(x, edges), y)


def graph_loss(net: nn.Module, batch: Any) -> Tensor:
    from torch_geometric.nn import global_add_pool

    x, edges, _ = joined(batch)
    which = torch.arange(len(batch[0])).repeat_interleave(NODES)
    return F.cross_entropy(global_add_pool(net(x, edges), which, len(batch[0])), batch[2][:, 0])


def graph_net(name: str, **options: Any) -> Any:
    from torch_geometric.nn import models

    return getattr(models, name)(4, 8, num_layers=2, out_channels=3, **options)


def loader(n: int) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    return DataLoader([Data(x=x, edge_index=edges, y=y) for x, edges, y in zip(*graphs(n))], batch_size=2)


def batch_loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch.x, batch.edge_index), batch.y)


def fourier() -> Any:
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)


def fields(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 8, 8)
    return x, x.cumsum(-1)


class Flow(nn.Module):
    """A neural ODE, as torchdiffeq's README writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.inner(y**3)


def path_loss(net: nn.Module, batch: Any) -> Tensor:
    from torchdiffeq import odeint

    times = torch.linspace(0.0, 1.0, 4, dtype=batch[0].dtype)
    return F.mse_loss(odeint(net, batch[0], times, method="rk4").transpose(0, 1), batch[1])


def paths(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), torch.randn(n, 4, 2)


def table(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(3, (n, 2)), torch.randint(3, (n,))


def ft_transformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 3], d_out=3, n_blocks=2, d_block=16, attention_n_heads=2,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def table_loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0], batch[1]), batch[2])


def separator() -> Any:
    from torchaudio.models import ConvTasNet

    sizes = {"enc_num_feats": 8, "msk_num_feats": 8, "msk_num_hidden_feats": 8, "msk_num_layers": 2}
    return ConvTasNet(num_sources=2, enc_kernel_size=4, msk_num_stacks=1, **sizes)


def voices(n: int) -> tuple[Tensor, Tensor]:
    both = torch.randn(n, 2, 60)
    return both.sum(1, keepdim=True), both


def conformer() -> Any:
    from torchaudio.models import Conformer

    return Conformer(input_dim=8, num_heads=2, ffn_dim=16, num_layers=1, depthwise_conv_kernel_size=3)


def frames_loss(net: nn.Module, batch: Any) -> Tensor:
    x = batch[0].transpose(1, 2)
    outputs, _ = net(x, torch.full((len(x),), x.shape[1]))
    return F.cross_entropy(outputs.mean(1), batch[1])


def sounds(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, 40), torch.randint(5, (n,))


LOOPED = ("client by client", "lightning_fit")

CASES = [
    Case(
        "GCN on graphs",
        "torch_geometric/torch-geometric",
        lambda: Project(graph_net("GCN"), node_loss),
        graphs,
        ways=LOOPED,
        remark="self-loops are found by a boolean mask",
    ),
    Case("GIN on graphs", "torch_geometric/torch-geometric", lambda: Project(graph_net("GIN"), graph_loss), graphs),
    Case(
        "GraphSAGE on graphs",
        "torch_geometric/torch-geometric",
        lambda: Project(graph_net("GraphSAGE"), node_loss),
        graphs,
    ),
    Case(
        "GAT on graphs",
        "torch_geometric/torch-geometric",
        lambda: Project(graph_net("GAT"), node_loss),
        graphs,
        ways=LOOPED,
        remark="self-loops are found by a boolean mask",
    ),
    Case(
        "GCN on batches of its loader",
        "torch_geometric/torch-geometric",
        lambda: Project(graph_net("GCN"), batch_loss),
        loader,
        loader=True,
        dtype=torch.float32,
        ways=LOOPED,
        remark="batches are objects",
    ),
    Case(
        "Fourier neural operator",
        "neuralop/neuraloperator",
        lambda: Project(fourier(), lambda net, b: F.mse_loss(net(b[0]), b[1])),
        fields,
        ways=LOOPED,
        remark="writes in place what is no client's",
    ),
    Case(
        "Neural ODE",
        "torchdiffeq",
        lambda: Project(Flow(), path_loss),
        paths,
        ways=LOOPED,
        remark="writes its path in place",
    ),
    Case("FT-Transformer", "rtdl_revisiting_models", lambda: Project(ft_transformer(), table_loss), table),
    Case(
        "Conv-TasNet",
        "torchaudio",
        lambda: Project(separator(), lambda net, b: F.mse_loss(net(b[0]), b[1])),
        voices,
        ways=LOOPED,
        remark="views memory in another order",
    ),
    Case("Conformer", "torchaudio", lambda: Project(conformer(), frames_loss), sounds, says={"buffers": "local"}),
]
