r"""A user's own encoder of z: any `nn.Module` of rows, in the place of the built-in perceptron.

A module maps rows `(N, F)`, one for each draw and each row of the data: the inputs of the encoders of
`fedtorch.vfl.fit.auxiliary`, which are the predictor (C numbers) and, for an encoder that uses y, features of y. It
returns

- `(N, 2C)`, or a pair of `(N, C)`, as the built-in encoders do: a mean and a log standard deviation relative to
  theirs, so that zeros are the initial values, or
- a `torch.distributions` object: the distribution of z itself (at the server of `sums`, of the likelihood's noisy
  predictor), of batch shape `(N, C)`, or `(N,)` with an event of C. A draw of it has to be a function of one standard
  normal number per row and output, as for normal distributions and all transformations of these. The number is given,
  so that the draw is the same in one graph, among nodes and after a resumption.

Its weights are trained like those of the built-in encoders, one copy per batch element; buffers stay as they are.
Iterations with a distribution cannot be captured (`compile=True`), because distributions check their arguments.
"""

from __future__ import annotations

import copy
import functools
import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch import functional
from fedtorch._representation import without_rows
from fedtorch.models.encoders import Encoder, EncoderFactory, perceptron


@without_rows
class Laws(NamedTuple):
    """The distributions that an encoder returns, one per (draw, row of the data)."""

    each: list[Distribution]  # one for each element of the batch

    def drawn(self, fixed: Laws, centre: Tensor, sd: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return draws `(B, M, C, n)`, and the log ratio of N(centre, sd²) and their density, `(B, M, n)`.

        Args:
            fixed: distributions used for the density; different ones where its parameters are detached.
            centre: `(B, M, C, n)`.
            sd: `(1 or B, 1, 1, 1)`.
            noise: standard normal numbers `(1 or B, M, C, n)`.
        """
        numbers = noise.expand_as(centre)
        pairs = [_drawn(law, held, tau) for law, held, tau in zip(self.each, fixed.each, numbers)]
        value, log_q = (torch.stack(part) for part in zip(*pairs))
        prior = torch.distributions.Normal(centre, sd, validate_args=False).log_prob(value)
        return value, prior.sum(-2) - log_q


def _drawn(law: Distribution, fixed: Distribution, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return a draw `(M, C, n)` and its log density `(M, n)`."""
    draws, outputs, rows = noise.shape
    if not law.has_rsample:
        raise ValueError(f"Expected a law with rsample, whose draws can be differentiated, but got {law}")
    shape = (*law.batch_shape, *law.event_shape)
    if math.prod(shape) != noise.numel():
        raise ValueError(f"Expected a law of {outputs} numbers a row, but got shape {shape} of {draws * rows} rows")
    with _Given(noise.mT.flatten(0, 1)):
        value = law.rsample()
    log_q = fixed.log_prob(value)
    log_q = log_q.sum(-1) if log_q.ndim > 1 else log_q
    return value.reshape(draws, rows, outputs).mT, log_q.reshape(draws, rows)


class _Given(TorchDispatchMode):
    """Context in which the first standard normal draws are the given numbers, and all further draws are refused.

    Args:
        numbers: the given numbers; None refuses all draws.
    """

    def __init__(self, numbers: Tensor | None) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not _draws(fn):
            return fn(*args, **(kwargs or {}))
        numbers, self.numbers = self.numbers, None
        standard = fn is torch.ops.aten.normal_.default and len(args) == 1 and not kwargs
        if not standard or numbers is None or args[0].numel() != numbers.numel():
            raise ValueError(
                "Expected an encoder that draws nothing, and a law whose draw is a function of one standard normal "
                f"number a row and output, such as Normal or a transformation of it, but got {fn}"
            )
        return args[0].copy_(numbers.reshape(args[0].shape))


@functools.cache
def _draws(fn: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in fn.tags


class OwnEncoder(Encoder):
    """An encoder that is a user's module; its parameters are the module's, with `/` for the dots of their names.

    Args:
        module: of rows `(N, F)`.
        inputs: F.
        outputs: numbers per row, unless the module returns a distribution.

    Raises:
        ValueError: the module's output has another form.
    """

    def __init__(self, module: nn.Module, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        module = copy.deepcopy(module).eval()
        self.outputs = outputs
        given = functional.parameters(module)
        for name, value in given.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(value))
        self._module = [module.requires_grad_(False)]  # in a list, so that its parameters are not registered twice
        self._swap = functional.Swap(module, list(given))
        like = next(iter(given.values()), torch.zeros(()))
        with torch.no_grad(), _Given(None):
            self._answer(like.new_zeros(3, inputs))

    def start(self, key: Tensor, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the module's own weights, `(B, ...)` each; the key is not used."""
        placed = {name: value.detach().to(key.device, dtype) for name, value in self.named_parameters()}
        return {name: value.expand(batch, *value.shape).clone() for name, value in placed.items()}

    def forward(self, features: Tensor) -> Any:
        """Encode features of rows `(B, M, F, n)` to `(B, M, O, n)`, or to `Laws`."""
        draws, rows = features.shape[1], features.shape[-1]
        buffers = [buffer for buffer in self._module[0].buffers() if buffer.is_floating_point()]
        if any((buffer.device, buffer.dtype) != (features.device, features.dtype) for buffer in buffers):
            self._module[0].to(features)
        weights: Any = self._parameters.values()
        answers = []
        for b, seen in enumerate(features.mT.flatten(1, 2)):
            with self._swap([weight[b] for weight in weights]):
                answers.append(self._answer(seen))
        if isinstance(answers[0], Distribution):
            return Laws(answers)
        return torch.stack(answers).unflatten(1, (draws, rows)).mT

    def _answer(self, rows: Tensor) -> Any:
        """Return the module's output: `(N, outputs)`, or a distribution."""
        answer = self._module[0](rows)
        if isinstance(answer, Distribution):
            shape = (*answer.batch_shape, *answer.event_shape)
            outputs, batch = rows.shape[-1], len(answer.batch_shape)
            if shape[:1] == rows.shape[:1] and len(shape) <= 2 and batch in (1, len(shape)):
                return answer
            raise ValueError(
                f"Expected a law of batch shape ({len(rows)}, C), or ({len(rows)},) with an event of C, of "
                f"{len(rows)} rows of {outputs} numbers, but got batch {tuple(answer.batch_shape)} and event "
                f"{tuple(answer.event_shape)}"
            )
        parts = answer if isinstance(answer, tuple) else (answer,)
        if not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(f"Expected an encoder's tensor, pair of tensors or distribution, but got {type(answer)}")
        whole = torch.cat([part.reshape(len(part), -1) for part in parts], -1)
        if whole.shape != (len(rows), self.outputs):
            raise ValueError(
                f"Expected an encoder of rows {tuple(rows.shape)} to ({len(rows)}, {self.outputs}), or as many numbers "
                f"in a pair, but got {[tuple(part.shape) for part in parts]}"
            )
        return whole


def factory(encoder: EncoderFactory | nn.Module | None) -> EncoderFactory:
    """Build a factory of encoders: copies of a user's module, or perceptrons of 16 hidden units for None."""
    if isinstance(encoder, nn.Module):
        return partial(OwnEncoder, copy.deepcopy(encoder))
    return encoder or perceptron()
