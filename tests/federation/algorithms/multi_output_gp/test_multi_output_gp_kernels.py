"""Every kernel that GPyTorch exports: federated and central processes agree, or it is refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import functional
from fedtorch.checkpoint import describe
from fedtorch.models.gaussian_process import ConvolvedGP, _stacked_kernel as stacked_kernel
from fedtorch.models.gaussian_process.kernels import Coregionalisation
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

# Additive structures and GPyTorch's way of evaluating them are deprecated there, and work.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
Size, DTYPE = torch.Size, torch.float64
K, N, J = 3, 8, 4
CLOSE = 1e-6
LATENTS, ONE = Size([2]), Size()
k = gpytorch.kernels

CASES: dict[str, Callable[[Size], Any]] = {
    "RBF": lambda b: k.RBFKernel(batch_shape=b),
    "RBF, ARD": lambda b: k.RBFKernel(ard_num_dims=2, batch_shape=b),
    "RBF of a column": lambda b: k.RBFKernel(active_dims=(1,), batch_shape=b),
    "Matern 1/2": lambda b: k.MaternKernel(0.5, batch_shape=b),
    "Matern 3/2": lambda b: k.MaternKernel(1.5, batch_shape=b),
    "Matern 5/2, ARD": lambda b: k.MaternKernel(2.5, ard_num_dims=2, batch_shape=b),
    "RQ": lambda b: k.RQKernel(batch_shape=b),
    "RQ, ARD": lambda b: k.RQKernel(ard_num_dims=2, batch_shape=b),
    "periodic": lambda b: k.PeriodicKernel(batch_shape=b),
    "periodic, ARD": lambda b: k.PeriodicKernel(ard_num_dims=2, batch_shape=b),
    "cosine of a column": lambda b: k.CosineKernel(active_dims=(0,), batch_shape=b),
    "linear": lambda b: k.LinearKernel(batch_shape=b),
    "linear, ARD": lambda b: k.LinearKernel(ard_num_dims=2, batch_shape=b),
    "polynomial": lambda b: k.PolynomialKernel(2, batch_shape=b),
    "constant": lambda b: k.ConstantKernel(batch_shape=b),
    "piecewise polynomial 0": lambda b: k.PiecewisePolynomialKernel(0, batch_shape=b),
    "piecewise polynomial 2": lambda b: k.PiecewisePolynomialKernel(2, batch_shape=b),
    "spectral mixture": lambda b: k.SpectralMixtureKernel(3, ard_num_dims=2, batch_shape=b),
    "spectral delta": lambda b: k.SpectralDeltaKernel(2, num_deltas=8, batch_shape=b),
    "random features": lambda b: k.RFFKernel(6, num_dims=2, batch_shape=b),
    "random features, later": lambda b: k.RFFKernel(6, batch_shape=b),
    "scale": lambda b: k.ScaleKernel(k.RBFKernel(batch_shape=b), batch_shape=b),
    "scale of one": lambda b: k.ScaleKernel(k.RBFKernel(), batch_shape=b),
    "sum": lambda b: k.RBFKernel(batch_shape=b) + k.PeriodicKernel(batch_shape=b),
    "product": lambda b: k.RBFKernel(batch_shape=b) * k.LinearKernel(batch_shape=b),
    "composition": lambda b: (
        k.ScaleKernel(
            k.MaternKernel(2.5, active_dims=(0,), batch_shape=b) * k.RQKernel(active_dims=(1,)), batch_shape=b
        )
        + k.ConstantKernel(batch_shape=b)
    ),
    "arc": lambda b: k.ArcKernel(k.MaternKernel(2.5, batch_shape=b), ard_num_dims=2, batch_shape=b),
    "cylindrical": lambda b: k.CylindricalKernel(3, k.MaternKernel(2.5, batch_shape=b), batch_shape=b),
    "normal distributions": lambda b: k.GaussianSymmetrizedKLKernel(batch_shape=b),
    "distributions": lambda b: k.DistributionalInputKernel(apart, batch_shape=b),
    "index": lambda b: k.RBFKernel(active_dims=(0,), batch_shape=b) * k.IndexKernel(2, active_dims=(1,), batch_shape=b),
    "additive structure": lambda b: k.AdditiveStructureKernel(k.RBFKernel(batch_shape=b), 2),
    "product structure": lambda b: k.ProductStructureKernel(k.RBFKernel(batch_shape=b), 2),
    "Hamming": lambda b: [k.HammingIMQKernel(2) for _ in range(b.numel())] if b else k.HammingIMQKernel(2),
    "constraint and priors": lambda b: k.ScaleKernel(
        k.RBFKernel(
            batch_shape=b,
            lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0),
            lengthscale_constraint=gpytorch.constraints.Interval(0.05, 3.0),
        ),
        batch_shape=b,
        outputscale_prior=gpytorch.priors.LogNormalPrior(0.0, 0.5),
        outputscale_constraint=gpytorch.constraints.GreaterThan(0.1),
    ),
    "different ones": lambda b: (
        [k.ScaleKernel(k.RBFKernel()), k.PeriodicKernel(active_dims=(0,))] if b else k.ScaleKernel(k.RBFKernel())
    ),
    "a class of one's own": lambda b: [Triangle() for _ in range(b.numel())] if b else Triangle(),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "MultitaskKernel": (lambda: k.MultitaskKernel(k.RBFKernel(), 2, 1), "several outputs"),
    "LCMKernel": (lambda: k.LCMKernel([k.RBFKernel()], 2, 1), "several outputs"),
    "RBFKernelGrad": (k.RBFKernelGrad, "several outputs"),
    "RBFKernelGradGrad": (k.RBFKernelGradGrad, "several outputs"),
    "Matern52KernelGrad": (k.Matern52KernelGrad, "several outputs"),
    "PolynomialKernelGrad": (lambda: k.PolynomialKernelGrad(2), "several outputs"),
    "GridKernel": (lambda: k.GridKernel(k.RBFKernel(), [torch.linspace(0, 1, 4)]), "on a grid"),
    "GridInterpolationKernel": (lambda: k.GridInterpolationKernel(k.RBFKernel(), 8, 2), "on a grid"),
    "InducingPointKernel": (
        lambda: k.InducingPointKernel(k.RBFKernel(), torch.rand(3, 2), gpytorch.likelihoods.GaussianLikelihood()),
        "inducing inputs",
    ),
    "MultiDeviceKernel": (lambda: k.MultiDeviceKernel(k.RBFKernel(), [], torch.device("cpu")), "over devices"),
    "NewtonGirardAdditiveKernel": (lambda: k.NewtonGirardAdditiveKernel(k.RBFKernel(), 2), "float32"),
}
LEARN_INDUCING = {"composition", "RQ, ARD", "Matern 3/2", "different ones"}
NOT_KERNELS = {"Kernel": "the base class", "keops": "a module, whose kernels need PyKeOps"}


class Triangle(k.Kernel):  # type: ignore[misc]
    """A kernel that knows neither batch shapes nor `diag`."""

    def __init__(self) -> None:
        super().__init__()
        self.raw_width = torch.nn.Parameter(torch.zeros(1))
        self.register_constraint("raw_width", gpytorch.constraints.Positive())

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor:
        width = self.raw_width_constraint.transform(self.raw_width)
        gap = (x1[..., :, None, :] - x2[..., None, :, :]).abs() / (2 * width)
        return (1 - gap).clamp(min=0).prod(-1)


def apart(one: Tensor, two: Tensor) -> Tensor:
    return (one[..., :, None, :] - two[..., None, :, :]).abs().sum(-1)


def inputs(name: str, *shape: int, seed: int = 0) -> Tensor:
    """In the unit disk; with a column of codes, or of one-hot codes."""
    x = 0.7 * torch.rand(*shape, 2, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
    if name == "index":
        x[..., 1] = (x[..., 1] > 0.35).to(DTYPE)
    if name == "Hamming":
        x = (x[..., :1] > torch.tensor([0.35, 9.0])).to(DTYPE)
        x[..., 1] = 1 - x[..., 0]
    return x


def made(name: str, shape: Size = LATENTS) -> Any:
    """The case's kernel, its hyperparameters away from where GPyTorch starts them, the same whenever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kernel = CASES[name](shape)
        for part in kernel if isinstance(kernel, list) else [kernel]:
            part.to(DTYPE)
            for parameter in part.parameters():
                parameter.data += 0.3 * torch.randn_like(parameter)
    return kernel


def model(name: str, units: Size = ONE) -> ConvolvedGP:
    kernel = Coregionalisation(made(name), 2, units)
    return ConvolvedGP(inputs(name, J, seed=1), kernel, batch_shape=units, learn_inducing=name in LEARN_INDUCING)


def signals(name: str) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    x = inputs(name, K, N)
    noise = torch.randn(K, N, generator=torch.Generator().manual_seed(2), dtype=DTYPE)
    y = torch.tensor([[1.0], [-2.0], [0.5]], dtype=DTYPE) * (4 * x[..., 0]).sin() + 0.2 * noise + x[..., 1]
    return ft.data.from_tensors([(x[i], y[i]) for i in range(K)]), x, y


def central(name: str, run: ft.Run) -> ConvolvedGP:
    """All units in one model, with the federation's hyperparameters and random features and not its posterior."""
    gp, algorithm = model(name, Size([K])), run.algorithm
    tensors = {**dict(gp.named_parameters()), **dict(gp.named_buffers())}
    units = run.tensors(range(K))
    for one in gp.unit_names:
        tensors[one].data = units[one].clone()
    for one in gp.shared_names:
        tensors[one].data = run.server.told_at[one].clone()
    fixed = dict(algorithm.module.named_buffers())
    for one in (n for n in tensors if n.endswith("randn_weights")):
        tensors[one].data = fixed[one].clone()
    return gp


def agree(name: str, run: ft.Run, x: Tensor, y: Tensor) -> None:
    gp = central(name, run)
    with torch.no_grad():
        assert float((gp.bound(x, y) - run.server.bound).abs()) < CLOSE
        gp.condition(x, y)
        new = inputs(name, K, 5, seed=3)
        mean, variance = gp.marginals(new)
        for unit in range(K):
            found = run.client_module(unit).predict(new[unit])
            assert torch.allclose(found.mean, mean[unit], rtol=0, atol=CLOSE)
            assert torch.allclose(found.variance - gp.likelihood.noise[unit], variance[unit], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_a_federation_is_the_central_model(name: str) -> None:
    """Its posterior, its bound, and the gradients that hyperparameters move by."""
    data, x, y = signals(name)
    run = ft.Run(ft.fedmgp(model(name), accept_disclosure=True, steps=0, server_lr=0.0), ft.InProcess(data))
    heard: list[Any] = []
    server = run.algorithm.server
    run.algorithm = dataclasses.replace(run.algorithm, server=lambda s, a, key: heard.append(a) or server(s, a, key))
    assert len(list(run.rounds(2))) == 2
    agree(name, run, x, y)
    gp = central(name, run)
    shared = [dict(gp.named_parameters())[one] for one in gp.shared_names]
    whole = torch.autograd.grad(gp.bound(x, y), shared, allow_unused=True)
    gp.condition(x, y)
    prior = torch.autograd.grad(-gp.divergence(), shared, materialize_grads=True)
    for one, expected, part in zip(gp.shared_names, whole, prior):
        found = K * heard[-1].gradient.value[one] + part
        assert torch.allclose(found, torch.zeros(()) if expected is None else expected, rtol=1e-6, atol=1e-5), one


@pytest.mark.parametrize("name", ["composition", "constraint and priors", "different ones", "a class of one's own"])
def test_training_and_evaluation(name: str) -> None:
    data, x, y = signals(name)
    run = ft.run(ft.fedmgp(model(name), accept_disclosure=True, steps=2), ft.InProcess(data, 2), rounds=3)
    start = dict(model(name).named_parameters())
    assert all(not torch.equal(value, start[one]) for one, value in run.server.told_at.items())
    agree(name, run, x, y)
    gp = central(name, run)
    gp.condition(x, y)
    scores = run.evaluate(data, {"error": torch.nn.functional.mse_loss})["error"].clients
    assert torch.allclose(
        torch.as_tensor(scores, dtype=DTYPE), (gp.marginals(x)[0] - y).square().mean(-1), rtol=0, atol=CLOSE
    )
    with pytest.raises(ValueError, match=r"or run\.client_module"):
        run.global_module()


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"random features, later"}))  # another object draws others
def test_a_saved_run_is_loaded_and_lists_what_leaves(name: str, tmp_path: Path) -> None:
    """Both compute with the states of no clients, and so with no unit's hyperparameters."""
    data, x, _ = signals(name)
    begin = lambda: ft.Run(ft.fedmgp(model(name), accept_disclosure=True, steps=1), ft.InProcess(data))
    run = begin()
    run.step()
    run.save(tmp_path / "run.safetensors")
    again = begin().load(tmp_path / "run.safetensors")
    one, other = (each.client_module(1).marginals(x[1])[0] for each in (run, again))
    assert torch.equal(one, other)
    assert {"told.value.precision", "told.value.shift"} <= set(run.disclosure()["field"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_with_any_kernel(name: str) -> None:
    data, x, y = signals(name)
    run = ft.run(ft.fedmgp(model(name), accept_disclosure=True, steps=2), ft.InProcess(data, 2), rounds=6)
    agree(name, run, x, y)
    average = ft.run(ft.fedmgp_average(model(name), units=K, steps=2), ft.InProcess(data), rounds=2)
    assert bool(average.client_module(0).marginals(x[0])[0].isfinite().all())


@pytest.mark.parametrize("shape", [Size([2]), Size()], ids=["latent processes", "own process"])
@pytest.mark.parametrize("name", CASES)
def test_stacked_hyperparameters_are_those_of_each_unit(name: str, shape: Size) -> None:
    kernel = made(name, shape)
    kernel = stacked_kernel.SideBySide(kernel) if isinstance(kernel, list) else kernel
    dims, depth = stacked_kernel.parameter_dims(kernel), len(shape)
    x, z = (inputs(name, K, *(1,) * depth, n, seed=n) for n in (5, 4))
    generator = torch.Generator().manual_seed(4)
    values = {
        n: p.detach() + 0.3 * torch.randn(K, *p.shape, generator=generator, dtype=DTYPE)
        for n, p in kernel.named_parameters()
    }
    stacked_kernel.diagonal(kernel, dims, x)  # random features are drawn now
    swap = functional.Swap(kernel, list(values))
    before = copy.deepcopy([part.batch_shape for part in kernel.modules() if isinstance(part, k.Kernel)])

    def evaluated(one: Tensor, two: Tensor) -> list[Tensor]:
        whole = stacked_kernel.matrix(kernel, dims, one, one).diagonal(dim1=-2, dim2=-1)
        return [stacked_kernel.matrix(kernel, dims, one, two), stacked_kernel.diagonal(kernel, dims, one), whole]

    with torch.no_grad():
        with swap(list(values.values())):
            found = evaluated(x, z)
        for unit in range(K):
            with swap([value[unit] for value in values.values()]):
                expected = evaluated(x[unit], z[unit])
            for one, two in zip(found, expected):
                assert one[unit].shape == two.shape
                assert torch.allclose(one[unit], two, rtol=0, atol=1e-9)
            assert torch.allclose(expected[1], expected[2], rtol=0, atol=1e-6)
        with swap([value[:1].expand_as(value) for value in values.values()]):
            assert torch.allclose(evaluated(x, z)[0][0], found[0][0], rtol=0, atol=1e-9)
    assert [part.batch_shape for part in kernel.modules() if isinstance(part, k.Kernel)] == before


@pytest.mark.parametrize("name", ["composition", "a class of one's own", "constraint and priors", "periodic, ARD"])
def test_units_with_a_process_of_their_own(name: str) -> None:
    """Each with hyperparameters of its own, priors among them, in an average of everything and in exact sums."""
    data, x, y = signals(name)
    gp = ConvolvedGP(inputs(name, J, seed=1), own_kernel=made(name, Size()))
    run = ft.run(ft.fedmgp(gp, steps=2, accept_disclosure=True), ft.InProcess(data), rounds=2)
    units = [run.client_module(unit) for unit in range(K)]
    assert len({next(iter(unit.own_kernel.parameters())).sum().item() for unit in units}) == K
    total = sum(unit.site(x[i], y[i]).constant.item() for i, unit in enumerate(units))
    told = run.clients.table.read(slice(0, K)).told.constant
    assert total == pytest.approx(float(told.sum()), abs=1e-6)
    average = ft.run(ft.fedmgp_average(gp, units=K, steps=1), ft.InProcess(data), rounds=1)
    assert bool(average.client_module(1).marginals(x[1])[0].isfinite().all())


@pytest.mark.parametrize("make", [ft.fedmgp, lambda gp: ft.fedmgp_average(gp, units=K)], ids=["sums", "averages"])
def test_sites_that_would_not_run_the_same_model_differ_in_their_settings(make: Callable[..., ft.Algorithm]) -> None:
    """Those that a server and its sites compare: inducing inputs, columns, random features, kinds of kernels."""
    w = inputs("RBF", J)

    def told(kernel: Any, inducing: Tensor = w) -> str:
        return describe(make(ConvolvedGP(inducing, kernel)).settings)

    assert told(k.RBFKernel()) == told(k.RBFKernel(), w * (1 + 1e-15))
    others = [
        k.MaternKernel(),
        k.RBFKernel(active_dims=(0,)),
        k.RBFKernel(active_dims=(1,)),
        k.RFFKernel(4, num_dims=2),
    ]
    others += [k.RFFKernel(4, num_dims=2), k.ScaleKernel(k.RBFKernel())]
    assert len({told(k.RBFKernel()), told(k.RBFKernel(), w + 0.01), *map(told, others)}) == 2 + len(others)


def test_every_kernel_is_here() -> None:
    """A kernel that a release of GPyTorch adds is noticed: it gets a case, or a reason why not."""
    used = set()
    for name in CASES:
        kernel = made(name, Size())
        used |= {type(part).__name__ for part in kernel.modules()}
    assert set(k.__all__) <= used | REFUSED.keys() | NOT_KERNELS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_that_cannot_work_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    for use in (Coregionalisation, lambda kernel, dims: ConvolvedGP(torch.rand(3, 2), own_kernel=kernel)):
        for kernel in (make(), k.RBFKernel() + make()):
            with pytest.raises(TypeError, match=reason):
                use(kernel, 2)


def test_kernels_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match="HammingIMQKernel without batch_shape"):
        Coregionalisation(k.HammingIMQKernel(2, batch_shape=Size([2])), 2)
    with pytest.raises(TypeError, match="Expected a kernel of GPyTorch, but got Linear"):
        ConvolvedGP(torch.rand(3, 2), own_kernel=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"one batch dimension, .* but got batch shapes \[\(2,\), \(\)\]"):
        Coregionalisation([k.RBFKernel(batch_shape=Size([2])), k.RBFKernel()], 2)
    with pytest.raises(ValueError, match=r"inputs \(\.\.\., 2\) .* ard_num_dims"):
        ConvolvedGP(torch.rand(3, 2), Coregionalisation(k.RBFKernel(ard_num_dims=3), 2))


def test_what_lengthscales_start_from() -> None:
    """Those that nobody has set suit the inputs, a different one for each latent process; the others stay."""
    w = 10 * torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.5, 1.0], [1.0, 1.0]], dtype=DTYPE)
    mine = k.RBFKernel()
    mine.lengthscale = 7.0
    frozen, narrow = k.RBFKernel(), k.RBFKernel(lengthscale_constraint=gpytorch.constraints.Interval(0.01, 0.1))
    frozen.raw_lengthscale.requires_grad_(False)
    scaled, column = k.ScaleKernel(k.RBFKernel(ard_num_dims=2)), k.MaternKernel(1.5, active_dims=(1,))
    gp = ConvolvedGP(w, Coregionalisation([mine, frozen, narrow, scaled, column], 2))
    root = 2**0.5
    expected = [[7.0], [frozen.lengthscale.item()], [0.055], [8 * root, 8 * root], [16 * root]]
    found = [getattr(part, "base_kernel", part).lengthscale for part in gp.kernel.kernel.kernels]
    assert [value.flatten().tolist() for value in found] == [pytest.approx(value) for value in expected]
    both = k.ScaleKernel(k.RBFKernel(batch_shape=Size([2])) + k.RQKernel(), batch_shape=Size([2]))
    ConvolvedGP(w, Coregionalisation(both, 2))
    first, second = (part.lengthscale.flatten().tolist() for part in both.base_kernel.kernels)
    assert first == pytest.approx([root, 2 * root])
    assert second == pytest.approx([root])
