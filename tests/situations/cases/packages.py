"""Modules of GPyTorch, Pyro and torchmetrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.distributions import constraints

with warnings.catch_warnings():  # names of torch that these packages still use
    warnings.simplefilter("ignore")
    import gpytorch
    import pyro
    import pyro.distributions as dist
    from gpytorch.variational import (
        CholeskyVariationalDistribution,
        IndependentMultitaskVariationalStrategy,
        LMCVariationalStrategy,
        MeanFieldVariationalDistribution,
        UnwhitenedVariationalStrategy,
        VariationalStrategy,
    )
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoDelta
    from pyro.nn import PyroModule, PyroParam, PyroSample

from situations.case import Case, Step, adam, labelled, mlp, sgd, step

AVERAGE = {"buffers": "average"}
STORE = "module_local_params|param store|Pyro"


def points(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), torch.randn(n)


def flags(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2), (torch.rand(n) > 0.5).to(torch.get_default_dtype())


class Process(gpytorch.models.ApproximateGP):
    """A sparse process of three inducing points."""

    def __init__(
        self,
        kernel: gpytorch.kernels.Kernel | None = None,
        strategy: Any = VariationalStrategy,
        distribution: Any = CholeskyVariationalDistribution,
    ) -> None:
        inducing = torch.randn(3, 2)
        variational = distribution(3, mean_init_std=0.0)
        super().__init__(strategy(self, inducing, variational, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel or gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(Process):
    """A sparse process of the features of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp(2, 2)

    def __call__(self, x: Tensor, **options: Any) -> Any:
        return super().__call__(self.features(x), **options)


class Outputs(gpytorch.models.ApproximateGP):
    """Two outputs that mix two processes."""

    def __init__(self) -> None:
        inducing = torch.randn(2, 3, 2)
        variational = CholeskyVariationalDistribution(3, batch_shape=torch.Size([2]), mean_init_std=0.0)
        base = VariationalStrategy(self, inducing, variational, learn_inducing_locations=True)
        super().__init__(LMCVariationalStrategy(base, num_tasks=2, num_latents=2, latent_dim=-1))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([2]))
        self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Bound(Step):
    """A process, a likelihood and a bound of theirs."""

    def __init__(self, process: nn.Module, likelihood: nn.Module, bound: Any = gpytorch.mlls.VariationalELBO) -> None:
        super().__init__(process, lambda s, b: -s.bound(s.net(b[0]), b[1]), adam(0.05))
        self.likelihood = likelihood
        self.bound = bound(likelihood, process, num_data=20)


def process(name: str, make: Callable[[], nn.Module], rows: Any = points, **options: Any) -> Case:
    says = options.pop("says", AVERAGE)
    return Case(f"GPyTorch: {name}", make, rows, epochs=1, metrics={}, says=says, tolerance=1e-7, **options)


class ExactProcess(gpytorch.models.ExactGP):
    """An exact process on the rows of the batch."""

    def __init__(self) -> None:
        super().__init__(None, None, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Independent(gpytorch.models.ApproximateGP):
    """Two outputs of processes that share nothing."""

    def __init__(self) -> None:
        inducing = torch.randn(2, 3, 2)
        variational = CholeskyVariationalDistribution(3, batch_shape=torch.Size([2]), mean_init_std=0.0)
        base = VariationalStrategy(self, inducing, variational, learn_inducing_locations=True)
        super().__init__(IndependentMultitaskVariationalStrategy(base, num_tasks=2))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([2]))
        self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class KnownNoise(Step):
    """A process whose noise comes with the rows."""

    def __init__(self) -> None:
        super().__init__(Process(), lambda s, b: None, adam(0.05))
        self.likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(1))
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.net, num_data=20)

    def training_step(self, batch: Any) -> Tensor:
        x, y, noise = batch
        return -self.bound(self.net(x), y, noise=noise)


def noisy(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, 2), torch.randn(n), 0.1 + torch.rand(n)


def marginal(s: Any, batch: Any) -> Tensor:
    """The log marginal likelihood of all rows, by hand."""
    prior = s.net.forward(batch[0])
    noisy = s.net.likelihood(prior)
    return -torch.distributions.MultivariateNormal(noisy.mean, noisy.covariance_matrix).log_prob(batch[1]) / len(
        batch[0]
    )


class Parameters(PyroModule):
    """A line whose weights are Pyro's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = PyroParam(torch.randn(2))
        self.scale = PyroParam(torch.tensor(1.5), constraint=constraints.positive)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * self.scale


class Layered(PyroModule):
    """Layers of torch as Pyro's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PyroModule[nn.Linear](2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]


class Regression(PyroModule):
    """A line with a prior on its weights, which a point estimate fits."""

    def __init__(self) -> None:
        super().__init__()
        self.w = PyroSample(lambda self: dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = x @ self.w
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)
        return mean


class Estimate(Step):
    """A point estimate by Pyro's ELBO with a guide of deltas."""

    def __init__(self) -> None:
        super().__init__(Regression(), lambda s, b: None, sgd(0.02))
        self.guide = AutoDelta(self.net, init_loc_fn=pyro.infer.autoguide.init_to_value(values={"w": torch.ones(2)}))
        self.guide(torch.zeros(1, 2), torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return Trace_ELBO().differentiable_loss(self.net, self.guide, x, y) / len(x)


def fresh(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker that begins with an empty store of parameters."""

    def begin() -> nn.Module:
        pyro.clear_param_store()
        return make()

    return begin


def program(name: str, make: Callable[[], nn.Module]) -> Case:
    ways = ("default", "batched=False", "batched=True", "chunk=1", "compile=True", "lightning_fit")
    return Case(f"Pyro: {name}", fresh(make), points, metrics={}, refused=dict.fromkeys(ways, STORE))


def squares(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


class Measured(Step):
    """Metrics of torchmetrics that are updated and logged in the step."""

    def __init__(self, *metrics: torchmetrics.Metric) -> None:
        super().__init__(mlp(4, 3), lambda s, b: None)
        self.metrics = nn.ModuleList(metrics)

    def training_step(self, batch: Any) -> Tensor:
        out = self(batch[0])
        for index, metric in enumerate(self.metrics):
            metric(out, batch[1])
            self.log(f"metric{index}", metric)
        return F.cross_entropy(out, batch[1])


class MetricAsLoss(Step):
    """A metric's functional form as the loss."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(mlp(2, 1), lambda s, b: function(s(b[0])[:, 0], b[1]))


LIKELIHOODS = gpytorch.likelihoods
CASES: list[Case] = [
    process("sparse, Gaussian", lambda: Bound(Process(), LIKELIHOODS.GaussianLikelihood())),
    process("sparse, Bernoulli", lambda: Bound(Process(), LIKELIHOODS.BernoulliLikelihood()), flags),
    process("sparse, Student", lambda: Bound(Process(), LIKELIHOODS.StudentTLikelihood())),
    process(
        "sparse, predictive bound",
        lambda: Bound(Process(), LIKELIHOODS.GaussianLikelihood(), gpytorch.mlls.PredictiveLogLikelihood),
    ),
    process(
        "sparse, mean field",
        lambda: Bound(Process(distribution=MeanFieldVariationalDistribution), LIKELIHOODS.GaussianLikelihood()),
    ),
    process(
        "sparse, unwhitened",
        lambda: Bound(Process(strategy=UnwhitenedVariationalStrategy), LIKELIHOODS.GaussianLikelihood()),
    ),
    process(
        "sparse, Matérn in an interval gpytorch",
        lambda: Bound(
            Process(gpytorch.kernels.MaternKernel(1.5, lengthscale_constraint=gpytorch.constraints.Interval(0.1, 3.0))),
            LIKELIHOODS.GaussianLikelihood(),
        ),
    ),
    process(
        "sparse, a prior of the scale",
        lambda: Bound(
            Process(gpytorch.kernels.RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0))),
            LIKELIHOODS.GaussianLikelihood(),
        ),
    ),
    process(
        "sparse, sums and products of kernels",
        lambda: Bound(
            Process(gpytorch.kernels.RBFKernel() * gpytorch.kernels.PeriodicKernel() + gpytorch.kernels.LinearKernel()),
            LIKELIHOODS.GaussianLikelihood(),
        ),
    ),
    process("sparse, of a network's features", lambda: Bound(Deep(), LIKELIHOODS.GaussianLikelihood())),
    process(
        "sparse, two outputs",
        lambda: Bound(Outputs(), LIKELIHOODS.MultitaskGaussianLikelihood(num_tasks=2)),
        lambda n: (torch.randn(n, 2), torch.randn(n, 2)),
    ),
    process("sparse, noise of each row gpytorch#1276", KnownNoise, noisy),
    process(
        "sparse, two outputs that share nothing gpytorch#2332",
        lambda: Bound(Independent(), LIKELIHOODS.MultitaskGaussianLikelihood(num_tasks=2)),
        lambda n: (torch.randn(n, 2), torch.randn(n, 2)),
    ),
    process("marginal likelihood of all rows", lambda: Step(ExactProcess(), marginal, adam(0.05)), says={}),
    program("parameters pyro#3149", lambda: Step(Parameters(), squares)),
    program("layers of torch", lambda: Step(Layered(), squares)),
    program("a point estimate pyciemss#261", Estimate),
    Case(
        "torchmetrics: accuracy logged in the step",
        lambda: Measured(torchmetrics.classification.MulticlassAccuracy(3)),
        labelled(),
    ),
    Case(
        "torchmetrics: three metrics logged in the step, minibatches",
        lambda: Measured(
            torchmetrics.classification.MulticlassAUROC(3, thresholds=5),
            torchmetrics.classification.MulticlassF1Score(3),
        ),
        labelled(),
        size=3,
    ),
    Case(
        "torchmetrics: concordance as the loss",
        lambda: MetricAsLoss(lambda p, t: 1 - torchmetrics.functional.concordance_corrcoef(p, t)),
        points,
        metrics={},
        times=2,
    ),
    Case(
        "torchmetrics: unexplained variance as the loss",
        lambda: MetricAsLoss(lambda p, t: 1 - torchmetrics.functional.r2_score(p, t)),
        points,
        metrics={},
    ),
    step(
        "torchmetrics: similarity of images as the loss",
        lambda s, b: (
            1
            - torchmetrics.functional.image.structural_similarity_index_measure(
                s(b[0]), b[0], data_range=1.0, kernel_size=3, sigma=0.5
            )
        ),
        lambda: nn.Conv2d(1, 1, 1),
        lambda n: (torch.rand(n, 1, 6, 6),),
        metrics={},
    ),
]
