"""Trip counts read from the arithmetic of loops, as XLA writes it."""

import itertools
import platform
import sys

import jax
import jax.numpy as jnp
import meshes
import pytest

from jaxlm.core.errors import InputError
from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import collectives, hlo, launched_kernels, loops, targets
from jaxlm.parallel.partition import named_sharding

# A loop whose state is (counter, array, limit), and computations that it may call.
STATE = "(s32[], f32[8,8], s32[])"
DOT = "f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
CALLED = """
%compared (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %test = pred[] compare(%b, %a), direction=LT
}
%stepped (a: f32[8,8], b: s32[]) -> (f32[8,8], s32[]) {
  %a = f32[8,8] parameter(0)
  %b = s32[] parameter(1)
  %two = s32[] constant(2)
  %sum = s32[] add(%two, %b)
  ROOT %both = (f32[8,8], s32[]) tuple(%a, %sum)
}
%sent (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8] parameter(0)
  ROOT %b = f32[8,8] all-reduce(%a), replica_groups={}
}
%kept (a: f32[8,8]) -> f32[8,8] {
  ROOT %a = f32[8,8] parameter(0)
}
"""


def program(
    start: str = "constant(0)",
    end: str = "constant(8)",
    step: str = "add(%i, %two)",
    test: str = "compare(%i, %end), direction=LT",
    limit: str = "copy(%k)",
    work: str = DOT,
    scope: str = "layers",
) -> hlo.HloProgram:
    """Return a program with a loop: `work` is what each trip does, all others are the counter's arithmetic."""
    return hlo.parse(f"""HloModule m
{CALLED}
%body (p: {STATE}) -> {STATE} {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8] get-tuple-element(%p), index=1
  %k = s32[] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] {step}
  %limit = s32[] {limit}
  %z = {work}
  ROOT %t = {STATE} tuple(%next, %z, %limit)
}}
%condition (p: {STATE}) -> pred[] {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %k = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %after = s32[] add(%one, %i)
  %end = s32[] {end}
  ROOT %test = pred[] {test}
}}
ENTRY %main (x: f32[8,8], n: s32[]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %n = s32[] parameter(1)
  %nine = s32[] constant(9)
  %start = s32[] {start}
  %t = {STATE} tuple(%start, %x, %nine)
  %loop = {STATE} while(%t), condition=%condition, body=%body, metadata={{op_name="jit(f)/{scope}/while"}}
  ROOT %y = f32[8,8] get-tuple-element(%loop), index=1
}}
""")


@pytest.mark.parametrize(
    "trips, written",
    [
        (4, {}),
        (5, {"end": "constant(9)"}),
        (3, {"start": "constant(3)"}),
        (0, {"start": "constant(8)"}),
        (6, {"start": "constant(-3)"}),
        (5, {"test": "compare(%i, %end), direction=LE"}),
        (4, {"test": "compare(%i, %end), direction=NE"}),
        (4, {"test": "compare(%end, %i), direction=GT"}),
        (5, {"test": "compare(%end, %i), direction=GE"}),
        (4, {"test": "compare(%after, %end), direction=LT"}),
        (5, {"test": "compare(%i, %k), direction=LT"}),
        (4, {"test": "fusion(%end, %i), kind=kLoop, calls=%compared"}),
        (4, {"test": "call(%end, %i), to_apply=%compared"}),
        (4, {"step": "get-tuple-element(%both), index=1\n"
                     "  %both = (f32[8,8], s32[]) fusion(%x, %i), kind=kLoop, calls=%stepped"}),
        (2, {"step": "add(%again, %two)\n  %again = s32[] copy(%once)\n  %once = s32[] add(%two, %i)"}),
        (6, {"start": "constant(11)", "end": "constant(0)", "step": "subtract(%i, %two)",
             "test": "compare(%i, %end), direction=GE"}),
        (5, {"start": "constant(9)", "end": "constant(0)", "step": "add(%less, %i)\n  %less = s32[] constant(-2)",
             "test": "compare(%i, %end), direction=GT"}),
    ],
)  # fmt: skip
def test_a_counter_gives_the_trips(trips, written):
    found = program(**written)
    assert loops.times(found)["body"] == trips
    assert loops.program_flops(found) == trips * 2 * 8**3


UNREADABLE = [
    {"start": "copy(%n)"},
    {"step": "multiply(%i, %two)"},
    {"step": "add(%i, %i)"},
    {"step": "subtract(%two, %i)"},
    {"step": "subtract(%i, %two)"},  # endless
    {"end": "constant(9)", "test": "compare(%i, %end), direction=NE"},  # steps over the end
    {"step": "add(%i, %k)", "limit": "copy(%i)"},
    {"test": "compare(%i, %k), direction=EQ"},
    {"test": "not(%less)\n  %less = pred[] compare(%i, %end), direction=LT"},
]


@pytest.mark.parametrize("written", UNREADABLE)
def test_nothing_is_counted_by_a_guess(written):
    counts = {
        DOT: loops.program_flops,
        "f32[8,8] all-reduce(%x), replica_groups={}": lambda found: collectives.collectives(found, {"fsdp": 4}),
        'f32[8,8] custom-call(%x), custom_call_target="tpu_custom_call"': launched_kernels.calls,
    }
    for work, count in counts.items():
        with pytest.raises(InputError, match=r"how often its loop loop \(layers\) runs"):
            count(program(work=work, **written))
    # It may depend on data if nothing in it is counted.
    assert loops.times(program(work="f32[8,8] negate(%x)", **written))["body"] == 1


def test_a_loop_over_rows_of_experts_names_the_kernels_that_take_its_place():
    found = program(start="copy(%n)", scope="layers/feed_forward/up/tiles_of_256_rows")
    with pytest.raises(InputError, match=r'tiles_of_256_rows\) runs.*: take execution.kernels = "auto" on a GPU'):
        loops.program_flops(found)


@pytest.mark.parametrize(
    "test, sent, kept",
    [
        ("compare(%next, %k), direction=LT", 4, 1),
        ("compare(%next, %k), direction=GE", 1, 4),
        ("compare(%i, %two), direction=EQ", 1, 4),
        ("parameter(1)", 5, 5),
    ],
)
def test_a_branch_may_run_in_some_trips(test, sent, kept):
    branches = "true_computation=%sent, false_computation=%kept"
    found = program(end="constant(9)", work=f"f32[8,8] conditional(%more, %x, %x), {branches}\n  %more = pred[] {test}")
    times = loops.times(found)
    assert (times["body"], times["sent"], times["kept"]) == (5, sent, kept)
    assert [c.count for c in collectives.collectives(found, {"fsdp": 4})] == [sent]


def test_a_loop_in_a_loop_and_one_that_goes_on_where_another_ends():
    """The state of an inner loop passes through the outer one; a state may be a single counter."""
    found = hlo.parse("""HloModule m
%step (i: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  %three = s32[] constant(3)
  ROOT %next = s32[] add(%i, %three)
}
%below (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %end = s32[] constant(10)
  ROOT %test = pred[] compare(%i, %end), direction=LT
}
%rest (i: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %next = s32[] add(%i, %one)
}
%above (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %end = s32[] constant(17)
  ROOT %test = pred[] compare(%i, %end), direction=LT
}
%inner (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %kept = s32[] get-tuple-element(%p), index=1
  %next = s32[] call(%i), to_apply=%step
  ROOT %t = (s32[], s32[]) tuple(%next, %kept)
}
%outer (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %zero = s32[] get-tuple-element(%p), index=1
  %first = s32[] while(%zero), condition=%below, body=%step
  %second = s32[] while(%first), condition=%above, body=%rest
  %u = (s32[], s32[]) tuple(%zero, %i)
  %third = (s32[], s32[]) while(%u), condition=%few, body=%inner
  %same = s32[] get-tuple-element(%third), index=1
  %next = s32[] call(%same), to_apply=%rest
  ROOT %t = (s32[], s32[]) tuple(%next, %zero)
}
%few (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %test = pred[] call(%i), to_apply=%below
}
ENTRY %main () -> (s32[], s32[]) {
  %zero = s32[] constant(0)
  %t = (s32[], s32[]) tuple(%zero, %zero)
  ROOT %loop = (s32[], s32[]) while(%t), condition=%few, body=%outer
}
""")
    times = loops.times(found)
    assert times["outer"] == 10 and times["inner"] == 10 * 4
    assert times["step"] == 10 * 4 + times["inner"]
    assert times["rest"] == 10 * (17 - 12) + times["outer"]


@pytest.mark.parametrize("direction", ["LT", "LE", "GT", "GE", "NE"])
def test_trips_are_those_of_the_loop_run(direction):
    holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}[direction]
    for distance, step in itertools.product(range(-7, 8), range(-3, 4)):
        run = itertools.takewhile(lambda at: holds(at, 0), itertools.count(distance, step))
        trips = len(list(itertools.islice(run, 100)))
        assert loops._trips(direction, distance, step) == (trips if trips < 100 else None)


def test_trips_read_are_those_that_xla_states():
    def body(x, w):
        return jnp.tanh(x @ w), None

    def step(x, w):
        x = jax.lax.scan(body, x, w)[0]
        x = jax.lax.fori_loop(2, 7, lambda i, x: jnp.tanh(x @ w[i]), x)
        down = (lambda at: at[0] >= 2, lambda at: (at[0] - 3, jnp.tanh(at[1] @ w[at[0]])))
        return jax.lax.while_loop(*down, (jnp.int32(10), x))[1]

    text = jax.jit(step).lower(jnp.ones((16, 16)), jnp.ones((11, 16, 16))).compile().as_text()
    stated, read = hlo.parse(text), hlo.parse(text.replace("known_trip_count", "not_said"))
    assert loops.times(read) == loops.times(stated)
    assert loops.program_flops(read) == (11 + 5 + 3) * 2 * 16**3


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the compilers are for Linux on x86-64"
)
@pytest.mark.parametrize(
    "product, right, result",
    [
        pytest.param("mk,kn->mn", ("embed", 512, 1024), ("batch", 65536, 1024), id="gathered"),
        pytest.param("mk,mn->kn", ("batch", 65536, 1024), ("embed", 512, 1024), id="scattered"),
    ],
)
def test_a_windowed_product_runs_once(product, right, result):
    """A TPU sends the parts of a matrix that is gathered, or of a result that is scattered, around during the product:
    a loop with two parts in either direction in each trip."""
    mesh = meshes.make(1, 16, 1, devices=targets.devices(Target.parse("tpu-v5e:4x4")))

    def sharded(axis: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=named_sharding((axis, None), shape, mesh))

    step = jax.jit(lambda x, w: jnp.einsum(product, x, w), out_shardings=sharded(*result).sharding)
    found = hlo.parse(step.lower(sharded("batch", 65536, 512), sharded(*right)).compile().as_text())
    assert [runs for name, runs in loops.times(found).items() if "windowed_dot_general_body" in name] == [4]
    assert loops.program_flops(found) == 2 * 65536 * 512 * 1024 // 16
    sent = collectives.collectives(found, dict(mesh.shape))
    assert {(c.kind, c.bytes, c.count) for c in sent if c.in_loop} == {("collective-permute", 2 * 32 * 1024, 16)}
