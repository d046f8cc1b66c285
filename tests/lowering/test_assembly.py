"""What is read out of PTX and of what its assembler says; the kernels themselves are in tests/kernels."""

import importlib.util
import platform
import sys

import pytest

from jaxlm.errors import InputError
from jaxlm.lowering import assembly
from jaxlm.lowering.assembly import Assembled, assemble

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
def test_what_an_assembler_says():
    copy, nothing = assemble(PTX)
    assert copy[:2] == ("copy", 128) and 4 < copy.registers < 32
    assert copy[3:] == (0, 16, 8, "")  # most bytes are read by the one and written by the other
    assert nothing._replace(registers=0) == Assembled("nothing", 32, 0, 0, 0, 0, "")


@pytest.mark.skipif(not LINUX, reason="the assembler is for Linux on x86-64")
def test_what_it_refuses_is_said():
    with pytest.raises(RuntimeError, match="ptxas refuses a kernel"):
        assemble(PTX.replace("add.f32", "add.f31"))


def test_without_an_assembler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assembly.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"no ptxas here; pip install -e '.\[compile\]'"):
        assemble(PTX)
