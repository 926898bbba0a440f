"""Draws by the programs for the CPU are those of the reference: the same bits, and formulas to their rounding."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy
import pytest
import torch
from support.programs import reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch import random
from fedtorch.programs import choice, philox as programs, program
from fedtorch.random import philox
from fedtorch.random.draws import bits

pytest.importorskip("numba")
KEYS = random.fold_in(random.key(-5), torch.arange(7))
LAYOUTS = {
    "one": KEYS[1],
    "several": KEYS,
    "none": KEYS[:0],
    "three dimensions": KEYS[None, :, None],
    "strided": KEYS.repeat(2)[::2],
    "repeated": KEYS[:1].expand(3),
}
SHAPES = [(), (0,), (1,), (5,), (3, 43), (1030,)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Draw = Callable[[Tensor, tuple[int, ...]], Tensor]
EXACT: dict[str, Draw] = {
    "bits": lambda key, shape: bits(key, math.prod(shape)),
    "integers": lambda key, shape: random.randint(key, 10**12, shape),
    "permutation": lambda key, shape: random.permutation(key, math.prod(shape)),
    **{f"coins, {p}": lambda key, shape, p=p: random.bernoulli(key, p, shape) for p in (0.0, 2**-33, 0.3, 1.0)},  # type: ignore[misc]
    **{f"uniform, {t}": lambda key, shape, t=t: random.uniform(key, shape, t) for t in DTYPES},  # type: ignore[misc]
}


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def both(draw: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """What the program and the reference give."""
    with monkeypatch.context() as patch:
        for name in ("philox", "block_words"):
            patch.setattr(philox, name, lambda *a: pytest.fail("the reference draws"))
        found = draw()
    with reference():
        return found, draw()


@pytest.mark.parametrize("key", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("draw", EXACT.values(), ids=EXACT)
def test_words_and_uniform_numbers_are_the_same_bits(draw: Draw, key: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES:
        found, wanted = both(lambda shape=shape: draw(key, shape), monkeypatch)
        assert (found.dtype, found.shape, found.is_contiguous()) == (wanted.dtype, wanted.shape, True)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("draw", [random.normal, random.exponential])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_and_exponential_numbers_to_the_last_bit_or_two(draw, dtype, monkeypatch) -> None:
    for key in LAYOUTS.values():
        for shape in (*SHAPES, (4001,)):
            found, wanted = both(lambda key=key, shape=shape: draw(key, shape, dtype), monkeypatch)
            assert (found.dtype, found.shape) == (dtype, wanted.shape)
            # An angle of up to 2π is rounded to 2⁻⁵¹, its cosine to 2⁻⁵³; radii are at most 8.6. Then the dtype's own.
            close = 8.6 * 2.0**-50 + torch.finfo(dtype).eps * wanted.double().abs() * (dtype != torch.float64)
            assert bool(((found.double() - wanted.double()).abs() <= close).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_gamma_numbers_of_all_shape_parameters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.tensor([0.01, 0.3, 0.999, 1.0, 1.5, 40.0, 1e6, torch.nan, torch.inf, 0.0, -1.0]).double().repeat(7)
    a = a if dtype != torch.float16 else a.clamp_max(1e4)
    for each in (a, a.repeat_interleave(2)[::2], a[:1].expand(77), 2.5):
        found, wanted = both(lambda each=each: random.gamma(KEYS, each, (77,), dtype), monkeypatch)
        assert found.dtype == dtype
        # The exponent log(u) / a of a boosted number is up to 3 600 units of rounding at a = 0.01.
        close = {torch.float16: 2e-3, torch.float32: 3e-7, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(found, wanted, rtol=close, atol=0.0, equal_nan=True)
    assert bool(random.gamma(KEYS, a, (77,), dtype)[:, 7:11].isnan().all() if dtype != torch.float16 else True)
    assert random.gamma(KEYS[:0], 2.0, (4,), dtype).shape == (0, 4)


def test_new_keys_of_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = KEYS[:6].reshape(2, 3)
    cases: list[tuple[Tensor, int | Tensor]] = [
        *(
            (key, number)
            for key in (KEYS[0], KEYS, KEYS[::2], grid.mT, KEYS[:0])
            for number in (7, -(2**33), 2**64 + 5)
        ),
        *((KEYS[0], numbers) for numbers in (torch.arange(50), torch.tensor([[-1], [0], [2**40 + 3]]))),
        (KEYS[:, None], torch.arange(5)),
        (KEYS, torch.tensor([[-1], [0]])),
        (grid[:, :, None], torch.arange(24).reshape(2, 4, 3).mT),
        (KEYS[:0, None], torch.arange(5)),
        (KEYS[:3], torch.tensor([1, 2, 3], dtype=torch.int32)),
    ]
    for key, data in cases:
        found, wanted = both(lambda key=key, data=data: random.fold_in(key, data), monkeypatch)
        assert torch.equal(found, wanted)


class _Watched(TorchDispatchMode):
    """Sees every operation of torch."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_program_draws_without_interception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operations are watched, or a derivative is asked for, they are those of torch."""
    wanted = random.uniform(KEYS, (3,)), random.gamma(KEYS, 2.5)
    monkeypatch.setattr(programs, "draw", lambda *a: pytest.fail("nobody saw it"))
    monkeypatch.setattr(programs, "gamma", lambda *a: pytest.fail("it has no derivative"))
    with _Watched():
        assert torch.equal(random.uniform(KEYS, (3,)), wanted[0])
    a = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(random.gamma(KEYS, a).detach(), wanted[1])


inside, inside_of_one, logarithm, cosine_and_sine = (
    getattr(programs, name) for name in ("inside", "inside_of_one", "logarithm", "cosine_and_sine")
)


@program("void(float64[::1], uint32[::1], uint32[::1], float64[:, ::1])")
def formulas(x, first, second, out):
    """Write what the formulas give of each number, and of each pair of words."""
    for i in range(len(x)):
        out[0, i] = logarithm(x[i])
        out[1, i], out[2, i] = cosine_and_sine(x[i])
        out[3, i], out[4, i] = inside(first[i], second[i]), inside_of_one(first[i])


def by_formulas(x: list[float], first: list[int], second: list[int]) -> numpy.ndarray:
    out = numpy.empty((5, len(x)))
    formulas(numpy.array(x), numpy.array(first, numpy.uint32), numpy.array(second, numpy.uint32), out)
    return out


def test_formulas_at_their_limits() -> None:
    """The least and the greatest that words can be, the joints of the logarithm's and of the circle's parts."""
    most = 2**32 - 1
    ends = by_formulas([1.0, 1.0], [0, most], [0, most])
    assert ends[3].tolist() == [2.0**-53, 1 - 2.0**-53]
    assert ends[4].tolist() == [2.0**-33, 1 - 2.0**-33]
    root = math.sqrt(0.5)
    joints = [root, 2 * root, math.nextafter(root, 0), math.nextafter(root, 1), 1.0, 1 - 2.0**-53, 2.0**-53, 1e-300]
    drawn = random.uniform(random.key(1), (2000,), torch.float64).clamp_min(1e-18).tolist()
    points = [*joints, *drawn, 1e300, 1 + 2.0**-52]
    words = [0] * len(points)
    for x, found in zip(points, by_formulas(points, words, words)[0].tolist()):
        assert found == pytest.approx(math.log(x), rel=2.0**-52, abs=0.0), x
    turns = [*(n / 8 for n in range(9)), math.nextafter(0.125, 0), math.nextafter(0.875, 1), *drawn]
    words = [0] * len(turns)
    _, cosines, sines, *_ = by_formulas(turns, words, words)
    for x, cosine, sine in zip(turns, cosines.tolist(), sines.tolist()):
        # The argument of the oracle, up to 2π, is rounded to 2⁻⁵¹.
        assert cosine == pytest.approx(math.cos(2 * math.pi * x), rel=0.0, abs=2.0**-50)
        assert sine == pytest.approx(math.sin(2 * math.pi * x), rel=0.0, abs=2.0**-50)


@pytest.mark.slow
def test_numbers_do_not_depend_on_vector_instructions() -> None:
    """A processor without any, as numba sees it, gives the same bits; what is compiled for it is kept, too."""
    lines = (
        "import torch\n"
        "from fedtorch import random\n"
        "from fedtorch.random import philox\n"
        "key, double = random.key(5), torch.float64\n"
        "drawn = [philox.normal(key, (777,), double), philox.exponential(key, (777,), double)]\n"
        "drawn += [philox.gamma(key[None], torch.full((1, 777), a, dtype=double), double)[0] for a in (0.3, 2.5)]\n"
        "from fedtorch.models.gibbs.gibbs_sweeps import Chains, Rows, SweepPrior, gibbs_sweeps\n"
        "x = philox.normal(key, (3, 9, 5), double)\n"
        "y, one = x[:, :5, :1].mT, torch.ones(3, 1, dtype=double)\n"
        "rows, heard = Rows(x.mT @ x, y[:, 0], one[:, 0], 3 * one[:, 0]), SweepPrior(y, y.exp(), one)\n"
        "swept = gibbs_sweeps(rows, heard, Chains(y, y.exp(), y.exp(), one), torch.arange(3)[:, None], 4)\n"
        "drawn += [part.flatten() for part in swept]\n"
        "print(torch.cat(drawn).numpy().tobytes().hex())\n"
    )
    said = []
    for more in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}):
        environment = {**os.environ, **more}
        done = subprocess.run(
            [sys.executable, "-c", lines], env=environment, capture_output=True, text=True, check=True
        )
        said.append(done.stdout)
    assert said[0] == said[1] != ""
