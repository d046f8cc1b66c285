"""Hot loops of disassembled kernels; listings have the format of `nvdisasm -c`."""

import pytest

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering.sass import HotLoop, cycles, hot_loops, supports

NONE = HotLoop(*(0,) * 6)


def listing(name, *lines):
    """Return the listing of a kernel; a line that ends in a colon is a label."""
    body = "".join(
        f"{line}\n" if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;\n"
        for i, line in enumerate(lines)
    )
    return f'\t.section\t.text.{name},"ax",@progbits\n{name}:\n.text.{name}:\n{body}\n'


END = (".L_x_9:", "BRA `(.L_x_9)", "NOP", "NOP")


def test_a_kernel_without_loops_is_taken_whole():
    lines = ("LDG.E.128 R8, desc[UR6][R18.64]", "@P1 MUFU.EX2 R2, R2", "STG.E.U16 desc[UR6][R18.64], R8", "EXIT", *END)
    assert hot_loops(listing("copy", *lines)) == {"copy": NONE._replace(instructions=4, special=1, bytes=32 * 18)}


def test_each_of_several_kernels_is_found():
    one, two = listing("one", "FADD R1, R1, R2", *END), listing("two", "FADD R1, R1, R2", "FADD R1, R1, R2", *END)
    assert {name: hot.instructions for name, hot in hot_loops(one + two).items()} == {"one": 1, "two": 2}


@pytest.mark.parametrize("waiting", [("NANOSLEEP 0x1",), (".L_x_6:", "SYNCS P1, [UR11], R9", "@!P1 BRA `(.L_x_6)")])
def test_the_innermost_loop_that_works_is_taken(waiting):
    """Enclosing loops, loops that only wait, and the jump back from an out-of-line wait (on Hopper with a sleep, on
    Blackwell without) are not taken."""
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
        *waiting,
        "BRA `(.L_x_4)",
        *END,
    )
    assert hot_loops(listing("waits", *lines))["waits"] == NONE._replace(instructions=4, float32=2)


def test_jumps_back_to_one_label_are_one_loop():
    lines = (
        ".L_x_0:",
        "FADD R1, R1, R2",
        "@P0 BRA `(.L_x_0)",
        "FSEL R1, R1, R2, P3",
        "@P1 BRA `(.L_x_0)",
        "EXIT",
        *END,
    )
    assert hot_loops(listing("twice", *lines))["twice"] == NONE._replace(instructions=4, float32=1, integer=1)


def test_a_product_of_unknown_size_raises():
    with pytest.raises(NotImplementedError, match="unknown size of HMMA.323232.F32"):
        hot_loops(listing("new", "HMMA.323232.F32 R4, R8, R12, R4", *END))


@pytest.mark.parametrize(
    "product, multiply_adds",
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", 16 * 128 * 16),
        ("HGMMA.64x64x8.F32.TF32 R24, gdesc[UR8], R24", 2 * 16 * 64 * 8),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 16 * 8 * 16),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 2 * 16 * 8 * 8),
        ("HMMA.1684.F32.TF32 R4, R8, R12, R4", 2 * 16 * 8 * 4),
    ],
)
def test_of_two_loops_with_equal_products_the_unmasked_one_is_taken(product, multiply_adds):
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
    assert hot_loops(listing("attention", *lines))["attention"] == NONE._replace(
        instructions=2, multiply_adds=multiply_adds
    )


def test_cycles_of_units():
    """An H100 reads 3.35 TB/s for 528 quarters at 1.98 GHz, 3.2 bytes a cycle each."""
    chip, hot = Target.parse("h100-sxm5:1").chip, HotLoop(10, 2, 4, 1, 0, 512)
    arithmetic = {"ISSUE": 10, "SPECIAL": 16, "FLOAT32": 4, "INTEGER": 2}
    assert cycles(chip, hot) == arithmetic | {"MEMORY": pytest.approx(159.8, rel=1e-3)}
    assert cycles(chip, hot._replace(multiply_adds=16 * 128 * 16), cached=True) == arithmetic | {"TENSOR": 64}
    assert cycles(Target.parse("a100-sxm4-80g:1").chip, hot)["FLOAT32"] == 8
    assert not supports(Target.parse("b200-hgx:1").chip)
