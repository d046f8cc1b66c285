"""Figures read from PTX and from the assembler; the kernels themselves are tested in tests/kernels."""

import importlib.util
import platform
import sys

import pytest

from jaxlm.core.errors import InputError
from jaxlm.lowering import assembly
from jaxlm.lowering.assembly import assemble

LINUX = sys.platform == "linux" and platform.machine() == "x86_64"

PTX = """
.version 8.0
.target sm_80
.address_size 64

.visible .entry copy(.param .u64 from, .param .u64 to)
.reqntid 128, 1, 1
{
	.reg .b64 %rd<3>;
	.reg .f32 %f<6>;
	ld.param.u64 %rd1, [from];
	ld.param.u64 %rd2, [to];
	ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
	ld.global.f32 %f5, [%rd1+16];
	{
	add.f32 %f1, %f1, %f5;
}
	st.global.f32 [%rd2], %f1;
	st.global.v2.f32 [%rd2+8], {%f2, %f3};
	ret;
}

.visible .entry nothing()
.maxntid 32
{
	ret;
}
"""


@pytest.mark.skipif(not LINUX, reason="the assembler is for Linux on x86-64")
def test_figures_of_the_assembler():
    copy, nothing = assemble(PTX)
    assert copy[:2] == ("copy", 128) and 4 < copy.registers < 32
    assert copy[3:7] == (0, 16, 8, "")  # most bytes are read by the wide load and written by the wide store
    assert copy.hot.bytes == 32 * (20 + 12) and copy.hot.multiply_adds == 0
    assert nothing[:2] == ("nothing", 32) and nothing[3:7] == (0, 0, 0, "")


@pytest.mark.skipif(not LINUX, reason="the assembler is for Linux on x86-64")
def test_a_rejected_kernel_raises():
    with pytest.raises(RuntimeError, match="ptxas rejects a kernel"):
        assemble(PTX.replace("add.f32", "add.f31"))


@pytest.mark.skipif(not LINUX, reason="the assembler is for Linux on x86-64")
@pytest.mark.parametrize("early", [True, False])
def test_products_that_wait_for_each_other_are_refused(early):
    """A register that wgmma reads is written before the wait for it."""
    waited = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    write = "ld.global.b32 %r4, [%rd1+4];"
    product = """
.version 8.0
.target sm_90a
.address_size 64

.visible .entry product(.param .u64 from)
.reqntid 128, 1, 1
{
	.reg .b64 %rd<3>;
	.reg .b32 %r<9>;
	ld.param.u64 %rd1, [from];
	mov.b64 %rd2, 34359738368;
	ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd1];
	ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd1+16];
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, %rd2, 1, 1, 1, 0;
	STEPS
	st.global.v4.b32 [%rd1], {%r0, %r1, %r2, %r3};
	st.global.v4.b32 [%rd1+16], {%r4, %r5, %r6, %r7};
	ret;
}
"""
    if early:
        with pytest.raises(RuntimeError, match="wgmma.mma_async instructions are serialized due to"):
            assemble(product.replace("STEPS", f"{write} {waited}"))
    else:
        (kernel,) = assemble(product.replace("STEPS", f"{waited} {write}"))
        assert kernel.products == "wgmma" and kernel.hot.multiply_adds == 16 * 8 * 16


def test_without_an_assembler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assembly.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"ptxas is not installed: pip install -e '.\[compile\]'"):
        assemble(PTX)
