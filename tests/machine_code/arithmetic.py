"""Arithmetic instructions of single threads, for all threads at once.

Each function takes an instruction's modifiers and the values of its operands, arrays with one number for each
thread or single numbers, and returns the result. Approximations are more exact than the chip's.

Source: NVIDIA, Parallel Thread Execution ISA, version 9.0, sections 9.7.1 to 9.7.9.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{8 * size}": np.dtype(f"u{size}") for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
    # Two numbers packed in one register.
    **{"bf16x2": np.dtype(np.uint32), "f16x2": np.dtype(np.uint32), "f32x2": np.dtype(np.uint64)},
    "tf32": np.dtype(np.float32),
    "e4m3x2": np.dtype(np.uint16),  # two numbers of eight bits
}
BITS = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
_PAIRS = {"bf16x2": "bf16", "f16x2": "f16", "f32x2": "f32"}

FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS[function.__name__] = function
    return function


def dtype_of(modifiers: tuple[str, ...]) -> np.dtype:
    """Return the dtype of an instruction's operands."""
    return DTYPES[modifiers[-1]]


def number(text: str, dtype: np.dtype) -> Any:
    """Return a literal as a number of a dtype."""
    if text[:2].lower() == "0f" and len(text) == 10:
        bits = np.uint32(int(text[2:], 16))
        return bits.view(np.float32).astype(dtype) if dtype.kind == "f" else bits.view(dtype)
    if text[:2].lower() == "0d" and len(text) == 18:
        bits = np.uint64(int(text[2:], 16))
        return bits.view(np.float64).astype(dtype) if dtype.kind == "f" else bits.view(dtype)
    value = int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return np.bool_(value != 0)
    return BITS[8 * dtype.itemsize].type(value % 2 ** (8 * dtype.itemsize)).view(dtype)


def _rounded(value: Any, modifiers: tuple[str, ...]) -> Any:
    """Saturate a result, and flush its subnormal numbers, as the modifiers say."""
    if "sat" in modifiers:  # NaN becomes 0
        value = np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))
    return flushed(value) if "ftz" in modifiers else value


def flushed(value: Any) -> Any:
    """Replace subnormal numbers by zeros of the same sign."""
    value = np.asarray(value)
    return np.where(np.abs(value) < ml_dtypes.finfo(value.dtype).tiny, value * value.dtype.type(0), value)


def _floating(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Make an instruction of a function of floating-point numbers; operands with two in each register are unpacked."""

    def instruction(modifiers: tuple[str, ...], *operands: Any) -> Any:
        if half := _PAIRS.get(modifiers[-1]):
            each = (*modifiers[:-1], half)
            parts = [np.asarray(x).reshape(-1, 1).view(DTYPES[half]) for x in operands]
            results = [instruction(each, *(part[:, i] for part in parts)) for i in range(2)]
            return np.stack(results, axis=1).view(DTYPES[modifiers[-1]])[:, 0]
        if "ftz" in modifiers:
            operands = tuple(map(flushed, operands))
        return _rounded(compute(modifiers, *operands), modifiers)

    return instruction


def _narrow(exact: Any, modifiers: tuple[str, ...], dtype: np.dtype, rest: Any = 0.0) -> Any:
    """Round the float64 number exact + rest to the instruction's dtype and in its direction."""
    near = exact.astype(dtype)
    above = (near - exact) - rest  # its sign is right: the difference of neighbours is exact
    if "rm" in modifiers:
        return np.where(above > 0, np.nextafter(near, dtype.type(-np.inf)), near)
    if "rp" in modifiers:
        return np.where(above < 0, np.nextafter(near, dtype.type(np.inf)), near)
    if "rz" in modifiers:
        return np.where(above * np.sign(near) > 0, np.nextafter(near, dtype.type(0)), near)
    return near


def _wide(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


def _is_float(modifiers: tuple[str, ...]) -> bool:
    return modifiers[-1] in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")


def _either(of_floats: Callable[..., Any], of_integers: Callable[..., Any]) -> Callable[..., Any]:
    floating = _floating(of_floats)

    def instruction(modifiers: tuple[str, ...], *operands: Any) -> Any:
        return (floating if _is_float(modifiers) else of_integers)(modifiers, *operands)

    return instruction


def _exactly(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Make a floating-point function of an operator that rounds once.

    NumPy computes it where it rounds correctly; otherwise it goes through float64.
    """

    def compute(modifiers: tuple[str, ...], *operands: Any) -> Any:
        dtype = dtype_of(modifiers)
        if operator in _ROUNDED_BY_NUMPY and dtype.kind == "f" and not {"rm", "rp", "rz"} & set(modifiers):
            return operator(*operands)
        return _narrow(operator(*map(_wide, operands)), modifiers, dtype)

    return compute


# Correctly rounded in the operands' own dtype.
_ROUNDED_BY_NUMPY = (np.add, np.subtract, np.multiply, np.divide)


def _sum_and_rest(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a + b in float64 and its rounding error.

    Source: Knuth, The Art of Computer Programming, volume 2, section 4.2.2.
    """
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(rest), rest, 0.0)


def _fused(modifiers: tuple[str, ...], a: Any, b: Any, c: Any) -> Any:
    """Return a · b + c, rounded once: the product of two numbers of 24 bits is exact in float64."""
    total, rest = _sum_and_rest(_wide(a) * _wide(b), _wide(c))
    return _narrow(total, modifiers, dtype_of(modifiers), rest)


def _added(modifiers: tuple[str, ...], a: Any, b: Any) -> Any:
    if modifiers[-1] == "f64" or not {"rm", "rp", "rz"} & set(modifiers):
        return _exactly(np.add)(modifiers, a, b)
    return _fused(modifiers, a, np.float32(1), b)


def _maximum(better: Callable[..., Any], spoiled: Callable[..., Any]) -> Callable[..., Any]:
    def compute(modifiers: tuple[str, ...], *operands: Any) -> Any:
        result = operands[0]
        for operand in operands[1:]:
            result = (spoiled if "NaN" in modifiers else better)(result, operand)
        return np.maximum(result, 0) if "relu" in modifiers else result

    return _either(compute, compute)


def _multiplied(modifiers: tuple[str, ...], a: Any, b: Any) -> Any:
    """Return the low half of a product of integers, its high half, or all of it in twice the bits."""
    dtype = dtype_of(modifiers)
    if "wide" in modifiers:
        return np.asarray(a).astype(_doubled(dtype)) * np.asarray(b).astype(_doubled(dtype))
    if "hi" in modifiers:
        bits = 8 * dtype.itemsize
        if bits == 64:
            whole = np.asarray(a).astype(object) * np.asarray(b).astype(object)
            return (whole >> 64).astype(dtype)
        return (_multiplied(("wide", modifiers[-1]), a, b) >> _doubled(dtype).type(bits)).astype(dtype)
    return a * b


def _doubled(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


FUNCTIONS |= {
    "add": _either(_added, lambda modifiers, a, b: a + b),
    "sub": _either(lambda modifiers, a, b: _added(modifiers, a, -b), lambda modifiers, a, b: a - b),
    "mul": _either(_exactly(np.multiply), _multiplied),
    "fma": _floating(_fused),
    "div": _either(_exactly(np.divide), lambda modifiers, a, b: _truncated(a, b)),
    "neg": _either(lambda modifiers, a: -a, lambda modifiers, a: -a),
    "abs": _either(lambda modifiers, a: np.abs(a), lambda modifiers, a: np.abs(a)),
    "max": _maximum(np.fmax, np.maximum),
    "min": _maximum(np.fmin, np.minimum),
    "rcp": _floating(_exactly(lambda a: 1 / a)),
    "sqrt": _floating(_exactly(np.sqrt)),
    "rsqrt": _floating(_exactly(lambda a: 1 / np.sqrt(a))),
    "ex2": _floating(_exactly(np.exp2)),
    "lg2": _floating(_exactly(np.log2)),
    "tanh": _floating(_exactly(np.tanh)),
    "sin": _floating(_exactly(np.sin)),
    "cos": _floating(_exactly(np.cos)),
    "copysign": lambda modifiers, sign, size: np.copysign(size, sign),
    "and": lambda modifiers, a, b: a & b,
    "or": lambda modifiers, a, b: a | b,
    "xor": lambda modifiers, a, b: a ^ b,
    "not": lambda modifiers, a: ~a,
    "selp": lambda modifiers, a, b, chosen: np.where(chosen, a, b),
    "mad": _either(_fused, lambda modifiers, a, b, c: _multiplied(modifiers, a, b) + c),
}

_ROUNDINGS = {"rn", "rm", "rp", "rz"}
# Modifiers that may stand between an instruction's name and its dtype; any other is refused, none is ignored.
_MODIFIERS = {
    **dict.fromkeys(("add", "sub", "fma"), _ROUNDINGS | {"ftz", "sat"}),
    "mul": _ROUNDINGS | {"ftz", "sat", "lo", "hi", "wide"},
    "mad": {"rn", "ftz", "lo", "wide"},
    "div": {"rn", "full", "approx", "ftz"},
    **dict.fromkeys(("neg", "abs"), {"ftz"}),
    "max": {"ftz", "NaN"},
    "min": {"ftz", "NaN", "relu"},
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos"), {"rn", "approx", "ftz"}),
    "shf": {"l", "r", "wrap", "clamp"},
    "setp": {"ftz", "and", "or", "xor", "num", "nan", "lo", "ls", "hi", "hs"}
    | {f"{name}{u}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for u in ("", "u")},
    "cvt": _ROUNDINGS | {"rni", "rzi", "rmi", "rpi", "rna", "ftz", "sat", *DTYPES},
}


def knows(opcode: str, modifiers: tuple[str, ...]) -> bool:
    """Return whether FUNCTIONS emulates an instruction with these modifiers."""
    *before, source = modifiers
    if source not in DTYPES or not set(before) <= _MODIFIERS.get(opcode, set()):
        return False
    to = before[-1] if opcode == "cvt" else source
    if "e4m3x2" in modifiers:
        return opcode == "cvt" and modifiers[-2:] == ("f16x2", "e4m3x2")
    saturates, directed = "sat" in before, not {"rm", "rp", "rz"}.isdisjoint(before)
    if saturates and to not in ("f16", "f32") or saturates and source not in ("f16", "f32"):
        return False
    return not directed or to not in ("tf32", "f64") and DTYPES[source].kind == "f"


def _truncated(a: Any, b: Any) -> Any:
    """Divide integers, rounding towards zero."""
    a, b = np.asarray(a), np.asarray(b)
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


@_instruction
def rem(modifiers: tuple[str, ...], a: Any, b: Any) -> Any:
    return np.fmod(a, b)


@_instruction
def shl(modifiers: tuple[str, ...], a: Any, by: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), a.dtype.type(0))


@_instruction
def shr(modifiers: tuple[str, ...], a: Any, by: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, a.dtype.type(0))


@_instruction
def shf(modifiers: tuple[str, ...], low: Any, high: Any, by: Any) -> Any:
    both = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low).astype(np.uint64)
    by = np.asarray(by & 31 if "wrap" in modifiers else np.minimum(by, 32)).astype(np.uint64)
    return (both >> by if "r" in modifiers else both << by >> np.uint64(32)).astype(np.uint32)


@_instruction
def bfe(modifiers: tuple[str, ...], a: Any, first: Any, length: Any) -> Any:
    """Extract `length` bits from `first` on; in a signed number the highest is the sign."""
    bits = 8 * np.asarray(a).dtype.itemsize
    first, length = int(first) & 255, int(length) & 255
    if not 0 < length <= bits - first:
        raise NotImplementedError("cannot emulate bfe of no bits, or of more than there are")
    dtype = np.asarray(a).dtype
    return a << dtype.type(bits - first - length) >> dtype.type(bits - length)


@_instruction
def prmt(modifiers: tuple[str, ...], a: Any, b: Any, selector: Any) -> Any:
    """Select four of the eight bytes of two numbers, or replicate their signs."""
    both = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
    result = np.uint64(0)
    for i in range(4):
        choice = (np.asarray(selector).astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result = result | np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


@_instruction
def lop3(modifiers: tuple[str, ...], a: Any, b: Any, c: Any, table: Any) -> Any:
    """Apply any function of three bits, given by its table."""
    result = np.zeros_like(np.asarray(a) | b | c)
    for i in range(8):
        if int(table) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


@_instruction
def popc(modifiers: tuple[str, ...], a: Any) -> Any:
    return np.bitwise_count(a).astype(np.uint32)


@_instruction
def clz(modifiers: tuple[str, ...], a: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    return (bits - np.frexp(np.asarray(a).astype(np.longdouble))[1]).astype(np.uint32)


@_instruction
def setp(modifiers: tuple[str, ...], a: Any, b: Any, other: Any = None) -> Any:
    """Compare numbers, of which one may be NaN (…u is true then), and combine the result with a predicate."""
    comparison = modifiers[0]
    if comparison in ("lo", "ls", "hi", "hs"):
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[comparison]
    if "ftz" in modifiers:
        a, b = flushed(a), flushed(b)
    name = comparison.removesuffix("u")
    if name in ("num", "nan"):
        result = (np.isnan(a) | np.isnan(b)) == (name == "nan")
    else:
        compare = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }
        result = compare[name](a, b)
        if dtype_of(modifiers).kind in "fV":
            unordered = np.isnan(_wide(a)) | np.isnan(_wide(b))
            result = result | unordered if comparison.endswith("u") else result & ~unordered
    if other is not None:
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
        result = next(combine[name] for name in modifiers if name in combine)(result, other)
    return result


_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@_instruction
def cvt(modifiers: tuple[str, ...], *operands: Any) -> Any:
    """Convert a number to another dtype, cvt.….to.from; or two into one register, the first above the second."""
    to, source = modifiers[-2:]
    if source == "e4m3x2":
        both = np.ascontiguousarray(operands[0])[..., None].view(ml_dtypes.float8_e4m3fn)
        return both.astype(np.float16).view(DTYPES[to])[..., 0]
    if half := _PAIRS.get(to):
        low, high = (_converted(x, half, source, modifiers) for x in reversed(operands))
        return np.stack(np.broadcast_arrays(low, high), axis=-1).view(DTYPES[to])[..., 0]
    return _converted(operands[0], to, source, modifiers)


def _converted(x: Any, to: str, source: str, modifiers: tuple[str, ...]) -> Any:
    x, dtype = np.asarray(x), DTYPES[to]
    if to == "tf32":
        return _to_tf32(x, modifiers)
    if dtype.kind in "iu":
        if x.dtype.kind in "iu":
            return x.astype(dtype)
        x = flushed(x) if "ftz" in modifiers else x
        whole = next(_WHOLE[name] for name in modifiers if name in _WHOLE)(_wide(x))
        limits = np.iinfo(dtype)
        kept = np.where((whole > limits.min) & (whole < limits.max), whole, 0).astype(dtype)
        kept = np.where(whole >= limits.max, dtype.type(limits.max), kept)
        return np.where(whole <= limits.min, dtype.type(limits.min), kept)  # NaN gives 0
    if to == source:
        whole = [_WHOLE[name] for name in modifiers if name in _WHOLE]
        return _rounded(whole[0](x) if whole else x, modifiers)
    result = x.astype(dtype) if x.dtype.kind in "iu" else _narrow(_wide(x), modifiers, dtype)
    return _rounded(result, modifiers)


def _to_tf32(x: np.ndarray, modifiers: tuple[str, ...]) -> np.ndarray:
    """Round float32 to a mantissa of ten bits, to nearest; ties away from zero (rna) or to even (rn)."""
    bits = x.view(np.uint32)
    half = np.uint32(0x1000) if "rna" in modifiers else np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    rounded = (bits + half) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits).astype(np.uint32).view(np.float32)
