"""All operations, with their references, cases and costs."""

from kernels_pallas.cases import Operation
from kernels_pallas.rms_norm.cases import OPERATION as rms_norm

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (rms_norm,)}
