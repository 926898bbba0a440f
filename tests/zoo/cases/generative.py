"""Generative and probabilistic models: diffusers, zuko, scvi-tools, gpytorch, pyro, and a GAN."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Case, Project


def unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip


class Denoising(L.LightningModule):
    """The training loop of diffusers' first tutorial."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import DDPMScheduler

        self.net, self.scheduler = unet(), DDPMScheduler(num_train_timesteps=100)

    def training_step(self, batch: Any) -> Tensor:
        images = batch[0]
        noise = torch.randn_like(images)
        times = torch.randint(0, 100, (len(images),), device=images.device)
        noisy = self.scheduler.add_noise(images, noise, times)
        return F.mse_loss(self.net(noisy, times, return_dict=False)[0], noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def drawings(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 8, 8), torch.zeros(n)


def spline_flow() -> Any:
    import zuko

    return zuko.flows.NSF(features=2, context=1, transforms=2, hidden_features=(16,))


def autoregressive_flow() -> Any:
    import zuko

    return zuko.flows.MAF(features=2, context=1, transforms=2, hidden_features=(16,))


def likelihood(net: nn.Module, batch: Any) -> Tensor:
    return -net(batch[1]).log_prob(batch[0]).mean()


def points(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), torch.randn(n, 1)


class SparseProcess(L.LightningModule):
    """A sparse Gaussian process, as gpytorch's tutorial of stochastic variational regression."""

    def __init__(self) -> None:
        super().__init__()
        import gpytorch

        class Process(gpytorch.models.ApproximateGP):
            def __init__(self) -> None:
                points = torch.linspace(-1, 1, 6)[:, None]
                posterior = gpytorch.variational.CholeskyVariationalDistribution(6)
                strategy = gpytorch.variational.VariationalStrategy(self, points, posterior)
                super().__init__(strategy)
                self.mean, kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()
                self.kernel = gpytorch.kernels.ScaleKernel(kernel)

            def forward(self, x: Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

        self.process, self.likelihood = Process(), gpytorch.likelihoods.GaussianLikelihood()

    def training_step(self, batch: Any) -> Tensor:
        import gpytorch

        bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=6)
        return -bound(self.process(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def curves(n: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, n)[:, None]
    return x, torch.sin(3 * x[:, 0])


class Autoencoder(L.LightningModule):
    """A variational autoencoder in Pyro, as its tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def model(self, x: Tensor) -> None:
        import pyro
        import pyro.distributions as dist

        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(len(x), 2), x.new_ones(len(x), 2)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        import pyro
        import pyro.distributions as dist

        mean, scale = self.encoder(x).chunk(2, -1)
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Normal(mean, scale.exp()).to_event(1))

    def training_step(self, batch: Any) -> Tensor:
        from pyro.infer import Trace_ELBO

        return Trace_ELBO().differentiable_loss(self.model, self.guide, batch[0]) / len(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def marks(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(2, (n, 6)).float(), torch.zeros(n)


class GAN(L.LightningModule):
    """Lightning's example of a GAN: two optimisers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))

    def losses(self, batch: Any) -> Any:
        made = self.generator(torch.randn(len(batch[0]), 2, dtype=batch[0].dtype))
        yield F.softplus(-self.critic(made)).mean()
        yield (F.softplus(self.critic(made.detach())) + F.softplus(-self.critic(batch[0]))).mean()

    def training_step(self, batch: Any) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch)):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]


def by_hand(module: Any, optimizers: list[torch.optim.Optimizer], batch: Any) -> None:
    for optimizer, loss in zip(optimizers, module.losses(batch)):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def samples(n: int) -> tuple[Tensor, Tensor]:
    return 3 + torch.randn(n, 1), torch.zeros(n)


def cells_plan() -> Any:
    """scvi-tools' own network and its own LightningModule."""
    import scvi

    net = scvi.module.VAE(n_input=10, n_batch=1, n_hidden=8, n_latent=3, dropout_rate=0.0)
    return scvi.train.TrainingPlan(net, n_epochs_kl_warmup=None)


def cells(n: int) -> dict[str, Tensor]:
    return {"X": torch.poisson(torch.full((n, 10), 4.0)), "batch": torch.zeros(n, 1), "labels": torch.zeros(n, 1)}


LOOPED = ("client by client", "lightning_fit")

CASES = [
    Case("Diffusion U-Net", "diffusers", Denoising, drawings),
    Case("Neural spline flow", "zuko", lambda: Project(spline_flow(), likelihood), points),
    Case("Masked autoregressive flow", "zuko", lambda: Project(autoregressive_flow(), likelihood), points),
    Case(
        "Sparse Gaussian process",
        "gpytorch",
        SparseProcess,
        curves,
        says={"buffers": "average"},
        ways=LOOPED,
        remark="writes to its tensors' data",
    ),
    Case(
        "Variational autoencoder",
        "pyro/pyro-ppl",
        Autoencoder,
        marks,
        ways=LOOPED,
        remark="draws into a tensor that all clients share",
    ),
    Case(
        "GAN, two optimisers",
        "lightning",
        GAN,
        samples,
        step=by_hand,
        ways=("lightning_fit",),
        remark="two optimisers, stepped by hand",
    ),
    Case(
        "scVI",
        "scvi/scvi-tools",
        cells_plan,
        cells,
        says={"buffers": "local"},
        counts=(4, 2, 6),
        ways=("lightning_fit",),
        remark="logs metrics of metrics",
    ),
]
