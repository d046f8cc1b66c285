"""Figures read from PTX and from the assembler; the kernels themselves are tested in tests/kernels."""

import importlib.util
import os
import platform
import shutil
import sys

import pytest

from jaxlm.core.errors import InputError
from jaxlm.lowering import assemblers
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


# With one assembler alone, tests name the one that ran.
ASSEMBLERS = [pytest.param(each, id=f"CUDA {each.release}") for each in assemblers.assemblers()] if LINUX else []


@pytest.mark.skipif(not LINUX, reason="the assembler is for Linux on x86-64")
def test_two_releases_assemble_here():
    """The extra `test` has ptxas and the library of CUDA 13.0's assembler."""
    releases = [each.values[0].release for each in ASSEMBLERS]
    if shutil.which("cc") is None and not os.environ.get("CI"):
        pytest.skip(f"CUDA {releases[0]} alone assembles: without cc, the library of 13.0's cannot be linked")
    assert releases[1:] == ["13.0"] and releases[0] != "13.0"


@pytest.mark.parametrize("assembler", ASSEMBLERS)
def test_figures_of_the_assembler(assembler):
    copy, nothing = assemble(PTX, assembler)
    assert copy[:3] == ("copy", assembler.release, 128) and 4 < copy.registers < 32
    assert copy[4:9] == (0, 16, 8, "", "")  # most bytes are read by the wide load and written by the wide store
    assert copy.hot.bytes == 32 * (20 + 12) and copy.hot.multiply_adds == 0 and copy.done_to_needed is None
    assert nothing[:3] == ("nothing", assembler.release, 32) and nothing[4:9] == (0, 0, 0, "", "")


@pytest.mark.parametrize("assembler", ASSEMBLERS)
def test_a_rejected_kernel_raises(assembler):
    with pytest.raises(RuntimeError, match=f"assembler of CUDA {assembler.release} rejects a kernel: .*f31"):
        assemble(PTX.replace("add.f32", "add.f31"), assembler)


@pytest.mark.parametrize("assembler", ASSEMBLERS)
def test_ptx_of_a_later_version_is_assembled(assembler):
    """XLA writes PTX for its own assembler, which may be newer."""
    assert len(assemble(PTX.replace(".version 8.0", ".version 9.9"), assembler)) == 2


@pytest.mark.parametrize("assembler", ASSEMBLERS)
@pytest.mark.parametrize("early", [True, False])
def test_products_that_wait_for_each_other_are_noted(early, assembler):
    """A register that wgmma writes is written before the wait for it."""
    waited = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    write = "add.u32 %r0, %r0, 1;"
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
    (kernel,) = assemble(product.replace("STEPS", f"{write} {waited}" if early else f"{waited} {write}"), assembler)
    assert ("C7517" in kernel.remarks) == early and (early or not kernel.remarks)
    assert kernel.products == "wgmma" and (early or kernel.hot.multiply_adds == 16 * 8 * 16)


def test_without_an_assembler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assemblers.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"ptxas is not installed: pip install -e '.\[compile\]'"):
        assemble(PTX)
