"""Emulation of kernels in PTX that a test writes."""

import numpy as np
from machine_code import machine, ptx

LANES = np.arange(32, dtype=np.uint32)
WORD_EACH = (np.zeros(32, np.uint32),)


def run(body, *operands, results=WORD_EACH, threads=32, blocks=1, **how):
    """Run a kernel with this body and return its results.

    %rd0 and following point to the arrays, %rd10 and following to the thread's word in each; %r0 is the thread, %rd90
    its offset in bytes.
    """
    count = len(operands) + len(results)
    text = f"""
.version 9.0
.target sm_90a
.visible .entry kernel(
    {", ".join(f".param .u64 .ptr .align 256 kernel_param_{i}" for i in range(count))}
)
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<99>;
    .reg .b64 %rd<99>;
    .shared .align 128 .b8 held[4096];
    {" ".join(f"ld.param.b64 %rd{i}, [kernel_param_{i}];" for i in range(count))}
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd90, %r0, 4;
    {" ".join(f"add.s64 %rd{10 + i}, %rd{i}, %rd90;" for i in range(count))}
    {body}
    ret;
}}
"""
    (kernel,) = ptx.kernels(text)
    return machine.run(kernel, (blocks, 1, 1), operands, results, **how)
