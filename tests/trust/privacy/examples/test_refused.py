"""What DP-SGD cannot train is named when a run begins, with an argument that would do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtorch as ft
from fedtorch.trust import privacy

TOKENS = [torch.randint(7, (n, 3), generator=torch.Generator().manual_seed(n)) for n in (6, 11)]


class Looked(nn.Module):
    """A table that is looked up by a function."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.table, self.head, self.settings = nn.Parameter(torch.randn(7, 3)), nn.Linear(9, 1), settings

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.embedding(x, self.table, **self.settings).flatten(1))


class Counting(nn.Module):
    """A buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x.float())


class Growing(nn.Module):
    """A loss that grows with a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * self.layer(x.float())


def embedding(**settings) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3, **settings), nn.Flatten(), nn.Linear(9, 1))


def bag(**settings) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(7, 3, **settings), nn.Linear(3, 1))


def spectral(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), norm(nn.Linear(9, 1)))


def instance() -> nn.Module:
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    return nn.Sequential(nn.Embedding(7, 3), norm, nn.Flatten(), nn.Linear(9, 1))


OLD_SPECTRAL = nn.utils.spectral_norm
REFUSED = {
    "max_norm": (lambda: embedding(max_norm=1.0), r"Embedding .*max_norm=1.0\) \(layer '0'\); leave max_norm out"),
    "sparse": (lambda: embedding(sparse=True), "Embedding .*sparse=True.* set sparse=False"),
    "frequencies": (lambda: embedding(scale_grad_by_freq=True), "Embedding .*set scale_grad_by_freq=False"),
    "a bag's max_norm": (lambda: bag(max_norm=1.0), "EmbeddingBag .*leave max_norm out"),
    "a bag's sparse": (lambda: bag(sparse=True), "EmbeddingBag .*set sparse=False"),
    "a bag's frequencies": (lambda: bag(scale_grad_by_freq=True), "EmbeddingBag .*set scale_grad_by_freq=False"),
    "called with max_norm": (lambda: Looked(max_norm=1.0), "embedding .*leave max_norm out"),
    "called with sparse": (lambda: Looked(sparse=True), "embedding .*set sparse=False"),
    "called with frequencies": (lambda: Looked(scale_grad_by_freq=True), "embedding .*set scale_grad_by_freq=False"),
    "statistics": (instance, r"InstanceNorm1d .*\(layer '1'\); set track_running_stats=False"),
    "spectral norm": (lambda: spectral(nn.utils.parametrizations.spectral_norm), "spectral norm.*weight_norm"),
    "old spectral norm": (lambda: spectral(OLD_SPECTRAL), "spectral norm.*weight_norm"),
    "a buffer": (Counting, "but it changes calls of Counting"),
}


def begin(module: nn.Module, data: ft.data.FederatedData | None = None, loss: Callable = F.mse_loss) -> ft.Run:
    data = ft.data.from_tensors([(x, torch.ones(len(x), 1)) for x in TOKENS]) if data is None else data
    local = privacy.example_level(
        module, clip=1.0, noise=1.0, sampling_rate=0.5, steps=2, delta=1e-3, loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return ft.Run(ft.fedavg(local), ft.InProcess(data))


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_private_are_named(name: str) -> None:
    made, said = REFUSED[name]
    with pytest.raises(ValueError, match=said) as caught:
        begin(made())
    assert all(wrong not in str(caught.value) for wrong in ("LayerNorm", "batched=", "buffers="))


class Recurrent(nn.Module):
    """The last state of a layer over time."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.core, self.head = nn.GRU(1, 4, **settings), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x[..., None].float())[0][:, -1])


def shares(dim: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Softmax(dim), nn.Linear(9, 1))


@pytest.mark.parametrize(
    ("made", "said", "instead"),
    [
        (
            Recurrent,
            r"GRU with batch_first=False \(layer 'core'\): set batch_first=True",
            lambda: Recurrent(batch_first=True),
        ),
        (lambda: shares(0), r"Softmax with dim=0 \(layer '2'\): set dim=-1", lambda: shares(-1)),
    ],
)
def test_layers_that_may_mix_examples_are_named(
    made: Callable[[], nn.Module], said: str, instead: Callable[[], nn.Module]
) -> None:
    with pytest.raises(ValueError, match=f"mixes them, perhaps by {said}"):
        begin(made())
    begin(instead()).step()


def test_what_is_to_be_taken_in_place_of_refused_layers_trains() -> None:
    between = lambda layer: nn.Sequential(nn.Embedding(7, 3), layer, nn.Flatten(), nn.Linear(9, 1))
    with pytest.raises(ValueError, match="use LayerNorm or GroupNorm instead of BatchNorm"):
        begin(between(nn.BatchNorm1d(3)))
    for layer in (nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3, track_running_stats=False)):
        begin(between(layer)).step()
    begin(spectral(nn.utils.parametrizations.weight_norm)).step()


def test_what_a_module_keeps_in_python_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Growing gave .* keeps something from one call to the next"):
        begin(Growing())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # bags, one after another
@pytest.mark.parametrize("made", [embedding, bag, Looked, lambda: embedding(padding_idx=1)])
def test_embeddings_without_such_settings_train(made: Callable[[], nn.Module]) -> None:
    begin(made()).step()


def test_settings_of_frozen_embeddings_that_only_gradients_have_do_not_matter() -> None:
    module = embedding(sparse=True, scale_grad_by_freq=True)
    module[0].weight.requires_grad_(False)
    begin(module).step()


def test_ignored_labels_are_named() -> None:
    """Of three tokens a row, some rows ignore more than others."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for x in TOKENS:
        labels = torch.randint(2, x.shape, generator=generator)
        rows.append((x, torch.where(torch.rand(x.shape, generator=generator) < 0.4, -100, labels)))
    module = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2))
    loss = lambda output, target: F.cross_entropy(output.mT, target)
    with pytest.raises(ValueError, match=r"cross_entropy divides by .*ignore_index=-100.*reduction='none'"):
        begin(module, ft.data.from_tensors(rows), loss)


def test_what_only_several_clients_cannot_do_is_found_when_a_run_begins() -> None:
    """A product whose shapes agree for one client, or for as many as there are rows."""

    class Fragile(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return gradient * w, (gradient * x).sum()

        @staticmethod
        def vmap(info, in_dims, x: Tensor, w: Tensor) -> tuple[Tensor, int | None]:
            if in_dims[1] is not None and info.batch_size > 1:
                raise RuntimeError("weights of several clients")
            return Fragile.apply(x, w), 0

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.slope = nn.Linear(3, 1), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(Fragile.apply(x.float(), self.slope))

    with pytest.raises(ValueError, match="example by example, but it cannot run Layer: weights of several clients"):
        begin(Layer())
