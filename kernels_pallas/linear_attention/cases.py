"""Test cases of linear attention."""

from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.linear_attention import costs, gated_delta_rule, reference, state_space
from kernels_pallas.linear_attention.chunked import KERNELS

_ALL = ("float32", "bfloat16", "float16")
_CHIPS = {"uses": {"compile", "bench"}, "dtypes": ("bfloat16",)}


def _case(name, shape, keys, values, *, is_delta, documents=True, **more) -> KernelCase:
    """Return a case with an initial state, and decays of about a third. `keys`, `values`: heads, and their channels."""
    (B, T), (K, H), (N, V) = shape, keys, values
    scale = 1.0 if is_delta else H**-0.5
    arrays = {
        "query": CaseArray((B, T, K, H), scale=scale),
        "key": CaseArray((B, T, K, H), scale=scale),
        "value": CaseArray((B, T, N, V)),
        "log_decay": CaseArray((B, T, N), scale=0.2, mean=-1.0),
        "beta" if is_delta else "delta": CaseArray((B, T, N), scale=0.2, mean=0.5),
    }
    arrays |= {} if is_delta else {"skip": CaseArray((N,))}
    arrays |= {"state": CaseArray((B, N, H, V), "float32")}
    arrays |= {"begins": CaseArray((B, T), "bool", "seldom")} if documents else {}
    return KernelCase(name, arrays, **more)


def _cases(*, is_delta: bool) -> tuple[KernelCase, ...]:
    large = ((16, 128), (32, 128)) if is_delta else ((8, 128), (64, 64))
    return (
        _case("two chunks, shared keys", (1, 100), (1, 16), (2, 24), is_delta=is_delta, dtypes=_ALL),
        _case("part of a chunk", (2, 20), (2, 8), (2, 16), is_delta=is_delta, documents=False),
        _case("small", (1, 128), (1, 16), (2, 16), is_delta=is_delta, uses={"bench"}, dtypes=("float32",)),
        _case("2 × 4096", (2, 4096), *large, is_delta=is_delta, **_CHIPS),
        _case("1000, odd widths", (1, 1000), (3, 96), (6, 80), is_delta=is_delta, uses={"compile"}),
    )


OPERATION = KernelOperation(
    gated_delta_rule, reference.gated_delta_rule, tuple(KERNELS), _cases(is_delta=True), costs, ("xla",)
)
STATE_SPACE_OPERATION = KernelOperation(
    state_space, reference.state_space, tuple(KERNELS), _cases(is_delta=False), costs, ("xla",)
)
