"""The operations of Python on numbers, for objects that stand in the place of one."""

from __future__ import annotations

_BOTH_WAYS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_COMPARED = "lt le gt ge eq ne"
_READ = "bool int float complex index len iter next contains getitem format str round trunc floor ceil"
ARITHMETIC = frozenset(
    [f"__{side}{name}__" for name in _BOTH_WAYS.split() for side in ("", "r")]
    + [f"__{name}__" for name in "neg pos abs invert".split()]
)
READING = frozenset(f"__{name}__" for name in (*_COMPARED.split(), *_READ.split()))
NUMBER_OPERATIONS = ARITHMETIC | READING
