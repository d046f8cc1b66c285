"""The emulator of PTX: the results of instructions, and the errors that it finds in kernels."""

import ml_dtypes
import numpy as np
import pytest
from machine_code.machine import EmulationError
from machine_code.tensor_cores import places_of_matrix
from machine_code.tensor_maps import TensorMap
from ptx_fixtures import LANES, run


def computed(instructions, *operands, dtype=np.float32):
    """Return %r9 after instructions, with the operands in %r1 and following."""
    loads = " ".join(f"ld.global.b32 %r{i + 1}, [%rd{10 + i}];" for i in range(len(operands)))
    store = f"st.global.b32 [%rd{10 + len(operands)}], %r9;"
    filled = [np.resize(np.asarray(x), 32) for x in operands]
    (result,) = run(f"{loads} {instructions} {store}", *filled, results=[np.zeros(32, dtype)])
    return result


FLOATS = np.float32([1.5, -2.25, 0.0, -0.0, 3e38, 1e-40, np.inf, -np.inf, np.nan, 1 + 2**-11])
WORDS = np.uint32([0, 1, 2**31, 2**32 - 1, 0xDEADBEEF, 7])


@pytest.mark.parametrize(
    "instruction, operands, expected",
    [
        ("add.rn.f32 %r9, %r1, 0f3F800000;", [FLOATS], FLOATS + np.float32(1)),
        ("mul.f32 %r9, %r1, 0fC0000000;", [FLOATS[:4]], -2 * FLOATS[:4]),
        ("fma.rn.f32 %r9, %r1, %r1, %r1;", [FLOATS[:4]], FLOATS[:4] * FLOATS[:4] + FLOATS[:4]),
        ("fma.rm.f32 %r9, %r1, 0f3F800000, 0f33000000;", [np.float32([1.0, 2.0])], np.float32([1.0, 2.0])),
        ("fma.rm.f32 %r9, %r1, 0f3F800000, 0fB3000000;", [np.float32([1.0])], [np.nextafter(np.float32(1), 0)]),
        ("add.rm.f32 %r9, %r1, 0fA0000000;", [np.float32([1.0])], [np.nextafter(np.float32(1), 0)]),
        ("sub.rp.f32 %r9, %r1, 0fA0000000;", [np.float32([1.0])], [np.nextafter(np.float32(1), 2)]),
        ("fma.rz.f32 %r9, %r1, 0fBF800000, 0f20000000;", [np.float32([1.0])], [-np.nextafter(np.float32(1), 0)]),
        ("cvt.sat.f32.f32 %r9, %r1;", [FLOATS], [1, 0, 0, 0, 1, 1e-40, 1, 0, 0, 1]),
        ("ex2.approx.ftz.f32 %r9, %r1;", [np.float32([0, 3, -150, -np.inf])], [1, 8, 0, 0]),
        ("max.f32 %r9, %r1, 0f00000000;", [FLOATS], np.fmax(FLOATS, 0)),
        ("max.NaN.f32 %r9, %r1, 0f00000000;", [FLOATS], np.maximum(FLOATS, 0)),
        ("div.full.f32 %r9, %r1, %r2;", [np.float32([6, 1]), np.float32([3, 0])], [2, np.inf]),
        ("cvt.rna.tf32.f32 %r9, %r1;", [np.float32([1 + 2**-11, 1 + 2**-12])], [1 + 2**-10, 1]),
        ("cvt.rn.f32.s32 %r9, %r1;", [np.int32([-7, 2**24 + 1])], [-7, 2**24]),
        ("cvt.rn.bf16x2.f32 %r9, %r1, %r2;", [FLOATS[:1], FLOATS[1:2]], np.uint32([0x3FC0C010]).view("f4")),
        ("mov.b32 {%rs1, %rs2}, %r1; cvt.f32.bf16 %r9, %rs2;", [np.uint32([0x3FC0C010])], [1.5]),
        (
            "mov.b32 {%rs1, %rs2}, %r1; cvt.rn.f16x2.e4m3x2 %r9, %rs1;",  # 448 and −2
            [np.uint32([0xC07E])],
            np.uint32([0xC0005F00]).view("f4"),
        ),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r9, {%rs2, %rs1};", [FLOATS[:1]], np.uint32([0x3FC0]).view("f4")),
        ("setp.lt.f32 %p1, %r1, 0f00000000; selp.f32 %r9, 0f3F800000, 0f00000000, %p1;", [FLOATS], FLOATS < 0),
        ("setp.geu.f32 %p1, %r1, 0f00000000; selp.f32 %r9, 0f3F800000, 0f00000000, %p1;", [FLOATS], ~(FLOATS < 0)),
        ("copysign.f32 %r9, %r1, 0f40000000;", [FLOATS[:4]], [2, -2, 2, -2]),
    ],
)
def test_floating_point(instruction, operands, expected):
    expected = np.asarray(expected, np.float32)
    np.testing.assert_array_equal(computed(instruction, *operands)[: len(expected)], expected)


@pytest.mark.parametrize(
    "instruction, operands, expected",
    [
        ("add.s32 %r9, %r1, -1;", [WORDS], WORDS - np.uint32(1)),
        ("shl.b32 %r9, %r1, 33;", [WORDS], 0 * WORDS),
        ("shr.s32 %r9, %r1, 4;", [WORDS], (WORDS.view("i4") >> 4).view("u4")),
        ("shf.l.wrap.b32 %r9, %r1, %r1, 8;", [WORDS], WORDS << np.uint32(8) | WORDS >> np.uint32(24)),
        ("mul.hi.u32 %r9, %r1, %r1;", [WORDS], WORDS.astype("u8") ** 2 >> np.uint64(32)),
        (  # the quotient by three
            "cvt.u64.u32 %rd20, %r1; mul.hi.u64 %rd20, %rd20, -6148914691236517205; cvt.u32.u64 %r1, %rd20; "
            "shr.u32 %r9, %r1, 1;",
            [WORDS],
            WORDS // np.uint32(3),
        ),
        ("mul.wide.s32 %rd20, %r1, -2; cvt.u32.u64 %r9, %rd20;", [WORDS], WORDS * np.uint32(2**32 - 2)),
        ("mad.lo.s32 %r9, %r1, 3, %r1;", [WORDS], WORDS * np.uint32(4)),
        ("div.s32 %r9, %r1, 2;", [np.int32([7, -7]).view("u4")], np.int32([3, -3]).view("u4")),
        ("div.s32 %r9, %r1, 2;", [np.uint32([2**31])], np.uint32([3 * 2**30])),
        ("bfe.u32 %r9, %r1, 4, 8;", [WORDS], WORDS >> np.uint32(4) & np.uint32(255)),
        ("bfe.s32 %r9, %r1, 0, 1;", [WORDS], np.where(WORDS & np.uint32(1), np.uint32(2**32 - 1), np.uint32(0))),
        ("prmt.b32 %r9, %r1, %r2, 0x3210;", [WORDS, WORDS[::-1]], WORDS),
        ("prmt.b32 %r9, %r1, 0, 0x4443;", [WORDS], WORDS >> np.uint32(24)),
        (
            "{ .reg .b16 a<2>; .reg .b32 a; mov.b32 a, %r1; mov.b32 {a0, a1}, a; mov.b32 %r9, {a1, a0}; }",
            [WORDS],
            WORDS << np.uint32(16) | WORDS >> np.uint32(16),
        ),
        ("lop3.b32 %r9, %r1, %r2, 255, 0x78;", [WORDS, WORDS[::-1]], WORDS ^ (WORDS[::-1] & np.uint32(255))),
        ("not.b32 %r9, %r1;", [WORDS], ~WORDS),
        ("min.s32 %r9, %r1, 5;", [WORDS], np.minimum(WORDS.view("i4"), 5).view("u4")),
        ("min.relu.s32 %r9, %r1, 5;", [WORDS], np.clip(WORDS.view("i4"), 0, 5).view("u4")),
        (
            "cvt.rzi.s32.f32 %r9, %r1;",
            [np.float32([1e30, -1e30, np.nan, -2.5]).view("u4")],
            [2**31 - 1, 2**31, 0, 2**32 - 2],
        ),
        ("popc.b32 %r9, %r1;", [WORDS], np.bitwise_count(WORDS)),
        ("clz.b32 %r9, %r1;", [WORDS], [32, 31, 0, 0, 0, 29]),
        ("setp.ne.b32 %p1, %r1, 0; @!%p1 mov.b32 %r1, 5; mov.b32 %r9, %r1;", [WORDS], np.where(WORDS, WORDS, 5)),
    ],
)
def test_integers(instruction, operands, expected):
    np.testing.assert_array_equal(computed(instruction, *operands, dtype=np.uint32)[: len(expected)], expected)


@pytest.mark.parametrize(
    "shuffle, expected",
    [
        ("bfly.b32 %r9, %r1, 3, 31, -1", LANES ^ 3),
        ("down.b32 %r9, %r1, 4, 31, -1", np.where(LANES < 28, LANES + 4, LANES)),
        ("up.b32 %r9, %r1, 1, 0, -1", np.maximum(LANES, 1) - 1),
        ("idx.b32 %r9, %r1, 5, 31, -1", np.full(32, 5)),
        ("idx.b32 %r9, %r1, 1, 0x1C1F, -1", LANES // 4 * 4 + 1),  # in groups of four
    ],
)
def test_shuffles(shuffle, expected):
    np.testing.assert_array_equal(computed(f"shfl.sync.{shuffle};", LANES, dtype=np.uint32), expected)


def test_threads_diverge_and_reconverge():
    """Each thread adds its index as often as its index says, then all exchange sums."""
    body = """
    mov.b32 %r1, 0; mov.b32 %r2, 0;
    $again: setp.ge.u32 %p1, %r2, %r0; @%p1 bra $done;
    add.s32 %r1, %r1, %r0; add.s32 %r2, %r2, 1; bra.uni $again;
    $done: shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1; st.global.b32 [%rd10], %r3;
    """
    np.testing.assert_array_equal(run(body)[0], (LANES ^ 1) ** 2)


def test_labels_belong_to_their_scope():
    wait = "{ .reg .pred q; again: setp.eq.u32 q, %r0, %r0; @q bra.uni done; bra.uni again; done: }"
    np.testing.assert_array_equal(run(f"{wait} {wait} st.global.b32 [%rd10], %r0;")[0], LANES)


@pytest.mark.parametrize(
    "body, message",
    [
        ("ld.global.b32 %r1, [%rd10+4];", "accesses bytes 128 to 131 of operand 0, which has 128"),
        (
            "setp.eq.u32 %p1, %r0, 1; @%p1 ld.global.v2.b32 {%r1, %r2}, [%rd10];",
            "an access of 8 bytes to operand 0 is not aligned",
        ),
        ("st.global.b32 [%rd10], %r0;", "writes to operand 0"),
        ("mov.b64 %rd20, 0; ld.global.b32 %r1, [%rd20];", "accesses 0x0, which is in no array"),
        ("ld.shared.b32 %r1, [held+300000];", "accesses byte 300000 of 4096 in shared memory"),
        ("bar.sync 1, 64;", "deadlock: 32 threads wait at bar.sync 1, 64"),
        ("bar.sync 1, 7;", "a barrier must expect whole warps"),
        ("setp.eq.u32 %p1, %r0, 3; @%p1 bar.sync 1, 32;", "only a part of a warp waits"),
        ("setp.eq.u32 %p1, %r0, 3; @%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", "only a part of 32 threads"),
        ("mbarrier.arrive.shared.b64 %rd20, [held];", "there is no mbarrier at 0"),
        ("mbarrier.init.shared.b64 [held+4], 1;", "an mbarrier is not aligned to 8 bytes"),
        ("cp.async.cg.shared.global [held], [%rd10], 0x10;", "copies of 16 bytes are not aligned"),
        ("cp.async.ca.shared.global [held], [%rd10+65536], 0x4;", "accesses bytes 65536 to 65539 of operand 0"),
    ],
)
def test_invalid_kernels_are_refused(body, message):
    with pytest.raises(EmulationError) as raised:
        run(body, np.zeros(32, np.uint32))
    assert message in str(raised.value) and str(raised.value).startswith("kernel: ")


def test_races_between_blocks_are_found():
    with pytest.raises(EmulationError, match="two blocks write to the same place of result 0"):
        run("st.global.b32 [%rd10], %r0;", blocks=2)
    with pytest.raises(EmulationError, match="reads what another block wrote to result 0"):
        run(
            """mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0;
            @%p1 st.global.b32 [%rd10], %r0; @!%p1 ld.global.b32 %r2, [%rd10];""",
            blocks=2,
        )
    with pytest.raises(EmulationError, match="two blocks write to the same place of result 0"):
        run(  # the second half of the other's word
            """mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; mov.b16 %rs1, 7;
            @%p1 st.global.b32 [%rd10], %r0; @!%p1 st.global.b16 [%rd10+2], %rs1;""",
            blocks=2,
        )


ACROSS = """
    cvt.u32.u64 %r2, %rd90; st.shared.b32 [%r2], %r0; WAIT
    xor.b32 %r3, %r2, 512; ld.shared.b32 %r1, [%r3]; st.global.b32 [%rd10], %r1;
"""


@pytest.mark.parametrize("late", [True, False])
def test_only_barriers_synchronize_warpgroups(late):
    """A warpgroup reads another's writes only after a barrier."""
    how = dict(results=[np.zeros(256, np.uint32)], threads=256, late=late)
    np.testing.assert_array_equal(run(ACROSS.replace("WAIT", "bar.sync 0;"), **how)[0], np.arange(256) ^ 128)
    assert np.sum(run(ACROSS.replace("WAIT", ""), **how)[0] == 2**32 - 1) == 128


def test_a_barrier_does_not_wait_for_ended_threads():
    """A barrier without a count waits for the remaining threads."""
    body = """
    mov.b32 %r1, 1; setp.lt.u32 %p1, %r0, 128; @!%p1 bra $late; bar.sync 0; bra.uni $store;
    $late: add.s32 %r1, %r1, 1; ret; $store: st.global.b32 [%rd10], %r1;
    """
    (made,) = run(body, results=[np.zeros(256, np.uint32)], threads=256)
    assert np.all(made[:128] == 1) and np.all(made[128:] == 2**32 - 1)


def _lanes(tile, rows_of_eight):
    """Return each thread's pairs of a matrix of 16 bits, in the order of its registers."""
    pairs = np.ascontiguousarray(tile).view(np.uint32)
    return [pairs[8 * i : 8 * i + 8, 4 * j : 4 * j + 4].reshape(-1) for i, j in rows_of_eight]


def test_products_of_warps():
    """m16n8k16 of integers that bfloat16 and the sums represent; a's rows are in groups of eight, and b's columns."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(-8, 8, (16, 16)), generator.integers(-8, 8, (8, 16))
    held = [x.astype(ml_dtypes.bfloat16) for x in (a, b)]
    operands = _lanes(held[0], [(0, 0), (1, 0), (0, 1), (1, 1)]) + _lanes(held[1], [(0, 0), (0, 1)])
    loads = " ".join(f"ld.global.b32 %r{i + 1}, [%rd{10 + i}];" for i in range(6))
    stores = " ".join(f"st.global.b32 [%rd{16 + i}], %r{20 + i};" for i in range(4))
    zeros = " ".join(f"mov.b32 %r{20 + i}, 0;" for i in range(4))
    sums = "{%r20, %r21, %r22, %r23}"
    body = f"""{loads} {zeros} mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {sums}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {sums}; {stores}"""
    made = run(body, *operands, results=[np.zeros(32, np.float32)] * 4)
    product = np.zeros((16, 8))
    for i, part in enumerate(made):
        product[i // 2 * 8 + LANES // 4, LANES % 4 * 2 + i % 2] = part
    np.testing.assert_array_equal(product, a @ b.T)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_from_shared_memory(transposed):
    operand = np.arange(64, dtype=np.uint16).reshape(8, 8)
    body = f"""
    ld.global.b32 %r1, [%rd10]; cvt.u32.u64 %r2, %rd90; st.shared.b32 [%r2], %r1; bar.sync 0;
    shl.b32 %r3, %r0, 4; and.b32 %r3, %r3, 127;
    ldmatrix.sync.aligned.m8n8.x1{".trans" if transposed else ""}.shared.b16 {{%r4}}, [%r3]; st.global.b32 [%rd11], %r4;
    """
    (made,) = run(body, operand.view(np.uint32))
    expected = np.ascontiguousarray(operand.T if transposed else operand).view(np.uint32)
    np.testing.assert_array_equal(made, expected.reshape(-1))


def test_narrow_and_float32_numbers_are_added():
    """add.f32.bf16: the first operand is of 16 bits."""
    narrow = np.float32([1.5, -2.0, 0.25, np.inf]).astype(ml_dtypes.bfloat16).astype(np.float32)
    wide = np.float32([1e-3, 3.0, -0.25, 1.0])
    instructions = "mov.b32 {%rs1, %rs2}, %r1; add.rn.f32.bf16 %r9, %rs2, %r2; "
    instructions += "fma.rn.f32.bf16 %r9, %rs2, %rs2, %r9;"
    made = computed(instructions, narrow, wide)
    np.testing.assert_array_equal(made[:4], narrow * narrow + (narrow + wide))


@pytest.mark.parametrize("operation, expected", [("max", 31), ("min", -2), ("max.NaN", np.nan), ("min.NaN", np.nan)])
def test_the_largest_of_a_warp(operation, expected):
    values = np.arange(32, dtype=np.float32)
    values[[3, 7]] = np.nan, -2
    made = computed(f"redux.sync.{operation}.f32 %r9, %r1, 0xFFFFFFFF;", values)
    np.testing.assert_array_equal(made, np.full(32, expected, np.float32))


@pytest.mark.parametrize("operation, expected", [("max", 28), ("min", -3)])
def test_the_largest_whole_number_of_a_warp(operation, expected):
    made = computed(
        f"redux.sync.{operation}.s32 %r9, %r1, 0xFFFFFFFF;", np.arange(-3, 29, dtype=np.int32), dtype=np.int32
    )
    np.testing.assert_array_equal(made, np.full(32, expected, np.int32))


@pytest.mark.parametrize("waits", [True, False])
def test_products_of_warpgroups(waits):
    """64 × 8 × 16 in shared memory without a swizzle, twice into the same sums, written when they are waited for."""
    generator = np.random.default_rng(0)
    a, b = generator.integers(-8, 8, (64, 16)), generator.integers(-8, 8, (8, 16))
    # Core matrices of eight rows of 16 bytes, consecutive along depth, then along rows.
    cores = np.concatenate([x.reshape(-1, 8, 2, 8).swapaxes(1, 2).reshape(-1) for x in (a, b)])
    held = np.resize(cores.astype(ml_dtypes.bfloat16), 2048)  # 128 threads copy 32 bytes each
    described = 8 << 16 | 16 << 32  # 128 bytes along depth, 256 along rows
    sums = "{%r20, %r21, %r22, %r23}"
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " + f"{sums}, %rd30, %rd31, KEPT, 1, 1, 0, 0;"
    body = f"""
    shl.b32 %r2, %r0, 5; cvt.u64.u32 %rd20, %r2; add.s64 %rd21, %rd0, %rd20;
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd21]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd21+16]; st.shared.v4.b32 [%r2+16], {{%r3, %r4, %r5, %r6}};
    bar.sync 0; mov.b64 %rd30, {described}; mov.b64 %rd31, {described | 2048 >> 4};
    {product.replace("KEPT", "0")} {product.replace("KEPT", "1")} wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned {0 if waits else 1};
    {" ".join(f"st.global.b32 [%rd{11 + i}], %r{20 + i};" for i in range(4))}
    wgmma.wait_group.sync.aligned 0;
    """
    made = run(body, held, results=[np.zeros(128, np.float32)] * 4, threads=128)
    if not waits:
        assert np.isnan(made).all()
        return
    result, thread = np.zeros((64, 8)), np.arange(128)
    for i, part in enumerate(made):
        result[thread // 32 * 16 + thread % 32 // 4 + i // 2 * 8, thread % 4 * 2 + i % 2] = part
    np.testing.assert_array_equal(result, 2 * a @ b.T)


TENSOR_MEMORY = {
    "allocate": "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [more+520], 32; bar.sync 0;",
    "multiply": """
        @%p2 tcgen05.mma.cta_group::1.kind::KIND [ %r30 + 0 ], A, %rd61, %r31, %p3;
        @%p2 tcgen05.mma.cta_group::1.kind::KIND [ %r30 + 0 ], A, %rd61, %r31, %p2;
        @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [more+512];
    """,
    "wait": "$wait: mbarrier.try_wait.parity.shared::cta.b64 %p5, [more+512], 0; @!%p5 bra $wait;",
    "read": "tcgen05.ld.sync.aligned.32x32b.x16.b32 {MADE}, [%r33 + 0]; tcgen05.wait::ld.sync.aligned;",
    "free": "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;",
}
OVERWRITTEN = TENSOR_MEMORY["read"].replace(
    "tcgen05.wait::ld", "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r33 + 9], {%r3}; tcgen05.wait::st"
)


def in_tensor_memory(kind, a_there, parts=TENSOR_MEMORY):
    """128 × 16 and 16 × 16, or of tf32 128 × 8 and 8 × 16, twice into the same sums; a in shared or tensor memory."""
    dtype, described = {"f16": (ml_dtypes.bfloat16, 1), "tf32": (np.float32, 2)}[kind]
    generator, size = np.random.default_rng(0), np.dtype(dtype).itemsize
    a, b = (generator.integers(-8, 8, (rows, 32 // size)) for rows in (128, 16))
    # Core matrices of eight rows of 16 bytes, consecutive along depth, then along rows.
    cores = [x.reshape(-1, 8, 2, 16 // size).swapaxes(1, 2).reshape(-1).astype(dtype) for x in (a, b)]
    registers, made = (", ".join(f"%r{first + i}" for i in range(count)) for first, count in ((3, 8), (40, 16)))
    body = f"""
    .shared .align 128 .b8 more[1024];
    setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0; setp.gt.u32 %p3, %r0, 999;
    shl.b32 %r2, %r0, 5; cvt.u64.u32 %rd50, %r2; add.s64 %rd51, %rd0, %rd50; cvt.u32.u64 %r15, %rd90;
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd51]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd51+16]; st.shared.v4.b32 [%r2+16], {{%r3, %r4, %r5, %r6}};
    ld.global.b32 %r3, [%rd11]; st.shared.b32 [%r15+4096], %r3;
    @%p2 mbarrier.init.shared::cta.b64 [more+512], 1; {parts["allocate"]} ld.shared.b32 %r30, [more+520];
    mov.b32 %r31, {1 << 4 | described << 7 | described << 10 | 2 << 17 | 8 << 24};
    mov.b64 %rd60, {8 << 16 | 16 << 32}; mov.b64 %rd61, {4096 >> 4 | 8 << 16 | 16 << 32};
    shr.u32 %r33, %r0, 5; shl.b32 %r33, %r33, 21; add.s32 %r33, %r33, %r30; add.s32 %r34, %r30, 16;
    add.s64 %rd52, %rd2, %rd50;
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd52]; ld.global.v4.b32 {{%r7, %r8, %r9, %r10}}, [%rd52+16];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r33 + 16], {{{registers}}}; tcgen05.wait::st.sync.aligned; bar.sync 0;
    {parts["multiply"].replace("KIND", kind).replace(" A,", " [ %r34 + 0 ]," if a_there else " %rd60,")}
    {parts["wait"]}
    {parts["read"].replace("MADE", made)}
    mul.wide.u32 %rd53, %r0, 64; add.s64 %rd53, %rd3, %rd53;
    {" ".join(f"st.global.b32 [%rd53+{4 * i}], %r{40 + i};" for i in range(16))}
    {parts["free"]}
    """
    (made,) = run(body, *cores, a.astype(dtype), results=[np.zeros((128, 16), np.float32)], threads=128)
    np.testing.assert_array_equal(made, 2 * a @ b.T)


@pytest.mark.parametrize("a_there", [True, False])
@pytest.mark.parametrize("kind", ["f16", "tf32"])
def test_products_in_tensor_memory(kind, a_there):
    in_tensor_memory(kind, a_there)


@pytest.mark.parametrize(
    "part, instead, problem",
    [
        ("allocate", "@%p2 st.shared.b32 [more+520], 0; bar.sync 0;", "accesses tensor memory that is not allocated"),
        ("allocate", TENSOR_MEMORY["allocate"].replace("32;", "16;"), "accesses tensor memory that is not allocated"),
        (
            "allocate",
            TENSOR_MEMORY["allocate"].replace("32;", "1024;"),
            "allocates 1024 columns of tensor memory, of which 512 are free",
        ),
        ("wait", "", "the last thread exits before a product"),
        ("read", OVERWRITTEN, "writes tensor memory while a load of it is pending"),
        ("free", "", "exits without freeing tensor memory"),
        ("free", TENSOR_MEMORY["free"].replace("32;", "64;"), "frees 64 columns of tensor memory from 0, which"),
    ],
)
def test_invalid_uses_of_tensor_memory_are_refused(part, instead, problem):
    with pytest.raises(EmulationError, match=problem):
        in_tensor_memory("f16", False, TENSOR_MEMORY | {part: instead})


def registers_of_products(*steps):
    """Run two products, the first from registers 3 to 6 into 20 to 23, the second from 7 to 10 into 24 to 27."""
    products = (
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{sums}}}, {{{operand}}}, %rd31, 0, 1, 1, 0; "
        "wgmma.commit_group.sync.aligned;"
        for sums, operand in (
            ("%r20, %r21, %r22, %r23", "%r3, %r4, %r5, %r6"),
            ("%r24, %r25, %r26, %r27", "%r7, %r8, %r9, %r10"),
        )
    )
    known = dict(zip(("first", "second"), products, strict=True))
    known["into an operand"] = known["second"].replace("%r24", "%r3")
    zeros = " ".join(f"mov.b32 %r{i}, 0;" for i in range(3, 11))
    made = (known[step] if step in known else step for step in steps)
    body = f"mov.b64 %rd31, {8 << 16 | 16 << 32}; {zeros} {' '.join(made)}"
    run(body, np.zeros(128, np.float32), results=[np.zeros(128, np.float32)], threads=128)


WAIT = ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;")
WRITE = {register: f"mov.b32 {register}, 1;" for register in ("%r3", "%r7", "%r20", "%r24")}


def test_registers_of_finished_products_are_writable():
    registers_of_products(*WRITE.values(), "first", WAIT[0], WRITE["%r3"], WRITE["%r20"])
    registers_of_products("first", "second", WAIT[1], WRITE["%r3"], WRITE["%r20"], WAIT[0], WRITE["%r7"])
    registers_of_products("first", "first", WAIT[0])


@pytest.mark.parametrize(
    "steps, problem",
    [
        (("first", WRITE["%r20"], WAIT[0]), "writes %r20, which a pending product still uses"),
        (("first", WRITE["%r3"], WAIT[0]), "writes %r3, which"),
        (("first", "second", WAIT[1], WRITE["%r7"], WAIT[0]), "writes %r7, which"),
        (("first", "second", WAIT[1], WRITE["%r24"], WAIT[0]), "writes %r24, which"),
        (("first", "into an operand", WAIT[0]), "accumulates in %r3, which"),
    ],
)
def test_writes_to_registers_of_pending_products_are_found(steps, problem):
    with pytest.raises(EmulationError, match=problem):
        registers_of_products(*steps)


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;",
        "add.sat.s32 %r1, %r0, 1;",
        "cvt.rn.relu.bf16x2.f32 %r1, %r0, %r0;",
        "cvt.rz.tf32.f32 %r1, %r0;",
        "cvt.rn.e4m3x2.f32 %r1, %r0;",
        "max.xorsign.abs.f32 %r1, %r0, %r0;",
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, 1;",
        "elect.sync %r1|%p1, 0xFFFF0000;",
        "mov.u32 %r1, %cluster_ctarank;",
        "cp.async.cg.shared.global.L2::cache_hint [held], [%rd0], 16, %rd1;",
    ],
)
def test_unknown_instructions_are_named(instruction):
    with pytest.raises(NotImplementedError) as raised:
        run(instruction)
    assert str(raised.value) == f"kernel: cannot emulate {instruction.rstrip(';')}"


def test_a_copy_arrives_when_it_is_waited_for():
    """Shared memory keeps its initial values until then."""
    operand = np.arange(32, dtype=np.uint32)
    copy = """
    cvt.u32.u64 %r2, %rd90; cp.async.ca.shared.global [%r2], [%rd10], 0x4; cp.async.commit_group;
    WAIT ld.shared.b32 %r1, [%r2]; st.global.b32 [%rd11], %r1;
    """
    np.testing.assert_array_equal(run(copy.replace("WAIT", "cp.async.wait_group 0;"), operand)[0], operand)
    assert np.all(run(copy.replace("WAIT", "cp.async.wait_group 1;"), operand)[0] == 2**32 - 1)


FETCH = """
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [held+1024], 1;
    bar.sync 0;
    mov.b64 %rd20, kernel_param_2;
    mov.b32 %r5, -1; mov.b32 %r6, 2;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd21, [held+1024], EXPECTED;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [held], [%rd20, {%r5, %r6}], [held+1024];
    { .reg .pred q; again: mbarrier.try_wait.parity.shared.b64 q, [held+1024], 0;
    @q bra.uni done; bra.uni again; done: }
    ld.shared.b32 %r1, [%rd90]; st.global.b32 [%rd11], %r1;
"""


@pytest.mark.parametrize("late", [True, False])
def test_the_copy_engine_pads_with_zeros(late):
    """The box is 4 × 8, from row 2 and column −1 of 5 × 6."""
    operand = np.arange(1, 31, dtype=np.uint32).reshape(5, 6)
    known = TensorMap(0, np.dtype(np.float32), (5, 6), (6, 1), (4, 8), 16)
    results = [np.zeros(32, np.uint32), np.zeros(1)]
    made, _ = run(FETCH.replace("EXPECTED", "128"), operand, results=results, parameters=[0, 1, {0: known}], late=late)
    expected = np.zeros((4, 8), np.uint32)
    expected[:3, 1:7] = operand[2:]
    np.testing.assert_array_equal(made.reshape(4, 8), expected)
    with pytest.raises(EmulationError, match="deadlock: 32 threads wait"):
        run(FETCH.replace("EXPECTED", "132"), operand, results=results, parameters=[0, 1, {0: known}], late=late)


@pytest.mark.parametrize("mode, width", [(1, 128), (2, 64), (3, 32)])
def test_wgmma_reads_a_swizzled_matrix_where_the_copy_engine_puts_it(mode, width):
    """Rows of `width` bytes, elements of 16 bits: addresses by wgmma's descriptor and by the copy's swizzle agree."""
    operand = np.arange(16 * width // 2, dtype=np.uint16).reshape(16, -1)
    known = TensorMap(0, operand.dtype, operand.shape, (width // 2, 1), operand.shape, width)
    description = np.uint64(mode) << np.uint64(62) | np.uint64(8 * width // 16) << np.uint64(32) | np.uint64(1)
    places = places_of_matrix(np.array([description]), 16, 16, 2, False)[0] - 16
    assert places.min() >= 0 and len(np.unique(places)) == 256
    shared = np.zeros(16 * width, np.uint8).view(np.uint16)
    offsets, _ = known.places((0, 0))
    chunk = offsets // 16 ^ offsets // 128 % (width // 16)  # of 16 bytes, by the 128 bytes that it is in
    shared[(chunk * 16 + offsets % 16) // 2] = operand.reshape(-1)
    base = places_of_matrix(np.array([description - np.uint64(1)]), 16, 16, 2, False)[0]
    np.testing.assert_array_equal(shared[base // 2], operand[:, :16])
