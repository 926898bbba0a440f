"""What runs on a device: rounds of algorithms, solvers and wrappers, and parts of the package beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gpytorch
import lightning as L
import torch
from test_conformance import ALGORITHMS, ROBUST_RULES, population, start
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random, tree, vfl
from fedtorch.models import encoders, gaussian_process, hierarchical
from fedtorch.models.gibbs import deviations, directed, global_priors, graphical, imputation, logistic, sparse, splines
from fedtorch.networks import clustering, discrepancy, learning, solvers
from fedtorch.networks.solvers import admm, primal_dual, proximal_averaging
from fedtorch.tree import Tree
from fedtorch.trust import privacy, robust
from fedtorch.vfl.model import likelihoods
from support import splits, verticals
from support.oracles.closed_forms import NUMBERS, linear, linear_clients, sgd
from support.small_federations import Classifier, classes


class Rounds(NamedTuple):
    """Rounds of an algorithm over clients in this process, in the dtype of `NUMBERS`."""

    algorithm: Callable[[], ft.Algorithm]
    data: Callable[[], Any] = lambda: linear_clients([5, 9, 4, 7, 6, 8])
    parameters: Callable[[ft.Algorithm], Tree] = lambda algorithm: None
    chunk: int | None = None

    def run(self, device: str) -> ft.Run:
        """A run that has not begun."""
        algorithm = self.algorithm()
        clients = ft.InProcess(self.data(), chunk=self.chunk, device=device)
        return ft.Run(algorithm, clients, self.parameters(algorithm), seed=2)


def classifier(**arguments: Any) -> ft.LocalSolver:
    """A Lightning module with dropout, a metric, logs and a schedule."""
    return ft.gradient_descent(Classifier().to(NUMBERS.get()), epochs=1, **arguments)


def perceptron() -> nn.Module:
    """A network with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(NUMBERS.get())


class Plain(L.LightningModule):
    """A classifier that draws nothing: a device has draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=NUMBERS.get())
        nn.init.zeros_(self.layer.weight), nn.init.zeros_(self.layer.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def sites() -> ft.data.FederatedData:
    """Clients of the classifiers."""
    return classes(dtype=NUMBERS.get())


def loaders() -> Any:
    """Clients' own loaders."""
    sets = [torch.utils.data.TensorDataset(*rows) for rows in sites()]
    return ft.data.from_loaders(
        {str(k): torch.utils.data.DataLoader(one, batch_size=4, shuffle=True) for k, one in enumerate(sets)}
    )


class Items(torch.utils.data.Dataset):
    """Items that are made when they are asked for."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([1.0, item / 20, -1.0], dtype=NUMBERS.get())
        return x, 1 + x.sum()


def counts(family: str) -> ft.data.FederatedData:
    """Responses of a family, for three columns."""
    made = []
    for k, (x, _) in enumerate(linear_clients([12, 20, 15])):
        uniform = random.uniform(random.key(k), (len(x),), torch.float64)
        y = {"logistic": (uniform < 0.5), "poisson": (uniform * 4).floor(), "cumulative": (uniform * 3).floor()}[family]
        made.append((x, y.to(NUMBERS.get())))
    return ft.data.from_tensors(made)


def units(count: int = 3, columns: int = 1) -> ft.data.FederatedData:
    """Units of a Gaussian process; the second column has codes of three levels."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    codes = torch.arange(12, dtype=torch.float64)[:, None] % 3
    inputs = torch.cat([x, codes], 1)[:, :columns].to(NUMBERS.get())
    return ft.data.from_tensors([(inputs, (4 * x[:, 0] + k).sin().to(NUMBERS.get())) for k in range(count)])


def process(columns: int = 1, steps: int = 2, **arguments: Any) -> ft.Algorithm:
    """A multi-output Gaussian process with parts of the user's choice."""
    inducing = next(iter(units(1, columns)))[0][::3]
    exact = arguments.pop("exact_units", False)
    model = gaussian_process.ConvolvedGP(inducing, **arguments).to(NUMBERS.get())
    return ft.fedmgp(model, steps=steps, exact_units=exact, accept_disclosure=True)


def deep(**arguments: Any) -> ft.Algorithm:
    """A deep Gaussian process of units that share a warp."""
    module = gaussian_process.DeepGP(next(iter(units(1)))[0][::3], 36, draws=3, **arguments)
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.1)
    local = ft.gradient_descent(module, steps=3, loss=gaussian_process.DeepGP.loss, optimizer=adam, reset="never")
    return ft.personal_layers(local, gaussian_process.DeepGP.own)


def mixed_units() -> ft.data.FederatedData:
    """Units with outputs of two likelihoods."""
    made = []
    for k, (x, y) in enumerate(units()):
        labels = torch.full((len(y),), k % 2, dtype=torch.int64)
        made.append((x, (y > 0).to(y.dtype) if k % 2 else y, labels))
    return ft.data.from_tensors(made)


def example_noise(module: nn.Module, **arguments: Any) -> ft.LocalSolver:
    """Gradients with noise of examples."""
    return privacy.example_level(
        module,
        clip=1.0,
        noise=2.0,
        sampling_rate=0.3,
        steps=2,
        delta=1e-3,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **SEEDED,
        **arguments,
    )


def columns() -> ft.data.FederatedData:
    """Responses as a column."""
    return linear_clients([5, 9, 4, 7]).map(lambda rows: (rows[0], rows[1].reshape(-1, 1)))


def gibbs(local: Any, shared: Any, **options: Any) -> Rounds:
    """A sampler of three coefficients, or of what is said."""
    made = lambda: ft.gibbs(local(), shared(), sweeps=2, chains=2)
    begin = options.pop("begin", lambda: torch.full((3,), 0.5, dtype=torch.float64))
    return Rounds(made, parameters=lambda algorithm: begin(), **options)


def of_solver(make: Callable[[], ft.LocalSolver], data: Callable[[], Any] = sites, **options: Any) -> Rounds:
    """Averaging by a solver."""
    return Rounds(lambda: ft.fedavg(make()), data, **options)


def wrapped(wrapper: Callable[[], Any]) -> Rounds:
    """Averaging in a wrapper."""
    return Rounds(lambda: ft.fedavg(sgd(0.1, steps=2)) | wrapper())


def spline_rows() -> ft.data.FederatedData:
    """Spline bases of two covariates."""
    x = 2 * random.uniform(random.key(0), (3, 30, 2), torch.float64) - 1
    return ft.data.from_tensors([(splines.b_splines(rows, lower=-1.0, pieces=2)[0], rows[:, 0] ** 2) for rows in x])


def missing_rows() -> ft.data.FederatedData:
    """Rows without some of their values."""
    made = []
    for x, y in linear_clients([12, 20, 15]):
        x = x.clone()
        x[::2, 0] = torch.nan
        made.append((x, y))
    return imputation.incomplete(made)


def regressors_only() -> ft.data.FederatedData:
    return linear_clients([12, 20, 15]).map(lambda rows: rows[0])


RING = ft.Network.ring(6)
SEEDED = {"entropy": privacy.from_seed(0)}
NORMAL = imputation.Normal(torch.zeros(4).double(), torch.eye(4).double())
SOLVERS = {
    "gradient_descent": of_solver(lambda: classifier(batch_size=4)),
    "gradient_descent, one by one": of_solver(lambda: classifier(batch_size=4, batched=False)),
    "gradient_descent, stacked": of_solver(lambda: classifier(batch_size=4, batched=True)),
    "gradient_descent, kept moments": of_solver(lambda: classifier(batch_size=4, reset="never")),
    "gradient_descent, plain": of_solver(lambda: sgd(0.1, epochs=1, batch_size=3), lambda: linear_clients([5, 9, 4])),
    "gradient_descent, compiled": of_solver(
        lambda: sgd(0.1, perceptron(), steps=2, compile=True), lambda: linear_clients([5, 9, 4, 7])
    ),
    "gradient_descent, loaders": of_solver(classifier, loaders),
    "least_squares": of_solver(lambda: ft.least_squares(linear()), lambda: linear_clients([5, 9, 4])),
    "least_squares, steps": of_solver(
        lambda: ft.least_squares(linear(), steps=3, lr=0.1), lambda: linear_clients([5, 9, 4])
    ),
    "least_squares, logistic": of_solver(
        lambda: ft.least_squares(linear(), steps=3, family="logistic"), lambda: counts("logistic")
    ),
    "lightning_fit": of_solver(lambda: ft.lightning_fit(Plain(), max_epochs=1, batch_size=4)),
    "lightning_fit, loaders": of_solver(lambda: ft.lightning_fit(Plain(), max_epochs=1), loaders),
    "lazy_loading": of_solver(
        lambda: ft.lazy_loading(ft.least_squares(linear()), Items()),
        lambda: ft.data.partition(Items(), ft.data.iid(), clients=4),
    ),
}
CHUNKED = {f"{name}, chunks of one": rounds._replace(chunk=1) for name, rounds in SOLVERS.items()}
WRAPPERS = {
    **{f"robust {name}": wrapped(lambda rule=rule: robust.rule(rule)) for name, rule in ROBUST_RULES.items()},
    "noise at clients": wrapped(lambda: privacy.local_level(clip=1.0, noise=2.0, delta=1e-3, **SEEDED)),
    "noise of clients": wrapped(lambda: privacy.client_level(clip=1.0, noise=2.0, delta=1e-3, **SEEDED)),
    "noise of examples": of_solver(lambda: example_noise(perceptron()), columns),
}
MODELS = {
    "logistic ep": Rounds(
        lambda: ft.ep(hierarchical.generalised.logistic(hierarchical.normal(3, random=[0]))), lambda: counts("logistic")
    ),
    "Poisson ep": Rounds(
        lambda: ft.ep(hierarchical.generalised.poisson(hierarchical.normal(3, random=[0]))), lambda: counts("poisson")
    ),
    "fedmgp, coregionalisation": Rounds(
        lambda: process(kernel=[gpytorch.kernels.RBFKernel(), gpytorch.kernels.MaternKernel(1.5)]), units
    ),
    "fedmgp, exact units": Rounds(lambda: process(exact_units=True, mean=True), units),
    "fedmgp, own processes": Rounds(lambda: process(own_kernel=gpytorch.kernels.RBFKernel()), units),
    "fedmgp, categories": Rounds(
        lambda: process(columns=2, features=gaussian_process.EmbedCategories(2, {1: 3})), lambda: units(columns=2)
    ),
    "fedmgp, learnt places": Rounds(lambda: process(learn_inducing=True, latents=2), units),
    "fedmgp, two likelihoods": Rounds(
        lambda: process(
            likelihood=gaussian_process.MixedLikelihood(
                [gpytorch.likelihoods.GaussianLikelihood(), gpytorch.likelihoods.BernoulliLikelihood()]
            )
        ),
        mixed_units,
    ),
    "DeepGP": Rounds(deep, units),
    "DeepGP, three layers": Rounds(lambda: deep(layers=3), units),
    "gtv, norms": Rounds(
        lambda: ft.gtv(ft.least_squares(linear(bias=False)), RING, 0.5, penalty=solvers.norm2),
        lambda: linear_clients([5, 9, 4, 7, 6, 8]),
    ),
    "gtv, exact": Rounds(lambda: ft.gtv(ft.least_squares(linear()), RING, 0.5)),
    "gtv, unreliable edges": Rounds(
        lambda: ft.gtv(ft.least_squares(linear()), RING, 0.5) | ft.unreliable_edges(RING, loss=0.3, delay=2)
    ),
    "gibbs, logistic": gibbs(logistic.logistic_regression, sparse.hierarchy, data=lambda: counts("logistic")),
    "gibbs, laplace": gibbs(lambda: sparse.regression(deviation=deviations.laplace()), sparse.hierarchy),
    "gibbs, normal": gibbs(
        lambda: sparse.regression(deviation=deviations.normal(), intercept=True),
        lambda: sparse.hierarchy(global_priors.regularised_horseshoe(), noise_prior=(1.0, 1.0)),
    ),
    "gibbs, lasso": gibbs(sparse.regression, lambda: sparse.hierarchy(global_priors.bayesian_lasso(), scale=1.0)),
    "gibbs, groups": gibbs(
        lambda: sparse.regression(intercept=True),
        lambda: sparse.hierarchy(global_priors.spike_and_slab(groups=torch.arange(8) // 4)),
        data=spline_rows,
        begin=lambda: torch.zeros(8, dtype=torch.float64),
    ),
    "gibbs, graphical": gibbs(
        graphical.neighbourhoods,
        lambda: graphical.every_response(sparse.hierarchy()),
        data=regressors_only,
        begin=lambda: graphical.start(3),
    ),
    "gibbs, directed": gibbs(
        directed.regression, sparse.hierarchy, data=regressors_only, begin=lambda: graphical.start(3)
    ),
    "gibbs, imputing": gibbs(
        lambda: imputation.imputing(sparse.regression(), NORMAL), sparse.hierarchy, data=missing_rows
    ),
}
ROUNDS: dict[str, Rounds] = {
    **{
        name: Rounds(make, lambda name=name: population(name).data, partial(start, name))
        for name, make in ALGORITHMS.items()
    },
    **SOLVERS,
    **WRAPPERS,
    **MODELS,
    **CHUNKED,
}

Case = Callable[[str], Tree]


def summarised(device: str) -> Tree:
    """The summary of expectation propagation of a generalised model."""
    run = ROUNDS["logistic ep"].run(device)
    for _ in range(4):
        run.step()
    return torch.tensor(run.summary().select_dtypes("number").to_numpy(dtype=float))


def handed_out(which: str, device: str) -> Tree:
    """What a module that a run hands out predicts on a device."""
    run = ROUNDS["fedavg"].run(device)
    run.step()
    module = run.client_module(0) if which == "client" else run.global_module()
    rows = next(iter(linear_clients([5])))[0].to(device)
    return module.to(device)(rows).detach().cpu()


def split(name: str, device: str) -> Tree:
    """The parameters of a split network after three steps."""
    model, rows = splits.CASES[name]().to(device), splits.data().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        model.train().losses(rows, step).sum().backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def split_by_trainer(device: str) -> Tree:
    """The parameters of a split network that a Trainer has trained in minibatches, with early stopping."""
    from support.pretended_accelerator import FarAccelerator
    from support.small_federations import trainer

    model = splits.network()
    train = vfl.VerticalLoader(splits.data(), batch_size=5)
    check = vfl.VerticalLoader(splits.data())
    given = {} if device == "cpu" else {"accelerator": FarAccelerator(), "devices": 1}
    stopping = vfl.StackedEarlyStopping(patience=5)
    trainer(max_epochs=2, callbacks=[stopping], num_sanity_val_steps=0, **given).fit(model, train, check)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def vertical(device: str) -> Tree:
    """A variational posterior of a vertical model after a few steps."""
    data = verticals.gaussian_data([3], 30).to(device)
    model = vfl.augmented(likelihoods.gaussian(verticals.SD), verticals.predictors([3]), torch.tensor((0.5, 1.0)))
    guide = vfl.Guide(vfl.sums(encoders.affine(), skewed=False), joint=True)
    # Adam takes whole steps along gradients that are zero but for rounding, so that parameters themselves differ.
    fit = vfl.sfvi(model, guide, data, steps=2, draws=2, size=2)
    return tree.to((fit.bounds, fit.moments()), "cpu")


def fitted(device: str, **arguments: Any) -> Tree:
    """A Gaussian process of two units that is fitted in one place, and one that joins."""
    x = torch.linspace(0, 1, 10, dtype=torch.float64)[None, :, None].expand(2, -1, -1).to(device)
    y = torch.stack([(6 * x[0, :, 0]).sin(), (5 * x[0, :, 0]).cos()])
    model = gaussian_process.ConvolvedGP(x[0, ::2], batch_shape=torch.Size([2])).to(device)
    bound = gaussian_process.fit(model, x, y, iterations=3, **arguments)
    return tree.to((bound.detach(), model(x).mean.detach(), model.predict(x).mean.detach()), "cpu")


def joined(device: str) -> Tree:
    """A unit that joins."""
    x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None].to(device)
    wave, model = (6 * x[:, 0]).sin(), gaussian_process.ConvolvedGP(x[::2]).to(device)
    model.start(wave)
    model.condition(x, wave)
    return gaussian_process.join(model, x[:3], -wave[:3])(x).mean.detach().cpu()


def modular(device: str) -> Tree:
    """A Gaussian process of modules that units have trained alone."""
    z = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None].expand(2, -1, -1).to(device)
    curves = torch.stack([(6 * z[0, :, 0]).sin(), -2 * (6 * z[0, :, 0]).sin()])
    sure = 1e4 * torch.eye(8, dtype=torch.float64, device=device).expand(2, -1, -1)
    model = gaussian_process.ConvolvedGP(z[0], batch_shape=torch.Size([2])).to(device)
    model.start(curves)
    modules = sure, 1e4 * curves, torch.zeros(2, dtype=torch.float64, device=device)
    bound = gaussian_process.fit_modules(model, z, modules, iterations=3)
    return tree.to((bound, model(z).mean.detach()), "cpu")


def nodes(device: str) -> ft.data.FederatedData:
    """Nodes' rows on a device."""
    return linear_clients([5, 9, 4, 7, 6, 8]).to(device)


def solved(solver: Callable[..., Any], device: str, **arguments: Any) -> Tree:
    """GTV minimisation by a solver of networks."""
    problem = solvers.linear_problem(nodes(device), RING, alpha=0.5)
    return solver(problem, **arguments).parameters.cpu()


CASES: dict[str, Case] = {
    "the summary of ep": summarised,
    "a client's module": partial(handed_out, "client"),
    "the global module": partial(handed_out, "global"),
    **{f"split network, {name}": partial(split, name) for name in splits.CASES},
    "split network, by a Trainer": split_by_trainer,
    "a vertical model": vertical,
    "a Gaussian process in one place": fitted,
    "a Gaussian process in one place, exact units": partial(fitted, exact_units=True),
    "a unit that joins": joined,
    "modules of Gaussian processes": modular,
    **{
        f"network, {name}": partial(solved, getattr(solvers, name))
        for name in ("chebyshev", "conjugate_gradient", "direct", "fedgd", "fedrelax")
    },
    "network, ADMM": partial(solved, admm.admm),
    "network, primal-dual": partial(solved, partial(primal_dual.primal_dual, penalty=solvers.norm2), rounds=200),
    "network, proximal averaging": partial(solved, proximal_averaging.proximal_averaging),
    "network, a robust loss": lambda device: solvers.robust_loss(nodes(device), RING, 0.5, rounds=40).parameters.cpu(),
    "network, what a diagnosis says": lambda device: torch.tensor(
        ft.networks.diagnose(solvers.linear_problem(nodes(device), RING, alpha=0.5)).condition
    ),
    "network, discrepancies": lambda device: tree.to(
        (
            discrepancy.distances(discrepancy.mean_label(nodes(device))),
            discrepancy.maximum_likelihood(nodes(device)),
            discrepancy.pooled_gradient(nodes(device)),
            discrepancy.autoencoder_code(nodes(device), seed=0, code=1, hidden=0, iterations=20),
            discrepancy.gaussian_mixture(nodes(device)),
        ),
        "cpu",
    ),
    "network, learnt and clustered": lambda device: (
        learning.nearest(discrepancy.distances(discrepancy.maximum_likelihood(nodes(device))), 2).weights,
        clustering.k_means(discrepancy.maximum_likelihood(nodes(device)), 2, seed=0),
        clustering.tied(RING, discrepancy.maximum_likelihood(nodes(device))),
    ),
}
QUICK = {
    *ALGORITHMS.keys() - {"without_server"},
    "gradient_descent",
    "gradient_descent, plain",
    "least_squares",
    "least_squares, logistic",
    "lazy_loading",
    "robust bulyan",
    "robust geometric_median",
    "robust median",
    "noise of clients",
    "gtv, exact",
    "gtv, norms",
}
SPLIT = {f"split network, {name}" for name in splits.CASES}
SLOW = (ROUNDS.keys() | SPLIT | {"the summary of ep"}) - QUICK - {"split network, plain", "split network, sums"}
