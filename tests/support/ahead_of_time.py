"""Compiles every Triton program to a cubin for an H100, without a device, and prints what it needs, a line each.

`python -m support.ahead_of_time` runs in a process of its own, without `TRITON_INTERPRET`. A line is JSON: the name of
the case; registers of a thread, bytes that it spills and bytes of its stack, as the assembler tells; shared memory.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
triton.knobs.nvidia.dump_ptxas_log = True
triton.knobs.compilation.always_compile = True


LONGEST = "gibbs_sweeps.horseshoe"


class Case(NamedTuple):
    """One way in which a program is launched."""

    kernel: str  # module.function
    types: str  # of the arguments that are no constants, in order
    constants: dict[str, Any]
    warps: int = 4


def philox_cases() -> Iterator[Case]:
    draw = "*i64 i32 i32 i64 i32"
    for form, target in ((0, "*i64"), (1, "*i64"), (2, "*u1"), (3, "*fp32"), (4, "*fp32"), (5, "*fp16")):
        constants = {"FORM": form, "WIDE": form == 1, "DIGITS": 24, "ROWS": 1, "COLUMNS": 256}
        yield Case("philox.draw", f"{target} {draw}", constants)
    for form in (3, 4, 5):
        constants = {"FORM": form, "WIDE": True, "DIGITS": 0, "ROWS": 64, "COLUMNS": 4}
        yield Case("philox.draw", f"*fp64 {draw}", constants)
    yield Case("philox.gamma", "*fp32 *i64 *fp64 i32 i32 fp64 i32", {"ROWS": 16, "COLUMNS": 16})
    yield Case("philox.fold", "*i64 *i64 *i64 i32 i32", {"BLOCK": 256})


def step_cases() -> Iterator[Case]:
    for kind in ("fp32", "fp64"):
        tile = {"ROWS": 1, "COLUMNS": 1024}
        rows, sizes = f"*{kind} *{kind} *{kind}", "i32 i32 i32"
        yield Case("stacked_step.squares", f"*{kind} *{kind} *{kind} *{kind} *{kind} {sizes}", {"PULL": True, **tile})
        for some, held in ((True, False), (False, True)):
            flags = {"PULL": some, "CLIP": some, "RATE_HELD": held, "TAKEN_HELD": held, **tile}
            shared = f"{'*i64' if held else 'i32'} {rows} {sizes} fp64 *fp64"
            sgd = {"MOMENTUM": some, "NESTEROV": some, **flags}
            yield Case("stacked_step.sgd", f"{rows} {shared} fp64 fp64 fp64", sgd)
            adam = f"*{kind} {rows} {shared} fp64 fp64 fp64 fp64 fp64 fp64"
            yield Case("stacked_step.adam", adam, {"DECOUPLED": some, **flags})


def glm_cases() -> Iterator[Case]:
    for kind, most, part, many in (("fp32", 256, 32, 8), ("fp64", 64, 16, 8)):
        tensors = f"*{kind} *{kind} *{kind} *{kind} *i64 *i64 *{kind} *i64 *{kind} *{kind} i32 i32 i32 i32 i32 fp64"
        for family, resident, rows, features, warps in (
            (0, True, most // 4, 32, 4),
            (1, True, most, 32, many),
            (2, False, part, 128, 4),
        ):
            constants = {"FAMILY": family, "INDEXED": not resident, "PULL": True, "RESIDENT": resident}
            yield Case("glm_steps.linear", tensors, {**constants, "ROWS": rows, "FEATURES": features}, warps)
    tensors = "*fp32 *fp32 *fp32 *i64 *i64 *i64 *fp32 *i64 *fp32 *fp32 i32 i32 i32 i32 i32 i32 fp64"
    for indexed, features in ((True, 16), (False, 32), (True, 64)):
        tile = {"ROWS": 32, "FEATURES": features, "CLASSES": 16}
        yield Case("glm_steps.categorical", tensors, {"IGNORED": -100, "INDEXED": indexed, "PULL": True, **tile}, 8)


def gibbs_cases() -> Iterator[Case]:
    for size in (2, 16):
        tensors = "*fp64 " * 14 + "*i64 i32 i32 i32 i32"
        yield Case("gibbs_sweeps.horseshoe", tensors, {"BATCH": 256 // size**2, "SIZE": size}, 8)


def cases() -> Iterator[Case]:
    yield from philox_cases()
    yield from step_cases()
    yield from glm_cases()
    yield from gibbs_cases()


def kernel_of(case: Case) -> Any:
    module, name = case.kernel.split(".")
    place = "fedtorch.programs.triton.philox" if module == "philox" else f"fedtorch.programs.triton.{module}"
    return getattr(importlib.import_module(place), name)


def with_ones(case: Case) -> Case:
    """The case with sizes of one, which a launch makes constants."""
    names = [arg for arg in kernel_of(case).arg_names if arg not in case.constants]
    ones = {arg: 1 for arg, kind in zip(names, case.types.split()) if kind == "i32"}
    return case._replace(
        types=" ".join(kind for kind in case.types.split() if kind != "i32"), constants={**case.constants, **ones}
    )


def compiled(case: Case) -> dict[str, Any]:
    """What a case needs; pointers are aligned, as torch's are."""
    kernel = kernel_of(case)
    free = iter(case.types.split())
    signature = {arg: "constexpr" if arg in case.constants else next(free) for arg in kernel.arg_names}
    assert next(free, None) is None, f"more types than arguments of {case.kernel}"
    options = {"num_warps": case.warps, "enable_fp_fusion": False}
    told = io.StringIO()
    with redirect_stdout(told):
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        made = triton.compile(ASTSource(kernel, signature, case.constants, aligned), target=TARGET, options=options)
    assert len(made.asm["cubin"]) > 0
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", told.getvalue())))
    ((registers, stack),) = zip(
        re.findall(r"Used (\d+) registers", told.getvalue()), re.findall(r"(\d+) bytes stack", told.getvalue())
    )
    constants = ", ".join(f"{key}={value}" for key, value in case.constants.items())
    name = f"{case.kernel}({case.types}; {constants})"
    needed = {"registers": int(registers), "spilled": spilled, "stack": int(stack), "shared": made.metadata.shared}
    return {"case": name, **needed}


def main() -> None:
    """Prints a line for every case; names of kernels choose some.

    With `--few` it is the first case of every program, but for the one that takes longer than five others.
    """
    names, few, done = [name for name in sys.argv[1:] if name != "--few"], "--few" in sys.argv, set()
    for case in cases():
        if case.kernel.startswith(tuple(names) or "") and not (few and case.kernel in {LONGEST, *done}):
            print(json.dumps(compiled(case)), flush=True)
            if not few and case.kernel not in done:
                print(json.dumps(compiled(with_ones(case))), flush=True)
            done.add(case.kernel)


if __name__ == "__main__":
    main()
