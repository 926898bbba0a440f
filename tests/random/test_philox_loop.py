"""Draws by the program in C are those of the reference: the same bits, and formulas to their rounding."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.programs import reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fedtorch
from fedtorch import random
from fedtorch.dispatch import choice, compiled
from fedtorch.random import philox, philox_loop
from fedtorch.random.draws import bits

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")
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
        for name in ("philox", "block_words", "folded_singly"):
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


def test_the_program_draws_where_nobody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operations are watched, or a derivative is asked for, they are those of torch."""
    wanted = random.uniform(KEYS, (3,)), random.gamma(KEYS, 2.5)
    monkeypatch.setattr(philox_loop, "draw", lambda *a: pytest.fail("nobody saw it"))
    monkeypatch.setattr(philox_loop, "gamma", lambda *a: pytest.fail("it has no derivative"))
    with _Watched():
        assert torch.equal(random.uniform(KEYS, (3,)), wanted[0])
    a = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(random.gamma(KEYS, a).detach(), wanted[1])


def test_formulas_at_their_limits(tmp_path: Path) -> None:
    """The least and the greatest that words can be, the joints of the logarithm's and of the circle's parts."""
    header = Path(fedtorch.__file__).parent / "random" / "philox.h"
    source = tmp_path / "formulas.c"
    source.write_text(
        f'#include "{header}"\n'
        "double logarithm_of(double x) { return logarithm(x); }\n"
        "double inside_of(uint32_t a, uint32_t b) { return inside(a, b); }\n"
        "double one_of(uint32_t a) { return inside_of_one(a); }\n"
        "double cosine_of(double x) { double c, s; cosine_and_sine(x, &c, &s); return c; }\n"
        "double sine_of(double x) { double c, s; cosine_and_sine(x, &c, &s); return s; }\n"
    )
    library = compiled.library(source)
    assert library is not None
    for name in ("logarithm_of", "cosine_of", "sine_of"):
        getattr(library, name).argtypes, getattr(library, name).restype = (ctypes.c_double,), ctypes.c_double
    library.inside_of.argtypes, library.inside_of.restype = (ctypes.c_uint32,) * 2, ctypes.c_double
    library.one_of.argtypes, library.one_of.restype = (ctypes.c_uint32,), ctypes.c_double
    most = 2**32 - 1
    assert [library.inside_of(*words) for words in ((0, 0), (most, most))] == [2.0**-53, 1 - 2.0**-53]
    assert [library.one_of(word) for word in (0, most)] == [2.0**-33, 1 - 2.0**-33]
    root = math.sqrt(0.5)
    joints = [root, 2 * root, math.nextafter(root, 0), math.nextafter(root, 1), 1.0, 1 - 2.0**-53, 2.0**-53, 1e-300]
    inside = random.uniform(random.key(1), (2000,), torch.float64).clamp_min(1e-18).tolist()
    for x in (*joints, *inside, 1e300, 1 + 2.0**-52):
        assert library.logarithm_of(x) == pytest.approx(math.log(x), rel=2.0**-52, abs=0.0), x
    for turns in (*(n / 8 for n in range(9)), math.nextafter(0.125, 0), math.nextafter(0.875, 1), *inside):
        # The argument of the oracle, up to 2π, is rounded to 2⁻⁵¹.
        assert library.cosine_of(turns) == pytest.approx(math.cos(2 * math.pi * turns), rel=0.0, abs=2.0**-50)
        assert library.sine_of(turns) == pytest.approx(math.sin(2 * math.pi * turns), rel=0.0, abs=2.0**-50)
