"""What is read out of disassembled kernels; listings are like those of `nvdisasm -c`."""

import pytest

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering.sass import Hot, cycles, hottest, knows


def listing(name, *lines):
    """Of a kernel; a line that ends in a colon is a label."""
    body = "".join(
        f"{line}\n" if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;\n"
        for i, line in enumerate(lines)
    )
    return f'\t.section\t.text.{name},"ax",@progbits\n{name}:\n.text.{name}:\n{body}\n'


END = (".L_x_9:", "BRA `(.L_x_9)", "NOP", "NOP")


def test_a_kernel_without_loops_is_taken_whole():
    lines = ("LDG.E.128 R8, desc[UR6][R18.64]", "@P1 MUFU.EX2 R2, R2", "STG.E.U16 desc[UR6][R18.64], R8", "EXIT", *END)
    assert hottest(listing("copy", *lines)) == {"copy": Hot(5, 1, 0, 32 * 18)}


def test_of_several_kernels_each_is_found():
    one, two = listing("one", "FADD R1, R1, R2", *END), listing("two", "FADD R1, R1, R2", "FADD R1, R1, R2", *END)
    assert {name: hot.instructions for name, hot in hottest(one + two).items()} == {"one": 2, "two": 3}


def test_the_innermost_loop_that_works_is_taken():
    """Not that around it, nor those that only wait, nor the jump back from where waiting is out of line."""
    lines = (
        ".L_x_0:",
        "FADD R1, R1, R2",
        ".L_x_1:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11], R9",
        "@!P1 BRA `(.L_x_1)",
        ".L_x_2:",
        "FFMA R3, R1, R2, R3",
        "@!P1 BRA `(.L_x_5)",
        ".L_x_4:",
        "FFMA R4, R1, R2, R4",
        "@P0 BRA `(.L_x_2)",
        "@P2 BRA `(.L_x_0)",
        "EXIT",
        ".L_x_5:",
        "NANOSLEEP 0x1",
        "BRA `(.L_x_4)",
        *END,
    )
    assert hottest(listing("waits", *lines))["waits"] == Hot(4, 0, 0, 0)


@pytest.mark.parametrize(
    "product, multiply_adds",
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", 16 * 128 * 16),
        ("HGMMA.64x64x8.F32.TF32 R24, gdesc[UR8], R24", 2 * 16 * 64 * 8),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 16 * 8 * 16),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 2 * 16 * 8 * 8),
    ],
)
def test_of_two_loops_with_as_many_products_that_without_a_mask_is_taken(product, multiply_adds):
    lines = (
        ".L_x_0:",
        product,
        "@P0 BRA `(.L_x_0)",
        ".L_x_1:",
        product,
        "FSEL R1, R1, R2, P3",
        "@P0 BRA `(.L_x_1)",
        ".L_x_2:",
        *("FADD R1, R1, R2" for _ in range(9)),
        "@P0 BRA `(.L_x_2)",
        *END,
    )
    assert hottest(listing("attention", *lines))["attention"] == Hot(2, 0, multiply_adds, 0)


def test_cycles_of_units():
    """An H100 reads 3.35 TB/s for 528 quarters at 1.98 GHz, 3.2 bytes a cycle each."""
    chip = Target.parse("h100-sxm5:1").chip
    assert cycles(chip, Hot(10, 2, 0, 512)) == {"ISSUE": 10, "SPECIAL": 16, "MEMORY": pytest.approx(159.8, rel=1e-3)}
    assert cycles(chip, Hot(10, 2, 16 * 128 * 16, 512)) == {"ISSUE": 10, "SPECIAL": 16, "TENSOR": 64}
    assert not knows(Target.parse("b200-hgx:1").chip)
