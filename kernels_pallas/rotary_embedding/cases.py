"""Test cases of rotary embeddings."""

from kernels_pallas import rotary_embedding as function
from kernels_pallas.core.cases import CaseArray, KernelCase, KernelOperation
from kernels_pallas.rotary_embedding import IMPLEMENTATIONS, costs, reference

_ALL = ("bfloat16", "float16", "float32")


def _case(name: str, shape: tuple[int, ...], interleaved: bool = False, *, learned: bool = False, **more) -> KernelCase:
    """Return a case with angles over the last dimensions of tokens. cos and sin may be any numbers, since the map is
    linear.
    """
    angle = CaseArray((*shape[-3:-2], shape[-1] // 2), "float32")
    if learned:
        angle = CaseArray((*shape[:-2], shape[-1] // 2))
    return KernelCase(name, {"x": CaseArray(shape), "cos": angle, "sin": angle}, {"interleaved": interleaved}, **more)


CASES = (
    _case("half-split", (4, 8, 4, 64), dtypes=_ALL),
    _case("interleaved", (2, 8, 4, 64), True, dtypes=_ALL),
    _case("odd shapes, half-split", (3, 5, 3, 40)),
    _case("odd shapes, interleaved", (3, 5, 3, 40), True),
    _case("gradients of the angles", (2, 5, 3, 16), learned=True),
    _case("one token", (1, 1, 128)),
    _case("empty batch", (0, 5, 2, 64)),
    _case("small", (64, 4, 64), uses={"bench"}),
    _case("Llama 3 8B, queries", (4, 2048, 32, 128), uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("Llama 3 8B, keys", (4, 2048, 8, 128), uses={"bench"}, dtypes=("bfloat16",)),
    _case("interleaved, GPT-J", (4, 2048, 16, 256), True, uses={"compile", "bench"}, dtypes=("bfloat16",)),
    _case("narrow heads", (2, 1000, 12, 80), uses={"compile"}),
)

OPERATION = KernelOperation(function, reference.rotary_embedding, IMPLEMENTATIONS, CASES, costs)
