"""All operations, with their references, cases and costs."""

import difflib
from collections.abc import Iterable

from kernels_pallas.bias_activation.cases import OPERATION as BIAS_ACTIVATION
from kernels_pallas.core.cases import KernelOperation
from kernels_pallas.flash_attention.cases import OPERATION as FLASH_ATTENTION
from kernels_pallas.gated_activation.cases import OPERATION as GATED_ACTIVATION
from kernels_pallas.grouped_matmul.cases import OPERATION as GROUPED_MATMUL
from kernels_pallas.grouped_matmul.quantized_cases import OPERATION as QUANTIZED_GROUPED_MATMUL
from kernels_pallas.layer_norm.cases import OPERATION as LAYER_NORM
from kernels_pallas.linear_attention.cases import OPERATION as GATED_DELTA_RULE
from kernels_pallas.linear_attention.cases import STATE_SPACE_OPERATION as STATE_SPACE
from kernels_pallas.linear_cross_entropy.cases import OPERATION as LINEAR_CROSS_ENTROPY
from kernels_pallas.matmul.cases import OPERATION as MATMUL
from kernels_pallas.paged_attention.cases import OPERATION as PAGED_ATTENTION
from kernels_pallas.quantized_matmul.cases import OPERATION as QUANTIZED_MATMUL
from kernels_pallas.rms_norm.cases import OPERATION as RMS_NORM
from kernels_pallas.rotary_embedding.cases import OPERATION as ROTARY_EMBEDDING
from kernels_pallas.softmax.cases import LOG_OPERATION as LOG_SOFTMAX
from kernels_pallas.softmax.cases import OPERATION as SOFTMAX

OPERATIONS: dict[str, KernelOperation] = {
    operation.name: operation
    for operation in (
        RMS_NORM,
        LAYER_NORM,
        SOFTMAX,
        LOG_SOFTMAX,
        ROTARY_EMBEDDING,
        GATED_ACTIVATION,
        BIAS_ACTIVATION,
        MATMUL,
        GROUPED_MATMUL,
        QUANTIZED_MATMUL,
        QUANTIZED_GROUPED_MATMUL,
        GATED_DELTA_RULE,
        STATE_SPACE,
        LINEAR_CROSS_ENTROPY,
        FLASH_ATTENTION,
        PAGED_ATTENTION,
    )
}


def check(names: Iterable[str]) -> None:
    """Raise ValueError for a name that no operation has."""
    for name in names:
        if name not in OPERATIONS:
            near = difflib.get_close_matches(name, OPERATIONS, 1)
            instead = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPERATIONS)}"
            raise ValueError(f"there is no operation {name!r}; {instead}")
