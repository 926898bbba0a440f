"""Operations of torch inside a network: indexing, sorting, spectra, linear algebra, shapes, branches on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, images, net, series, step


class Through(nn.Module):
    """A perceptron with a function of its hidden units (n, 4) and inputs (n, 4)."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], features: int = 4) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(features, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x), x))


class Weighted(nn.Module):
    """A function of inputs and one weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape) * 0.5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def through(name: str, function: Callable[[Tensor, Tensor], Tensor], features: int = 4, **options: Any) -> Case:
    options = {"rowwise": True, **options}
    return net(f"operation: {name}", lambda: Through(function, features), **options)


def weighted(name: str, function: Callable[[Tensor, Tensor], Tensor], *shape: int, **options: Any) -> Case:
    options = {"rowwise": True, **options}
    return net(f"operation: {name}", lambda: Weighted(function, *shape), **options)


def index_put(h: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(h).index_put((torch.arange(len(h)), x.argmax(1)), h[:, 0], accumulate=True) + h


def index_written(h: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:3] = h[:, :2]
    out[:, 0] += h[:, 3]
    return out


def masked_write(h: Tensor, x: Tensor) -> Tensor:
    out = h.clone()
    out[x > 0] = 0.5
    return out


def buffer_made_inside(h: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(h.shape, dtype=h.dtype)
    out.copy_(h)
    return out * 2


def selected_rows(h: Tensor, x: Tensor) -> Tensor:
    keep = x[:, 0] > 0
    out = h.new_zeros(len(h), 4)
    out[keep] = h[keep]
    return out


def scattered_mean(h: Tensor, x: Tensor) -> Tensor:
    """Means of three groups of columns, as of a graph's nodes."""
    group = torch.tensor([0, 1, 1, 2]).expand(len(h), 4)
    total = h.new_zeros(len(h), 4).scatter_add(1, group, h)
    count = h.new_zeros(len(h), 4).scatter_add(1, group, torch.ones_like(h))
    return total / count.clamp(min=1)


def branch(h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if x.sum() > 0 else h - 1


def unless_all(h: Tensor, x: Tensor) -> Tensor:
    mask = x[:, 0] > -10
    if mask.all():
        return h
    return h * mask[:, None]


def until_small(h: Tensor, x: Tensor) -> Tensor:
    """Halved until it is small: steps that depend on the data."""
    out, steps = h, 0
    while out.detach().abs().max() > 0.5 and steps < 20:
        out, steps = out / 2, steps + 1
    return out


def fixed_point(h: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(h)
    for _ in range(3):
        z = torch.tanh(0.5 * z + h)
    return z


def by_row(h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([row.sort().values if row.sum() > 0 else row for row in h])


def symmetric(h: Tensor) -> Tensor:
    return torch.eye(2, dtype=h.dtype) * 3 + h.view(-1, 2, 2) @ h.view(-1, 2, 2).mT


def spectral(h: Tensor, x: Tensor) -> Tensor:
    f = torch.fft.rfft(h, dim=1)
    return torch.fft.irfft(f * torch.tensor([1.0, 0.5, 0.1], dtype=h.dtype), n=4, dim=1)


def rotary(h: Tensor, x: Tensor) -> Tensor:
    z = torch.view_as_complex(h.reshape(-1, 2, 2).contiguous())
    turn = torch.polar(torch.ones(2, dtype=h.dtype), torch.tensor([0.3, 1.1], dtype=h.dtype))
    return torch.view_as_real(z * turn).flatten(1)


def sinusoids(h: Tensor, x: Tensor) -> Tensor:
    scale = torch.logspace(0, 1, 4, base=2.0, dtype=h.dtype)
    return torch.cat([(h * scale).sin(), (h * scale).cos()], 1)


def bucketed(h: Tensor, x: Tensor) -> Tensor:
    return h * (1 + (x[..., None] > torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)).sum(-1))


def quantile_of_columns(h: Tensor, x: Tensor) -> Tensor:
    return h - torch.quantile(h, 0.5, dim=1, keepdim=True)


def cummax_of_columns(h: Tensor, x: Tensor) -> Tensor:
    return h.cummax(1).values + h.cumprod(1) + h.logcumsumexp(1)


def grid(x: Tensor, w: Tensor) -> Tensor:
    """A learned affine view of images (n, 2, 4, 4)."""
    theta = (torch.eye(2, 3, dtype=x.dtype) + 0.1 * w).expand(len(x), 2, 3)
    seen = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
    return seen.mean((1, 2, 3), keepdim=False)[:, None]


def interpolated(x: Tensor, w: Tensor) -> Tensor:
    return (F.interpolate(x, size=(3, 3), mode="bilinear", align_corners=False) * w).mean((1, 2, 3))[:, None]


def own_convolution(x: Tensor, w: Tensor) -> Tensor:
    """Convolution by unfolding."""
    patches = F.unfold(x, 3)
    return torch.einsum("npl,p->nl", patches, w).tanh().mean(1, keepdim=True)


def dynamic_filters(x: Tensor, w: Tensor) -> Tensor:
    """Filters of each row's own, by a convolution in groups."""
    kernels = (x.mean((2, 3)) @ w).view(len(x), 1, 3, 3)
    out = F.conv2d(x[:, :1].reshape(1, len(x), 4, 4), kernels, groups=len(x))
    return out.reshape(len(x), -1).mean(1, keepdim=True)


def tucker(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ni,ijk,nj->nk", x, w, x)


def tensordot(x: Tensor, w: Tensor) -> Tensor:
    return torch.tensordot(x, w, dims=([1], [0]))


def exponential(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.linalg.matrix_exp(w - w.T)[:, :1]


def solved(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.solve(3 * torch.eye(4, dtype=x.dtype) + w @ w.T, x.T).T[:, :1]


def factored(x: Tensor, w: Tensor) -> Tensor:
    factor = torch.linalg.cholesky(torch.eye(4, dtype=x.dtype) + w @ w.T)
    return torch.linalg.solve_triangular(factor, x.T, upper=False).T[:, :1]


def singular(x: Tensor, w: Tensor) -> Tensor:
    return x[:, :1] * torch.linalg.svdvals(w).sum() + torch.linalg.matrix_norm(w, "nuc")


def orthonormal(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.linalg.qr(w).Q[:, :1]


def eigen(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.linalg.eigh(w + w.T).eigenvalues[:, None]


def determinant(x: Tensor, w: Tensor) -> Tensor:
    return x[:, :1] * torch.linalg.slogdet(torch.eye(4, dtype=x.dtype) + w @ w.T).logabsdet


def toeplitz(x: Tensor, w: Tensor) -> Tensor:
    index = (torch.arange(4)[:, None] - torch.arange(4)) % 4
    return (x @ w[index])[:, :1]


def triangular(x: Tensor, w: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(4, 4)
    matrix = torch.zeros(4, 4, dtype=x.dtype).index_put((rows, columns), w)
    return (x @ matrix).sum(1, keepdim=True)


def convolved_by_spectra(x: Tensor, w: Tensor) -> Tensor:
    f = torch.fft.fft2(x) * torch.fft.fft2(w, s=(4, 4))
    return torch.fft.ifft2(f).real.square().mean((1, 2, 3))[:, None]


def short_time(x: Tensor, w: Tensor) -> Tensor:
    window = torch.hann_window(4, dtype=x.dtype)
    return (torch.stft(x[..., 0], 4, 2, window=window, return_complex=True).abs() * w).mean((1, 2))[:, None]


def long_series(n: int) -> tuple[Tensor, Tensor]:
    return series(12, 1)(n)


def checkpointed(h: Tensor, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(torch.tanh, h, use_reentrant=False)


def vmapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row @ w).tanh())(x)


def in_place(h: Tensor, x: Tensor) -> Tensor:
    return h.mul_(2).add_(x).clamp_(-1, 1)


def changed_inputs(s: Any, batch: Any) -> Tensor:
    batch[0].mul_(0.5)
    return F.mse_loss(s(batch[0]), batch[1])


def same_dtype(h: Tensor, x: Tensor) -> Tensor:
    return (h.float().double() * 2).to(x.dtype)


def sparse(x: Tensor, w: Tensor) -> Tensor:
    """A fixed sparse matrix, as of a graph, times the features."""
    places, values = [[0, 1, 2, 3, 0], [1, 0, 3, 2, 0]], torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5], dtype=x.dtype)
    matrix = torch.sparse_coo_tensor(places, values, (4, 4), check_invariants=True)
    return (torch.sparse.mm(matrix, x.T).T * w).sum(1, keepdim=True)


def nested(h: Tensor, x: Tensor) -> Tensor:
    parts = {"a": (h[:, :2], [h[:, 2:]]), "b": x}
    return torch.cat([parts["a"][0], *parts["a"][1]], 1) + parts["b"]


WAYS = ("default", "batched=False", "batched=True", "chunk=1", "compile=True", "rowwise=True")

CASES: list[Case] = [
    through("index_put with accumulation", index_put),
    through("written by slices functorch#105", index_written),
    through("written by a mask", masked_write),
    through("copied into a new tensor", buffer_made_inside),
    through("x[mask] of rows", selected_rows),
    through("scatter_add of columns", scattered_mean),
    through("gather of sorted columns", lambda h, x: h.gather(1, x.argsort(1))),
    through("sort of columns", lambda h, x: h.sort(1, descending=True).values),
    through("top-k of columns", lambda h, x: h.topk(2, 1).values, 2),
    through("kth value of columns", lambda h, x: h - h.kthvalue(2, 1, keepdim=True).values),
    through("median of columns", lambda h, x: h - h.median(1, keepdim=True).values),
    through("quantile of columns", quantile_of_columns),
    through("cumulative maxima and products", cummax_of_columns),
    through("where", lambda h, x: torch.where(x > 0, h, -0.3 * h)),
    through("masked_fill", lambda h, x: h.masked_fill(x > 0.5, -2.0).softmax(1)),
    through("roll and flip of columns", lambda h, x: h.roll(1, 1) + h.flip(1)),
    through("one-hot", lambda h, x: h * F.one_hot(x.argmax(1), 4)),
    through("buckets", bucketed),
    through("take_along_dim", lambda h, x: torch.take_along_dim(h, x.argmax(1, keepdim=True), 1), 1),
    through("index_select of columns", lambda h, x: h.index_select(1, torch.tensor([3, 0]))[:, :2], 2),
    through("repeat_interleave of columns", lambda h, x: h.repeat_interleave(torch.tensor([1, 0, 2, 1]), 1)),
    through("outer products", lambda h, x: torch.einsum("ni,nj->nij", h, x).flatten(1), 16),
    through("batched products", lambda h, x: torch.bmm(h[:, :, None], x[:, None]).flatten(1), 16),
    through("cosines of pairs of columns", lambda h, x: F.normalize(h.view(-1, 2, 2), dim=2).flatten(1)),
    through("distances to points", lambda h, x: torch.cdist(h, torch.eye(4, dtype=h.dtype))),
    through("inverse of each row's matrix", lambda h, x: torch.linalg.inv(symmetric(h)).flatten(1)),
    through("eigenvalues of each row's matrix", lambda h, x: torch.linalg.eigvalsh(symmetric(h)), 2),
    through("determinant of each row's matrix", lambda h, x: torch.linalg.det(symmetric(h))[:, None], 1),
    through("spectrum of columns", spectral),
    through("rotary positions by complex numbers", rotary),
    through("sinusoids", sinusoids, 8),
    through("in place", in_place),
    through("to float32 and back", same_dtype, tolerance=1e-6),
    through("checkpointed", checkpointed, refused=dict.fromkeys(WAYS, "checkpoint")),
    through("nested containers", nested),
    through("branch on the batch's sum functorch#257", branch, rowwise=False),
    through("branch on mask.all()", unless_all),
    through("loop until small", until_small, rowwise=False),
    through("loop of three", fixed_point),
    through("loop over rows with a branch", by_row),
    step(
        "operation: inputs changed in place",
        changed_inputs,
        epochs=1,
        refused=dict.fromkeys((*WAYS, "lightning_fit"), "in place"),
    ),
    weighted("grid_sample and affine_grid", grid, 2, 3, rows=images()),
    weighted("interpolate", interpolated, 3, 3, rows=images()),
    weighted("convolution by unfold", own_convolution, 18, rows=images()),
    weighted("filters of each row", dynamic_filters, 2, 9, rows=images()),
    weighted("products in the spectrum of images", convolved_by_spectra, 2, 2, rows=images()),
    weighted("short-time spectrum", short_time, 7, rows=long_series),
    weighted("three-way product", tucker, 4, 4, 1),
    weighted("tensordot", tensordot, 4, 1),
    weighted("matrix exponential", exponential, 4, 4),
    weighted("solve", solved, 4, 4),
    weighted("Cholesky", factored, 4, 4),
    weighted("singular values", singular, 4, 4),
    weighted("QR", orthonormal, 4, 4),
    weighted("eigenvalues", eigen, 4, 4),
    weighted("log-determinant", determinant, 4, 4),
    weighted("circulant matrix by indices", toeplitz, 4),
    weighted("triangular matrix by indices", triangular, 10),
    weighted("vmap inside", vmapped, 4, 1),
    weighted("sparse matrix", sparse, 4),
]
