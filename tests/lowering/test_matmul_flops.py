"""FLOPs of matrix products, read from XLA's text."""

import jax
import jax.numpy as jnp
import pytest

from jaxlm.lowering import hlo, loops


def flops(line: str, *operands: str) -> int:
    given = "\n".join(f"  %p{i} = {type} parameter({i})" for i, type in enumerate(operands))
    program = hlo.parse(f"HloModule m\nENTRY %main (p: f32[]) -> f32[] {{\n{given}\n  ROOT %y = {line}\n}}\n")
    return loops.program_flops(program)


@pytest.mark.parametrize(
    "line, left, right, expected",
    [
        (
            "f32[32,4,128,2]{3,2,1,0} dot(%p0, %p1), lhs_batch_dims={0,1}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0,2}, rhs_contracting_dims={3}",
            "f32[32,4,7,128]{3,2,1,0}", "f32[32,2,4,7]{3,2,1,0}", 2 * 32 * 4 * 128 * 2 * 7,
        ),
        # Products as a TPU's convolutions; batch dimensions are windows: none, dilated, padded, reversed.
        ("bf16[8,1536]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf",
         "bf16[8,1024]{1,0}", "bf16[1024,1536]{1,0}", 2 * 8 * 1536 * 1024),
        ("bf16[8,4,128]{2,1,0} convolution(%p0, %p1), window={size=4 pad=3_3 rhs_reversal=1}, "
         "dim_labels=bf0_i0o->b0f",
         "bf16[8,1024,1]{2,1,0}", "bf16[1024,4,128]{2,1,0}", 2 * 8 * 1024 * 4 * 128),
        ("f32[8,4,2,2048]{3,2,1,0} convolution(%p0, %p1), window={size=8x4 stride=7x3 lhs_dilate=8x4}, "
         "dim_labels=01bf_01oi->01bf",
         "bf16[8,4,2,128]{3,2,1,0}", "bf16[8,4,2048,128]{3,2,1,0}", 2 * 8 * 4 * 2 * 2048 * 128),
        ("f32[1,30,30,4]{3,2,1,0} convolution(%p0, %p1), window={size=3x3}, dim_labels=b01f_01io->b01f",
         "f32[1,32,32,2]{3,2,1,0}", "f32[3,3,2,4]{3,2,1,0}", 2 * 30 * 30 * 4 * 2 * 9),
        ('f32[8,32]{1,0} custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul", backend_config='
         '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
         "f32[8,16]{1,0}", "f32[16,32]{1,0}", 2 * 8 * 32 * 16),
        # A product with a vector, which XLA writes out for a GPU; and a multiplication that is none.
        ('f32[8,12,64]{2,1,0} multiply(%p0, %p1), metadata={op_name="jit(f)/attention/BKQH,BKSH->BKQS/dot_general"}',
         "f32[8,12,64]{2,1,0}", "f32[8,12,64]{2,1,0}", 2 * 8 * 12 * 64),
        ('s32[] multiply(%p0, %p1), metadata={op_name="jit(f)/up/dot_general"}', "s32[]", "s32[]", 0),
        ('f32[8,12,64]{2,1,0} multiply(%p0, %p1), metadata={op_name="jit(f)/norm/mul"}',
         "f32[8,12,64]{2,1,0}", "f32[8,12,64]{2,1,0}", 0),
        ("f32[8,16]{1,0} add(%p0, %p1)", "f32[8,16]{1,0}", "f32[8,16]{1,0}", 0),
    ],
)  # fmt: skip
def test_a_product(line, left, right, expected):
    assert flops(line, left, right) == expected


@pytest.mark.parametrize("name", ["multiply.1", "dot_general"])
def test_a_product_with_a_vector_counts_once(name):
    """XLA for TPUs gives the product's name to the sum alone."""
    text = f"""HloModule m
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
ENTRY %main (p: f32[8,12,64]) -> f32[8,64] {{
  %p = f32[8,12,64] parameter(0)
  %zero = f32[] constant(0)
  %both = f32[8,12,64] multiply(%p, %p), metadata={{op_name="jit(f)/{name}"}}
  ROOT %y = f32[8,64] reduce(%both, %zero), dimensions={{1}}, to_apply=%add, metadata={{op_name="jit(f)/dot_general"}}
}}
"""
    assert loops.program_flops(hlo.parse(text)) == 2 * 8 * 12 * 64


def test_loops_in_loops_multiply():
    def inner(x, _):
        return jnp.tanh(x @ x), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=3)[0] @ x, None

    compiled = jax.jit(lambda x: jax.lax.scan(outer, x, None, length=5)[0]).lower(jnp.ones((16, 16))).compile()
    assert loops.program_flops(hlo.parse(compiled.as_text())) == 5 * 4 * 2 * 16**3
