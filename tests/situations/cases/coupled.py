"""Losses and modules whose rows are coupled: a batch's loss is not the mean of its rows' losses."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, adam, labelled, mlp, net, sgd, step

# Losses of (output (n, 1), target (n, 1)).


def rare_weights(p: Tensor, t: Tensor) -> Tensor:
    """The mean weighted by thirty where the target is large, as of rare positives."""
    w = 1 + 29 * (t > 1)
    return ((p - t).square() * w).sum() / w.sum()


def missing_targets(p: Tensor, t: Tensor) -> Tensor:
    """The mean over the targets that are there."""
    there = t < 2
    return ((p - t).square() * there).sum() / there.sum().clamp(min=1)


def flooding(p: Tensor, t: Tensor) -> Tensor:
    return (F.mse_loss(p, t) - 0.4).abs() + 0.4


def bounded(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t).clamp(max=5.0)


def self_normalised(p: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(p, t)
    return loss / loss.detach()


def dice_estimator(p: Tensor, t: Tensor) -> Tensor:
    """DiCE with the batch's mean reward as a baseline."""
    log_prob = F.logsigmoid(p)
    return -(torch.exp(log_prob - log_prob.detach()) * (t - t.mean())).mean()


def root(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t).sqrt()


def logged(p: Tensor, t: Tensor) -> Tensor:
    return (F.mse_loss(p, t) + 1).log()


def tilted(p: Tensor, t: Tensor) -> Tensor:
    return torch.logsumexp((p - t).square().flatten(), 0) - torch.tensor(float(len(p))).log()


def relative(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).norm() / t.norm()


def ratio_of_sums(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).abs().sum() / t.abs().sum()


def unexplained(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).square().sum() / (t - t.mean()).square().sum()


def by_hand_sum(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t) * len(p)


def by_length(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t) * (1.0 if len(p) > 5 else 0.5)


def worst(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).square().max()


def hardest(p: Tensor, t: Tensor) -> Tensor:
    """Online mining of hard examples: the mean of the worst half."""
    return (p - t).square().flatten().topk((len(p) + 1) // 2).values.mean()


def easiest(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).square().flatten().sort().values[: max(1, len(p) // 2)].mean()


def median(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).abs().median()


def quantile(p: Tensor, t: Tensor) -> Tensor:
    return torch.quantile((p - t).square().flatten(), 0.7)


def value_at_risk(p: Tensor, t: Tensor) -> Tensor:
    errors = (p - t).square().flatten()
    return errors[errors >= errors.detach().mean()].mean()


def robust(p: Tensor, t: Tensor) -> Tensor:
    """Huber's loss whose bound is the batch's median error."""
    errors = (p - t).abs()
    bound = errors.detach().median()
    return torch.where(errors < bound, 0.5 * errors.square(), bound * (errors - 0.5 * bound)).mean()


def correlation(p: Tensor, t: Tensor) -> Tensor:
    p, t = p - p.mean(), t - t.mean()
    return 1 - (p * t).sum() / (p.norm() * t.norm() + 1e-6)


def concordance(p: Tensor, t: Tensor) -> Tensor:
    """One minus Lin's concordance correlation."""
    covariance = ((p - p.mean()) * (t - t.mean())).mean()
    return 1 - 2 * covariance / (p.var(correction=0) + t.var(correction=0) + (p.mean() - t.mean()).square())


def pairwise(p: Tensor, t: Tensor) -> Tensor:
    """Logistic ranking of all pairs."""
    n = len(p)
    margins, signs = p.expand(n, n) - p.t().expand(n, n), (t - t.t()).sign()
    return F.softplus(-margins * signs).mean()


def listwise(p: Tensor, t: Tensor) -> Tensor:
    return -(t.flatten().softmax(0) * p.flatten().log_softmax(0)).sum()


def partial_likelihood(p: Tensor, t: Tensor) -> Tensor:
    """Cox' partial likelihood: times are the targets, and those above zero are events."""
    order = t.flatten().argsort(descending=True)
    risk = p.flatten()[order]
    event = (t.flatten()[order] > 0).to(risk.dtype)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def concordant_pairs(p: Tensor, t: Tensor) -> Tensor:
    """A smooth area under the curve: positives against negatives."""
    positive = (t > 0).to(p.dtype)
    pairs = positive * (1 - positive).t()
    return (torch.sigmoid(-(p - p.t())) * pairs).sum() / pairs.sum().clamp(min=1)


def by_position(p: Tensor, t: Tensor) -> Tensor:
    return ((p - t).square() * torch.linspace(0, 1, len(p), dtype=p.dtype)[:, None]).mean()


def differences(p: Tensor, t: Tensor) -> Tensor:
    """Rows in order of time: errors of increments."""
    return (p.diff(dim=0) - t.diff(dim=0)).square().mean()


def cumulative(p: Tensor, t: Tensor) -> Tensor:
    return (p.cumsum(0) - t.cumsum(0)).square().mean()


def two_groups(p: Tensor, t: Tensor) -> Tensor:
    """The worse of two groups' mean losses."""
    errors, group = (p - t).square(), t > 0
    means = [(errors * g).sum() / g.sum().clamp(min=1) for g in (group, ~group)]
    return torch.stack(means).max()


def soft_groups(p: Tensor, t: Tensor) -> Tensor:
    errors, group = (p - t).square(), t > 0
    means = torch.stack([(errors * g).sum() / g.sum().clamp(min=1) for g in (group, ~group)])
    return (means.detach().softmax(0) * means).sum()


def numpy_scaled(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t) / (1 + float(abs(t.numpy()).mean()))


def item_scaled(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t) / (1 + t.abs().mean().item())


def written_through_a_view(p: Tensor, t: Tensor) -> Tensor:
    w = torch.ones_like(p)
    w[:, 0].add_(29 * (t[:, 0] > 1))
    return ((p - t).square() * (w / w.sum())).sum()


def broadcast(p: Tensor, t: Tensor) -> Tensor:
    return (p - t).square().mean()


def expanded(p: Tensor, t: Tensor) -> Tensor:
    n = len(p)
    return (p.t().expand(n, n).mean(1, keepdim=True) * p - t).square().mean()


# Losses of (embeddings (n, 2), labels (n,)).


def contrastive(p: Tensor, t: Tensor) -> Tensor:
    """NT-Xent of two views, which are the halves of the embedding."""
    first, second = F.normalize(p[:, :2], dim=1), F.normalize(p[:, 2:], dim=1)
    return F.cross_entropy(first @ second.t() / 0.5, torch.arange(len(p)))


def supervised_contrastive(p: Tensor, t: Tensor) -> Tensor:
    z, n = F.normalize(p, dim=1), len(p)
    logits = (z @ z.t()) / 0.5 - 1e9 * torch.eye(n, dtype=p.dtype)
    same = (t[:, None] == t) & ~torch.eye(n, dtype=torch.bool)
    return -(logits.log_softmax(1) * same).sum() / same.sum().clamp(min=1) + 0.1 * p.square().mean()


def hard_triplets(p: Tensor, t: Tensor) -> Tensor:
    """The farthest of the same label against the nearest of another."""
    distance = (p[:, None] - p).square().sum(-1)
    same = t[:, None] == t
    far = (distance * same).amax(1)
    near = (distance + 1e3 * same).amin(1)
    return F.relu(far - near + 5.0).mean()


def all_triplets(p: Tensor, t: Tensor) -> Tensor:
    distance = (p[:, None] - p).square().sum(-1)
    same = t[:, None] == t
    terms = F.relu(distance[:, :, None] - distance[:, None, :] + 1.0) * (same[:, :, None] & ~same[:, None, :])
    return terms.sum() / (terms > 0).sum().clamp(min=1) + 0.1 * p.square().mean()


def barlow(p: Tensor, t: Tensor) -> Tensor:
    first, second = p[:, :2], p[:, 2:]
    first, second = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (first, second))
    c = first.t() @ second / len(p)
    return (c - torch.eye(2, dtype=p.dtype)).square().sum()


def variance_covariance(p: Tensor, t: Tensor) -> Tensor:
    """VICReg's terms of variance and covariance."""
    z = p - p.mean(0)
    covariance = z.t() @ z / max(1, len(p) - 1)
    return F.relu(1 - (z.var(0) + 1e-3).sqrt()).mean() + (covariance - covariance.diag().diag()).square().sum()


def discrepancy(p: Tensor, t: Tensor) -> Tensor:
    """MMD of the embeddings against fixed points."""
    points = torch.linspace(-1, 1, 4 * p.shape[1], dtype=p.dtype).view(4, -1)
    kernel = lambda a, b: torch.exp(-(a[:, None] - b).square().sum(-1) / 2).mean()
    return kernel(p, p) - 2 * kernel(p, points)


def coral(p: Tensor, t: Tensor) -> Tensor:
    return (p.t().cov() - torch.eye(p.shape[1], dtype=p.dtype)).square().sum()


def diversity(p: Tensor, t: Tensor) -> Tensor:
    """Information maximisation: certain for each row, uniform over the batch."""
    q = p.softmax(1)
    mean = q.mean(0)
    return -(q * q.log()).sum(1).mean() + 2 * (mean * mean.log()).sum()


def balance(p: Tensor, t: Tensor) -> Tensor:
    """The load-balancing loss of a mixture of experts."""
    gates = p.softmax(1)
    load = F.one_hot(gates.argmax(1), p.shape[1]).to(p.dtype).mean(0)
    return p.shape[1] * (load * gates.mean(0)).sum()


def soft_dice(p: Tensor, t: Tensor) -> Tensor:
    q, y = p.softmax(1), F.one_hot(t, p.shape[1])
    return 1 - ((2 * (q * y).sum(0) + 1) / (q.sum(0) + y.sum(0) + 1)).mean()


def tversky(p: Tensor, t: Tensor) -> Tensor:
    q, y = p.softmax(1), F.one_hot(t, p.shape[1])
    hit, extra, missed = (q * y).sum(), (q * (1 - y)).sum(), ((1 - q) * y).sum()
    return 1 - (hit + 1) / (hit + 0.7 * extra + 0.3 * missed + 1)


def focal_by_positives(p: Tensor, t: Tensor) -> Tensor:
    """Focal loss divided by the number of positives, as of detectors."""
    terms = F.cross_entropy(p, t, reduction="none")
    return ((1 - (-terms).exp()).square() * terms).sum() / (t > 0).sum().clamp(min=1)


def frequencies(p: Tensor, t: Tensor) -> Tensor:
    """Class weights from the batch's own labels."""
    count = F.one_hot(t, p.shape[1]).sum(0).to(p.dtype)
    return (F.cross_entropy(p, t, reduction="none") / count[t]).sum() / (count > 0).sum()


def mined(p: Tensor, t: Tensor) -> Tensor:
    """OHEM: rows whose loss is above the batch's mean."""
    terms = F.cross_entropy(p, t, reduction="none")
    return (terms * (terms >= terms.detach().mean())).sum() / (terms >= terms.detach().mean()).sum()


def adjusted(p: Tensor, t: Tensor) -> Tensor:
    prior = (F.one_hot(t, p.shape[1]).to(p.dtype).mean(0) + 0.1).log()
    return F.cross_entropy(p + prior, t)


def prototypes(p: Tensor, t: Tensor) -> Tensor:
    """Distances to the batch's class means, as of few-shot learning."""
    y = F.one_hot(t, 3).to(p.dtype)
    means = y.t() @ p / y.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-(p[:, None] - means).square().sum(-1), t)


def unlike_rows(p: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(p, t) + 0.1 * (F.normalize(p, dim=1) @ F.normalize(p, dim=1).t()).mean()


# Modules that mix rows.


class Mix(nn.Module):
    """A perceptron with an operation on its hidden units (n, 6) that sees all rows."""

    def __init__(self, mix: object) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(4, 6), mix, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(torch.tanh(self.first(x))))  # type: ignore[operator]


def mixed(name: str, mix: object, **options: object) -> Case:
    return net(name, lambda: Mix(mix), **options)  # type: ignore[arg-type]


def centred(h: Tensor) -> Tensor:
    n = len(h)
    return (torch.eye(n, dtype=h.dtype) - 1 / n) @ h


def centred_from_the_right(h: Tensor) -> Tensor:
    n = len(h)
    return (h.t() @ (torch.eye(n, dtype=h.dtype) - 1 / n)).t()


def normal_over_rows(h: Tensor) -> Tensor:
    return F.layer_norm(h.t(), h.t().shape[-1:]).t()


def two_views(h: Tensor) -> Tensor:
    return torch.cat([h, h]).view(len(h), 2, 6).softmax(1)[:, 0]


def repeated(h: Tensor) -> Tensor:
    return h.repeat(2, 1).view(len(h), 2, 6).softmax(1)[:, 0]


def time_as_rows(h: Tensor) -> Tensor:
    kernel = torch.tensor([0.25, 0.5, 0.25], dtype=h.dtype).expand(6, 1, 3)
    return F.conv1d(h.t()[None], kernel, padding=1, groups=6)[0].t()


def attention_of_rows(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h)


def neighbours(h: Tensor) -> Tensor:
    """Messages of the nearest other row, as of a graph made of the batch."""
    distance = torch.cdist(h, h) + 1e3 * torch.eye(len(h), dtype=h.dtype)
    return h + h[distance.argmin(1)]


class OverRows(nn.Module):
    """A layer of sequences that takes rows for time, since `batch_first` is not said."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = (
            self.layer(x[:, None], x[:, None], x[:, None])
            if isinstance(self.layer, nn.MultiheadAttention)
            else self.layer(x[:, None])
        )
        return self.last((h[0] if isinstance(h, tuple) else h)[:, 0])


class Standard(nn.Module):
    """Inputs standardised by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - x.mean(0)) / (x.std(0) + 1e-3))


class Centres(nn.Module):
    """Logits with the means of the classes as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = mlp(4, 2), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return -(self.net(x)[:, None] - self.centres).square().sum(-1)


def bayes(s: object, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Negative log-likelihood with a prior's term divided by the batch's length."""
    prior = sum(p.square().sum() for p in s.parameters())  # type: ignore[attr-defined]
    return F.mse_loss(s(batch[0]), batch[1]) + 0.1 * prior / len(batch[0])  # type: ignore[operator]


def mixup(s: object, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(s(0.7 * x + 0.3 * x.flip(0)), 0.7 * y + 0.3 * y.flip(0))  # type: ignore[operator]


def selected(s: object, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    order = torch.arange(len(x)).roll(1)
    return F.mse_loss(s(0.7 * x + 0.3 * x.index_select(0, order)), y)  # type: ignore[operator]


def looked_up(s: object, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(s(0.7 * x + 0.3 * F.embedding(torch.arange(len(x)).roll(1), x)), y)  # type: ignore[operator]


def distilled(s: object, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Similarities of rows as those of the inputs."""
    x, _ = batch
    h = s(x)  # type: ignore[operator]
    return ((h @ h.t()).softmax(1) - (x @ x.t()).softmax(1)).square().sum()


def weighted_by_a_field(s: object, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, w = batch
    return ((s(x) - y).square() * w).sum() / w.sum()  # type: ignore[operator]


def importance(s: object, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    errors = (s(x) - y).square()  # type: ignore[operator]
    return ((-errors.detach()).softmax(0) * errors).sum()


def weighted_rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 1), torch.where((torch.arange(n)[:, None] == 3) & (n > 20), 30.0, 1.0)


def rare_targets(n: int) -> tuple[Tensor, Tensor]:
    """Targets of which one of the client with most rows is large."""
    y = 0.1 * torch.randn(n, 1)
    return torch.randn(n, 4), torch.where((torch.arange(n)[:, None] == 3) & (n > 20), y + 3, y)


def far_targets(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 1) + 4


scalar = functools.partial(net, make=mlp)
embedded = functools.partial(net, make=lambda: mlp(4, 4), rows=labelled())
WRONG_SHAPE = r"(?i)shape|broadcast"

CASES: list[Case] = [
    scalar("loss: weighted mean with rare weights tsai#154", rows=rare_targets, loss=rare_weights, times=4),
    scalar("loss: mean over targets that are there gpytorch#1591", rows=rare_targets, loss=missing_targets, times=4),
    scalar("loss: flooding", rows=far_targets, loss=flooding, epochs=24),
    scalar("loss: bounded", rows=rare_targets, loss=bounded, times=4),
    *(
        scalar(f"loss: {name}", loss=loss)
        for name, loss in {
            "divided by its own value": self_normalised,
            "DiCE with a baseline": dice_estimator,
            "root of the mean": root,
            "logarithm of the mean": logged,
            "tilted, log-mean-exp": tilted,
            "relative 2-norm neuraloperator": relative,
            "ratio of sums": ratio_of_sums,
            "unexplained variance": unexplained,
            "mean times the batch's length": by_hand_sum,
            "halved for short batches": by_length,
            "maximum over rows": worst,
            "mean of the worst half": hardest,
            "trimmed mean of sorted losses": easiest,
            "median": median,
            "quantile": quantile,
            "rows above the mean by a boolean mask": value_at_risk,
            "Huber's with the batch's bound": robust,
            "correlation": correlation,
            "concordance correlation": concordance,
            "pairwise ranking": pairwise,
            "softmax over rows": listwise,
            "Cox' partial likelihood": partial_likelihood,
            "smooth area under the curve": concordant_pairs,
            "weights by position": by_position,
            "increments of rows": differences,
            "cumulative sums of rows": cumulative,
            "worse of two groups": two_groups,
            "soft worst group": soft_groups,
            "scale from NumPy": numpy_scaled,
            "scale from item()": item_scaled,
            "weights written through a view": written_through_a_view,
            "rows against all rows by expand": expanded,
        }.items()
    ),
    net(
        "loss: (n, 1) against (n,) by broadcasting",
        mlp,
        lambda n: (torch.randn(n, 4), torch.randn(n)),
        broadcast,
        refused=dict.fromkeys(("default", "batched=False", "lightning_fit"), WRONG_SHAPE),
    ),
    *(
        embedded(f"loss: {name}", loss=loss)
        for name, loss in {
            "NT-Xent": contrastive,
            "supervised contrastive": supervised_contrastive,
            "triplets, hardest of a batch": hard_triplets,
            "triplets, all that count": all_triplets,
            "Barlow twins": barlow,
            "variance and covariance of a batch": variance_covariance,
            "MMD": discrepancy,
            "covariance alignment": coral,
            "information maximisation": diversity,
            "balance of experts": balance,
            "soft Dice": soft_dice,
            "Tversky": tversky,
            "focal, divided by positives": focal_by_positives,
            "class weights of the batch": frequencies,
            "OHEM": mined,
            "logits adjusted by the batch's priors": adjusted,
            "prototypes of the batch": prototypes,
            "rows pushed apart": unlike_rows,
        }.items()
    ),
    *(
        mixed(f"module: {name}", mix)
        for name, mix in {
            "centring matrix": centred,
            "centring matrix from the right": centred_from_the_right,
            "layer norm of all": lambda h: F.layer_norm(h, h.shape),
            "layer norm over rows": normal_over_rows,
            "softmax over rows": lambda h: h.softmax(0) * len(h),
            "wrong transpose by view": lambda h: h.reshape(6, -1).t(),
            "wrong view of series": lambda h: h.reshape(3, len(h), 2).transpose(0, 1).reshape(len(h), 6),
            "all rows by broadcasting": lambda h: h * (h[:, 0] * h.new_ones(len(h), 1)).mean(1, keepdim=True),
            "two copies read as pairs, cat": two_views,
            "two copies read as pairs, repeat": repeated,
            "rows as time under a convolution": time_as_rows,
            "attention over rows": attention_of_rows,
            "nearest row of the batch": neighbours,
            "minus the mean": lambda h: h - h.mean(0),
            "divided by the norm of all": lambda h: h / h.norm(),
            "mean of the other rows": lambda h: (h.sum(0) - h) / max(1, len(h) - 1),
            "cumulative mean": lambda h: h.cumsum(0) / torch.arange(1, len(h) + 1, dtype=h.dtype)[:, None],
            "first row as a reference": lambda h: h - h[:1],
            "rows in reverse": lambda h: h + h.flip(0),
            "ranks": lambda h: h * h.argsort(0).argsort(0).to(h.dtype),
        }.items()
    ),
    net("module: inputs standardised by the batch", Standard),
    net("module: GRU that takes rows for time", lambda: OverRows(nn.GRU(4, 4))),
    net("module: attention that takes rows for time", lambda: OverRows(nn.MultiheadAttention(4, 2))),
    net(
        "module: Transformer layer that takes rows for time", lambda: OverRows(nn.TransformerEncoderLayer(4, 2, 4, 0.0))
    ),
    net("module: Flatten(0)", lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0), nn.Unflatten(0, (-1, 1)))),
    net("module: Softmax(0)", lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(0), nn.Linear(3, 1))),
    net("module: centres of classes", Centres, labelled(), F.cross_entropy, rowwise=True),
    step("step: prior divided by the batch's length", bayes),
    step("step: mixup with the batch in reverse", mixup),
    step("step: mixup by index_select", selected),
    step("step: mixup by F.embedding", looked_up),
    step("step: similarities of rows distilled", distilled, lambda: mlp(4, 2)),
    step("step: weights as a field, one of them rare", weighted_by_a_field, mlp, weighted_rows, times=4),
    step("step: weights by a softmax of losses", importance),
    step("step: weights as a field, Adam", weighted_by_a_field, mlp, weighted_rows, times=4, optimizer=adam()),
    step(
        "step: weights as a field, momentum",
        weighted_by_a_field,
        mlp,
        weighted_rows,
        times=4,
        optimizer=sgd(momentum=0.9),
    ),
    scalar("loss: weighted mean, minibatches", loss=rare_weights, size=2),
    scalar("loss: flooding, minibatches", loss=flooding, size=2),
    embedded("loss: NT-Xent, minibatches", loss=contrastive, size=2),
    net("loss: root of the mean, without a hidden layer", lambda: nn.Linear(4, 1), loss=root),
    net("loss: weighted mean, without a hidden layer", lambda: nn.Linear(4, 1), loss=rare_weights),
]
