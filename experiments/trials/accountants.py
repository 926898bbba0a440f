"""Published ε of DP-SGD and DP-FTRL, by our accountants and those of other libraries.

Rounds with Poisson sampling: the table of TensorFlow Privacy's MNIST tutorial (60 000 examples, batches of 256, 234
steps an epoch, δ = 1e-5), by Rényi divergences and the conversion of Mironov (2017). DP-FTRL: a language model of
Spanish Gboard, by trees without restarts: 2000 rounds, noise 7, a device in at most 6 rounds with 313 others between
them, δ = 1e-10. Its tree is one Gaussian release of the squared sensitivity that a search over all such rounds finds
here.

Each published figure is compared with our Rényi account, by both conversions, our privacy-loss distributions, and,
where they are installed, `opacus`, `autodp` and `prv_accountant` besides `dp_accounting`
(`pip install opacus autodp prv_accountant`; one that is missing is left out). A smaller ε is a tighter account of the
same rounds.

Figures that stand alone (`ALONE`) are compared with the account of ours that the library had when it printed them: the
tutorial's later table, Opacus's MNIST example, its tutorial of two processes (ε after each of ten epochs), and the ε of
Gboard's later models, from the zCDP that is printed of them (their matrices are not at hand).

Left out: the tables of McMahan et al. (2018) and Kairouz et al. (2021). Neither paper's text was at hand, and neither
github.com/google-research/DP-FTRL (commit 513500a) nor the two repositories below print a figure of these tables;
github.com/microsoft/prv_accountant (a844f72) and apple/pfl-research (c9d1f32) print settings, but no ε of them.
Opacus's CIFAR-10 tutorial prints ε at steps that its minibatches of memory determine, which cannot be redone.

Sources: github.com/tensorflow/privacy, `tutorials/README.md`, commits 047e1eef and 03035d5 (the later table);
github.com/pytorch/opacus, commit 4d0ebc84, `examples/mnist_README.md` and `tutorials/ddp_tutorial.ipynb`;
github.com/google-research/federated, commit 29cf01e1, `dp_ftrl/blogpost_supplemental_privacy_accounting.ipynb`, by
appendix D.2 of Kairouz et al. (2021), "Practical and private (deep) learning without sampling or shuffling", and commit
a5af8c4, `mf_dpftrl_matrices/`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np

from experiments import common, result_pages
from fedtorch.trust import privacy

READING = result_pages.Reading(
    smaller="ε",
    reasons=(
        result_pages.Reason(
            "^tutorial(?!.*Mironov)",
            "the tutorial's ε comes from the conversion of Mironov (2017), as the rows of that conversion show; all of "
            "today's accounts are tighter",
            True,
        ),
        result_pages.Reason(
            "^Gboard.*(distributions|variables|bound)",
            "an account of the Gaussian release itself, tighter than by its Rényi divergences",
            True,
        ),
        result_pages.Reason(
            "^tutorial, noise 0.6, .*Mironov",
            "of the tutorial's orders, a tenth apart, the best is 2.9 with 9.747; the least over all orders, 9.745, is "
            "what is printed",
        ),
        result_pages.Reason("^Gboard.*Mironov", "Gboard's ε comes from the later conversion, as the other rows show"),
    ),
)


class Released(NamedTuple):
    """Rounds of a Gaussian sum, and the ε that is published of them."""

    noise: float
    sampling_rate: float
    rounds: int
    delta: float
    published: float


def of_mnist(noise: float, epochs: int, published: float) -> Released:
    """A line of the tutorial's table."""
    return Released(noise, 256 / 60_000, epochs * (60_000 // 256), 1e-5, published)


TUTORIAL = {
    "tutorial, noise 1.12, 1 epoch": of_mnist(1.12, 1, 1.00),
    "tutorial, noise 1.12, 2 epochs": of_mnist(1.12, 2, 1.04),
    "tutorial, noise 1.12, 60 epochs": of_mnist(1.12, 60, 2.92),
    "tutorial, noise 0.6, 30 epochs": of_mnist(0.6, 30, 9.74),
    "tutorial, noise 1.2, 10 epochs": of_mnist(1.2, 10, 1.20),
}
GBOARD = "Gboard, DP-FTRL"
Account = Callable[[Released], float]
FORMER, LATER = "fedtorch, Rényi, converted as by Mironov", "fedtorch, Rényi"
TIGHT = "fedtorch, privacy-loss distributions"


def of_opacus(noise: float, batches: int, epochs: int, published: float) -> Released:
    """Of so many batches an epoch, each of which has a row with the probability of one in so many."""
    return Released(noise, 1 / batches, epochs * batches, 1e-5, published)


def of_zcdp(rho: float, published: float) -> Released:
    """A release of ρ-zCDP, as one Gaussian sum."""
    return Released((2 * rho) ** -0.5, 1.0, 1, 1e-10, published)


DDP = (0.87, 0.91, 0.96, 1.00, 1.03, 1.07, 1.11, 1.14, 1.18, 1.21)  # after each epoch
ALONE = {  # by the account that each library had when it printed them
    FORMER: {
        "tutorial of 2019, noise 1.1, 1 epoch": of_mnist(1.1, 1, 1.03),
        "tutorial of 2019, noise 1.1, 2 epochs": of_mnist(1.1, 2, 1.11),
        "tutorial of 2019, noise 1.1, 60 epochs": of_mnist(1.1, 60, 3.01),
        "tutorial of 2019, noise 1.3, 15 epochs": of_mnist(1.3, 15, 1.19),
        "tutorial of 2019, noise 0.7, 45 epochs": of_mnist(0.7, 45, 7.10),
        "Opacus, MNIST, noise 1.3, 1 epoch": of_opacus(1.3, 250, 1, 0.71),
        "Opacus, MNIST, noise 1.3, 15 epochs": of_opacus(1.3, 250, 15, 1.16),
        "Opacus, MNIST, noise 1.1, 60 epochs": of_opacus(1.1, 250, 60, 2.91),
        "Opacus, MNIST, noise 0.7, 45 epochs": of_opacus(0.7, 250, 45, 6.86),
    },
    LATER: {
        **{f"Opacus, two processes, epoch {epoch}": of_opacus(1.0, 300, epoch, e) for epoch, e in enumerate(DDP, 1)},
    },
    TIGHT: {
        "Gboard es-ES, MF-DP-FTRL": of_zcdp(0.1506840301548885, 3.424007),
        "Gboard pt-BR and es-US, MF-DP-FTRL": of_zcdp(0.014342572340349278, 0.993550),
    },
}


def joined(left: Sequence[np.ndarray], right: Sequence[np.ndarray], whole: bool) -> list[np.ndarray]:
    """The best values of two blocks of rounds beside each other; `whole` if a node of the tree covers both."""
    made = []
    for count in range(len(left)):
        best = np.full_like(left[0], -np.inf)
        for later in range(count + 1):
            a, b = left[count - later], right[later]
            if np.isfinite(a).any() and np.isfinite(b).any():
                for between in range(len(best)):
                    np.maximum(best, a[:, between, None] + b[between], out=best)
        made.append(best + whole * count**2)
    return made


def squared_sensitivity(rounds: int, most: int, separation: int) -> int:
    """The most that a device adds to the squared norm of a tree's sums.

    A block of rounds has a matrix for each number of the device's turns in it: by the rounds in front in which it may
    not have one, and those behind.

    Args:
        rounds: leaves of the tree, which is a forest of complete ones unless they are a power of two.
        most: turns of the device.
        separation: rounds between two of its turns, at least.
    """
    gap = separation + 1
    front, behind = np.ogrid[:gap, :gap]
    none = np.where(front <= 1 + behind, 0.0, -np.inf)
    one = np.where(front + gap <= 1 + behind, 1.0, -np.inf)
    block = [none, one, *(np.full((gap, gap), -np.inf) for _ in range(most - 1))]
    forest: list[np.ndarray] | None = None
    for level in range(rounds.bit_length()):
        if rounds >> level & 1:  # larger blocks come first
            forest = block if forest is None else joined(block, forest, False)
        if rounds >> level > 1:
            block = joined(block, block, True)
    assert forest is not None
    return int(max(values[0, separation] for values in forest))


def opacus(name: str) -> Account:
    """One of Opacus's accountants."""
    from opacus.accountants import create_accountant

    def account(of: Released) -> float:
        accountant = create_accountant(name)
        accountant.history = [(of.noise, of.sampling_rate, of.rounds)]
        return float(accountant.get_epsilon(of.delta))

    return account


def autodp() -> Account:
    """autodp's Rényi account."""
    from autodp.mechanism_zoo import GaussianMechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    def account(of: Released) -> float:
        release = GaussianMechanism(of.noise)
        if of.sampling_rate < 1:
            release.neighboring = "add_remove"
            release = AmplificationBySampling(PoissonSampling=True)(release, of.sampling_rate, improved_bound_flag=True)
        return float(Composition()([release], [of.rounds]).get_approxDP(of.delta))

    return account


def prv() -> Account:
    """The upper bound of Microsoft's accountant."""
    from prv_accountant.dpsgd import DPSGDAccountant

    def account(of: Released) -> float:
        accountant = DPSGDAccountant(
            noise_multiplier=of.noise,
            sampling_probability=of.sampling_rate,
            max_steps=of.rounds,
            eps_error=0.01,
            delta_error=of.delta / 1000,
        )
        return float(accountant.compute_epsilon(delta=of.delta, num_steps=of.rounds)[2])

    return account


def google(kind: type[dp_accounting.PrivacyAccountant]) -> Account:
    """One of dp-accounting's."""

    def account(of: Released) -> float:
        event = dp_accounting.GaussianDpEvent(of.noise)
        if of.sampling_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(of.sampling_rate, event)
        return float(kind().compose(event, of.rounds).get_epsilon(of.delta))

    return account


OTHERS: dict[str, Callable[[], Account]] = {
    "Opacus, Rényi": lambda: opacus("rdp"),
    "Opacus, privacy random variables": lambda: opacus("prv"),
    "autodp, Rényi": autodp,
    "prv_accountant, upper bound": prv,
    "dp-accounting, Rényi": lambda: google(dp_accounting.rdp.RdpAccountant),
    "dp-accounting, privacy-loss distributions": lambda: google(dp_accounting.pld.PLDAccountant),
}


def ours(of: Released) -> float:
    """What `privacy.epsilon` says."""
    return privacy.epsilon(noise=of.noise, sampling_rate=of.sampling_rate, rounds=of.rounds, delta=of.delta)


def renyi(of: Released) -> float:
    """Our account by Rényi divergences."""
    return privacy.renyi_epsilon(of.noise, of.delta, of.rounds, of.sampling_rate)


ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64))  # of TensorFlow Privacy


def former(of: Released, orders: Sequence[float] = ORDERS) -> float:
    """The same by the conversion of Mironov (2017), Proposition 3."""
    divergences = [(order, of.rounds * privacy.renyi_divergence(of.noise, of.sampling_rate, order)) for order in orders]
    return min(divergence - math.log(of.delta) / (order - 1) for order, divergence in divergences)


def accountants(smoke: bool) -> dict[str, Account]:
    """Ours, and the others that are installed."""
    made: dict[str, Account] = {
        FORMER: former,
        LATER: renyi,
        TIGHT: ours,
    }
    for name, build in OTHERS.items():
        if smoke and not name.startswith("dp-accounting, R"):
            continue
        try:
            made[name] = build()
        except ImportError as error:
            sys.stderr.write(f"{name} is left out: {error}\n")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """One row for each published ε and accountant; with --smoke the tutorial's and ours only."""
    options = common.arguments(__doc__).parse_args(argv)
    settings, rows = dict(TUTORIAL), []
    if not options.smoke:
        squared = squared_sensitivity(2000, 6, 313)
        rows.append(common.Row(GBOARD, "zCDP", squared / (2 * 7.0**2), published=0.81, decimals=2))
        settings[GBOARD] = Released(7.0 / squared**0.5, 1.0, 1, 1e-10, 8.90)
    for name, account in accountants(options.smoke).items():
        for setting, released in settings.items():
            row = common.Row(setting, f"ε, {name}", account(released), published=released.published, decimals=2)
            rows.append(row)
    for name, alone in ALONE.items():
        account, digits = {FORMER: former, LATER: renyi, TIGHT: ours}[name], 6 if name == TIGHT else 2
        for setting, released in alone.items():
            row = common.Row(setting, f"ε, {name}", account(released), published=released.published, decimals=digits)
            rows.append(row)
    common.show_rows("Published ε", rows)
    common.finish("trials.accountants", rows, options)


if __name__ == "__main__":
    main()
