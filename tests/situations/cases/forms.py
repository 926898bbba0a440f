"""What rows, batches, losses and steps look like: fields, dtypes, complex numbers, answers of `training_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, Step, adam, adamw, images, labelled, mlp, net, regression, sgd, step

COMPLEX: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-4}
TRAINER = "lightning_fit"


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


class Two(nn.Module):
    """A network of two inputs, by name or in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6)

    def forward(self, a: Any, b: Tensor | None = None) -> Tensor:
        if b is None:
            a, b = a
        return self.net(torch.cat([a, b], 1))


class Rows(NamedTuple):
    """Rows with names."""

    x: Tensor
    y: Tensor


def by_name(n: int) -> Any:
    return {"a": torch.randn(n, 4), "b": torch.randn(n, 2)}, torch.randn(n, 1)


def in_tuples(n: int) -> Any:
    return (torch.randn(n, 4), torch.randn(n, 2)), torch.randn(n, 1)


def as_dict(n: int) -> Any:
    return {"x": torch.randn(n, 4), "y": torch.randn(n, 1)}


def as_named(n: int) -> Any:
    return Rows(torch.randn(n, 4), torch.randn(n, 1))


def two_targets(n: int) -> Any:
    return torch.randn(n, 4), {"a": torch.randn(n, 1), "b": torch.randint(3, (n,))}


class TwoHeads(nn.Module):
    """Outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"a": self.a(h), "b": self.b(h)}


def both(p: Any, t: Any) -> Tensor:
    return F.mse_loss(p["a"], t["a"]) + F.cross_entropy(p["b"], t["b"])


def learned_weights(s: Any, batch: Any) -> Tensor:
    """Losses of two tasks, weighted by trained variances."""
    p, t = s(batch[0]), batch[1]
    losses = torch.stack([F.mse_loss(p["a"], t["a"]), F.cross_entropy(p["b"], t["b"])])
    return (losses * (-s.net.scales).exp() + s.net.scales).sum()


class Weighted(TwoHeads):
    """Two heads and the logarithms of their variances."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))


class Latent(nn.Module):
    """A pair of outputs: mean and logarithm of the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.scale(x)


def divergence(p: Any, t: Any) -> Tensor:
    mean, log_variance = p
    return 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean() + (mean - t).square().mean()


# Answers of `training_step`.


def answer_dict(s: Any, batch: Any) -> Any:
    loss = loss_of(s, batch)
    return {"loss": loss, "rows": len(batch[0]), "output": s(batch[0]).detach()}


def answer_one_row(s: Any, batch: Any) -> Any:
    return loss_of(s, batch).reshape(1)


def answer_none_of_second(s: Any, batch: Any) -> Any:
    return loss_of(s, batch) if s.global_step % 2 == 0 else None


def answer_none_of_negative(s: Any, batch: Any) -> Any:
    return None if batch[1].mean() < -0.3 else loss_of(s, batch)


def logging(s: Any, batch: Any) -> Any:
    loss = loss_of(s, batch)
    s.log("loss", loss, prog_bar=True, on_epoch=True)
    s.log_dict({"a": loss.detach() * 2, "b": 3.0}, batch_size=len(batch[0]))
    return loss


def sum_of_terms(s: Any, batch: Any) -> Any:
    terms = {"fit": loss_of(s, batch), "small": 0.1 * s(batch[0]).square().mean()}
    return sum(terms.values())


def nan_guarded(s: Any, batch: Any) -> Any:
    loss = loss_of(s, batch)
    return loss if torch.isfinite(loss) else loss * 0


def scaled_loss(s: Any, batch: Any) -> Any:
    return loss_of(s, batch) * 1e-6


class Shared(Step):
    """The loss is a module with parameters of its own."""

    def __init__(self) -> None:
        super().__init__(mlp(4, 2), lambda s, b: s.centre(s(b[0])))
        self.centre = Centre()


class Centre(nn.Module):
    """Squared distances to a trained point."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.randn(2))

    def forward(self, p: Tensor) -> Tensor:
        return (p - self.point).square().sum(1).mean() + 0.1 * (p - 1).square().mean()


class Setup(Step):
    """Hyperparameters saved, the network's properties asked."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(mlp(4, 1, width), loss_of)
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        x = batch[0].to(self.device, self.dtype)
        return F.mse_loss(self(x), batch[1]) * self.hparams["width"]


class Wrapped(Step):
    """A LightningModule in a LightningModule."""

    def __init__(self) -> None:
        super().__init__(Step(mlp(), loss_of), lambda s, b: s.net.training_step(b))


# Complex numbers.


class Complex(nn.Module):
    """A complex matrix, of whose product the modulus is taken."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.w, self.dtype = nn.Parameter(torch.randn(4, 2, dtype=dtype)), dtype
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.dtype) @ self.w).abs())


class ComplexLinear(nn.Module):
    """Layers of torch with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x.to(torch.complex64))
        return z.real + 0.3 * z.imag


class Spectral(nn.Module):
    """A layer of a Fourier neural operator on signals (n, 1, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.last = nn.Conv1d(1, 2, 1), nn.Conv1d(2, 2, 1), nn.Linear(16, 1)
        self.w = nn.Parameter(0.5 * torch.randn(2, 2, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        f = torch.fft.rfft(h)
        low = torch.einsum("nim,iom->nom", f[..., :3], self.w)
        h = torch.fft.irfft(F.pad(low, (0, 2)), n=8) + self.skip(h)
        return self.last(F.gelu(h).flatten(1))


class ComplexBuffer(nn.Module):
    """A fixed rotation by complex numbers, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.tensor([0.3, 1.2])))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(-1, 2, 2).contiguous()) * self.turn
        return self.net(torch.view_as_real(z).flatten(1))


class StateSpace(nn.Module):
    """A diagonal state space with complex eigenvalues, as of S4."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.turn = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.c = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.complex(-self.decay.exp(), self.turn)[:, None] * torch.arange(8)
        kernel = (self.c[:, None] * powers.exp()).sum(0).real
        return (x[:, 0] * kernel).sum(1, keepdim=True)


def signal(n: int) -> Any:
    return torch.randn(n, 1, 8), torch.randn(n, 1)


def complex_rows(n: int) -> Any:
    return torch.randn(n, 4, dtype=torch.complex64), torch.randn(n, 1)


class OfComplex(nn.Module):
    """A network of complex inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8)

    def forward(self, z: Tensor) -> Tensor:
        return self.net(torch.view_as_real(z).flatten(1))


# Dtypes.


class Mixed(nn.Module):
    """A layer in float32 after one in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().float()).double()


class Scalars(nn.Module):
    """Parameters without a dimension, and one of one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x[:, :1] + self.shift


class Empty(nn.Module):
    """A parameter without entries, as of an unused option."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.none = mlp(), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.cat([x, self.none.expand(len(x), 0)], 1))


class Integers(nn.Module):
    """Columns of categories and of numbers, as of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.net = nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(4, 2)]), mlp(6)

    def forward(self, x: Any) -> Tensor:
        words = torch.cat([table(column) for table, column in zip(self.tables, x["kinds"].unbind(1))], 1)
        return self.net(torch.cat([words, x["numbers"]], 1))


class Adapter(nn.Module):
    """A low-rank change of a frozen layer, as of LoRA; the second factor begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.base(x) + 0.5 * x @ self.a.T @ self.b.T))


class Cosine(nn.Module):
    """Logits that are scaled cosines, as of ArcFace."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x), F.normalize(self.w))


def categories(n: int) -> Any:
    kinds = torch.stack([torch.randint(3, (n,)), torch.randint(4, (n,))], 1)
    return {"x": {"kinds": kinds, "numbers": torch.randn(n, 2)}}, torch.randn(n, 1)


def bytes_of_images(n: int) -> Any:
    return torch.randint(0, 255, (n, 2, 4, 4), dtype=torch.uint8), torch.randn(n, 1)


class OfBytes(nn.Module):
    """Pixels as bytes, scaled inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[0].weight.dtype) / 255)


def one_feature(n: int) -> Any:
    return torch.randn(n), torch.randn(n)


class OfNumbers(nn.Module):
    """Rows that are one number each, outputs too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[:, None])[:, 0]


def huge(n: int) -> Any:
    return 1e6 * torch.randn(n, 4), torch.randn(n, 1)


def constant(n: int) -> Any:
    return torch.ones(n, 4), torch.full((n, 1), 2.0)


def first(p: Tensor, t: Tensor) -> Tensor:
    return (p[:, 0] - t[:, 0]).square().mean()


def squeezed(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p.squeeze(1), t.squeeze(1))


def numbers(name: str, make: Callable[[], nn.Module], rows: Any = None, loss: Any = F.mse_loss, **options: Any) -> Case:
    return net(f"complex: {name}", make, rows, loss, **{**COMPLEX, "rowwise": True, **options})


CASES: list[Case] = [
    net("form: inputs by name", Two, by_name, rowwise=True),
    net("form: inputs in a tuple", Two, in_tuples, rowwise=True),
    net("form: outputs and targets by name", TwoHeads, two_targets, both, metrics={"loss": both}, rowwise=True),
    net("form: a pair of outputs", Latent, regression(4, 2), divergence, metrics={"loss": divergence}, rowwise=True),
    net("form: categories and numbers", Integers, categories, rowwise=True),
    net("form: rows that are numbers", OfNumbers, one_feature, rowwise=True, metrics={"loss": F.mse_loss}),
    net("form: pixels as bytes", OfBytes, bytes_of_images, rowwise=True),
    net("form: a loss of the first column", mlp, None, first, rowwise=True),
    net("form: a loss of squeezed outputs", mlp, None, squeezed, rowwise=True),
    net("form: rows that are all alike", mlp, constant, rowwise=True),
    net("form: huge inputs", lambda: nn.Sequential(nn.LayerNorm(4), mlp()), huge, rowwise=True),
    step(
        "form: rows as a dict",
        lambda s, b: F.mse_loss(s(b["x"]), b["y"]),
        mlp,
        as_dict,
        split=lambda r: (r["x"], r["y"]),
    ),
    step("form: rows as a NamedTuple", lambda s, b: F.mse_loss(s(b.x), b.y), mlp, as_named, split=lambda r: (r.x, r.y)),
    step("form: losses weighted by trained variances", learned_weights, Weighted, two_targets, metrics={}),
    step("answer: a dict lightning#7750", answer_dict),
    step("answer: a tensor of one entry", answer_one_row),
    step(
        "answer: None in every second step lightning#3323",
        answer_none_of_second,
        epochs=3,
        refused=dict.fromkeys(("default", "batched=False", "batched=True", "chunk=1", "compile=True"), TRAINER),
    ),
    step(
        "answer: None for some batches lightning#6753",
        answer_none_of_negative,
        size=2,
        refused=dict.fromkeys(("default", "batched=False", "batched=True", "chunk=1", "compile=True"), TRAINER),
    ),
    step("answer: a loss, and logs of everything", logging),
    step("answer: a sum of terms", sum_of_terms),
    step("answer: a guard against NaN", nan_guarded),
    step("answer: a tiny loss under Adam", scaled_loss, optimizer=adam(eps=1e-12), tolerance=1e-6),
    Case("step: a loss with parameters", Shared),
    Case("step: hyperparameters, device and dtype", Setup),
    Case("step: a LightningModule inside", Wrapped),
    numbers("a matrix neuraloperator#208", Complex),
    numbers("a matrix, Adam makani", Complex, optimizer=adam()),
    numbers("a matrix, AdamW", Complex, optimizer=adamw()),
    numbers("a matrix, momentum", Complex, optimizer=sgd(momentum=0.9)),
    numbers("a matrix, RMSprop", Complex, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01)),
    numbers("a matrix, clipped", Complex, says={"clip": 0.1}),
    numbers("a matrix, two rounds", Complex, rounds=2),
    numbers("a matrix, minibatches", Complex, size=2),
    numbers("a matrix of complex128", lambda: Complex(torch.complex128), dtype=torch.float64, tolerance=1e-9),
    numbers("layers of torch", ComplexLinear),
    numbers("Fourier operator", Spectral, signal),
    numbers("Fourier operator, Adam", Spectral, signal, optimizer=adam(0.01)),
    numbers("buffer", ComplexBuffer),
    numbers("state space", StateSpace, signal),
    numbers("inputs", OfComplex, complex_rows),
    net("dtype: layers of two", Mixed, rowwise=True, tolerance=1e-5),
    net("dtype: float32", mlp, rowwise=True, dtype=torch.float32, tolerance=1e-4),
    net("dtype: bfloat16", mlp, rowwise=True, dtype=torch.bfloat16, tolerance=0.1),
    net("dtype: float16", mlp, rowwise=True, dtype=torch.float16, tolerance=0.02),
    net("parameters without a dimension", Scalars, rowwise=True),
    net("a parameter without entries", Empty, rowwise=True),
    net("low-rank change of a frozen layer PEFT", Adapter, optimizer=adam(), rowwise=True),
    net(
        "images of one pixel",
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(2, 1)),
        images(1),
        rowwise=True,
    ),
    net(
        "one class",
        lambda: nn.Linear(4, 3),
        lambda n: (torch.randn(n, 4), torch.zeros(n).long()),
        F.cross_entropy,
        rowwise=True,
    ),
    net(
        "labels of a client that others lack",
        lambda: nn.Linear(4, 9),
        lambda n: (torch.randn(n, 4), torch.full((n,), n % 9)),
        F.cross_entropy,
        rowwise=True,
    ),
    net("classes by cosine", Cosine, labelled(), F.cross_entropy, rowwise=True),
]
