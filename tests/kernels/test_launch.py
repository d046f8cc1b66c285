"""The assumptions of launch.py about JAX still hold."""

import functools
import re
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from markers import ELSEWHERE
from matrices import sampled

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from kernels_pallas import flash_attention, matmul, rms_norm
from kernels_pallas.core import interpreted, launch
from kernels_pallas.flash_attention import causal, intersection, packed


@ELSEWHERE
def test_triton_lowers_without_a_word(recwarn):
    """Only launch.py silences the deprecation; any other warning, or the end of the lowering, fails this test."""
    warnings.filterwarnings("ignore", launch.DEPRECATED, DeprecationWarning)  # pytest resets filters
    device = targets.devices(Target.parse("h200-sxm:1"))[0]
    with jax.set_mesh(jax.sharding.Mesh([device], ("one",))):
        jax.jit(rms_norm).lower(jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)).compile()
    assert not [str(w.message) for w in recwarn.list]
    assert any(f[0] == "ignore" and f[1] and f[1].pattern == launch.DEPRECATED for f in _fresh_filters())


@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu", "mosaic_gpu"])
@interpreted()
def test_a_second_derivative_is_refused_with_the_reason(implementation):
    def loss(x):
        return jnp.sum(jnp.sin(flash_attention(x, x, x, implementation=implementation)))

    def slope(x):
        return jnp.sum(jnp.sin(jax.grad(loss)(x)))

    refused = "flash_attention_.*once, in reverse mode; implementation='reference'"
    with pytest.raises(NotImplementedError, match=refused):
        jax.eval_shape(jax.grad(slope), jnp.ones((1, 128, 2, 64), jnp.bfloat16))


@ELSEWHERE
@pytest.mark.parametrize("chip", ["tpu-v5e:4", "h200-sxm:1"])
def test_kernels_compile_where_numbers_have_64_bits(chip):
    """Under x64 Python's numbers in index maps have 64 bits, which Mosaic refuses."""

    def loss(x, scale):
        return jnp.sum(rms_norm(x, scale))

    device = targets.devices(Target.parse(chip))[0]
    with jax.enable_x64(True), jax.set_mesh(jax.sharding.Mesh([device], ("one",))):
        structs = jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((1024,), jnp.float32)
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*structs)
        assert "rms_norm" in lowered.as_text()
        lowered.compile()


def _compiles(function, *structs, dtype=jnp.bfloat16):
    """Compile for a TPU v5e, and check that kernels are used."""
    device = targets.devices(Target.parse("tpu-v5e:4"))[0]
    with jax.set_mesh(jax.sharding.Mesh([device], ("one",))):
        lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in structs))
        assert "tpu_custom_call" in lowered.as_text()
        lowered.compile()


@ELSEWHERE
@pytest.mark.parametrize(
    "function, structs",
    [
        (jax.vmap(rms_norm, in_axes=1), [(100, 3, 256)]),
        (jax.vmap(matmul, in_axes=(None, 2)), [(64, 128), (128, 256, 3)]),
        (jax.vmap(jax.vmap(rms_norm, in_axes=1), in_axes=2), [(100, 3, 256, 2)]),
        (
            jax.grad(lambda w, x: jnp.sum(jax.vmap(lambda w, x: rms_norm(x @ w), in_axes=(0, None))(w, x))),
            [(3, 128, 256), (64, 128)],
        ),
    ],
    ids=["rows", "columns of a product", "twice", "ensemble"],
)
def test_mosaic_takes_what_is_mapped_over_any_dimension(function, structs):
    _compiles(function, *structs)


@ELSEWHERE
@pytest.mark.parametrize(
    "axes, backward",
    sampled(
        [pytest.param(axes, backward) for axes in ((0, 0), (0, None), (None, 0)) for backward in (False, True)],
        ["(0, 0)-False"],
    ),
    ids=str,
)
def test_mosaic_takes_mapped_masks_that_are_not_known_while_tracing(axes, backward):
    """The grid is as long as the longest sequence's list of tiles: one mask per mapped entry, or one for all."""

    def loss(x, mask):
        out = flash_attention(x, x, x, key_range=intersection(causal(512), packed((mask > 0).astype(jnp.int32))))
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    shapes = ((1, 512, 2, 64), (1, 512))
    structs = [shape if axis is None else (3, *shape) for shape, axis in zip(shapes, axes, strict=True)]
    _compiles(jax.vmap(jax.grad(loss) if backward else loss, in_axes=axes), *structs)


@ELSEWHERE
@pytest.mark.exhaustive
def test_a_wide_bias_of_float32_fits_vmem():
    """Compiled for a v4: its compiler and v5p's stay within 16 MiB."""
    device = targets.devices(Target.parse("tpu-v4:4"))[0]
    structs = [jax.ShapeDtypeStruct((1, 2048, 2, 256), jnp.bfloat16)] * 3
    structs.append(jax.ShapeDtypeStruct((1, 2, 2048, 2048), jnp.float32))

    def loss(query, key, value, bias):
        out = flash_attention(query, key, value, bias=bias, implementation="mosaic_tpu")
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    with jax.set_mesh(jax.sharding.Mesh([device], ("one",))):
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*structs).compile()


@ELSEWHERE
@pytest.mark.parametrize("widths", sampled([(112, 112), (48, 112)], ["(48, 112)"]), ids=str)
def test_widths_of_three_parts_fit_the_tensor_memory_of_blackwell(widths):
    device = targets.devices(Target.parse("b200-hgx:1"))[0]
    structs = [jax.ShapeDtypeStruct((1, 512, 2, width), jnp.bfloat16) for width in (widths[0], *widths)]

    def loss(query, key, value):
        return jnp.sum(jnp.square(flash_attention(query, key, value, implementation="triton").astype(jnp.float32)))

    with jax.set_mesh(jax.sharding.Mesh([device], ("one",))):
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*structs).compile()


@ELSEWHERE
@pytest.mark.parametrize("rows", [1, 4])
def test_mosaic_multiplies_few_rows_whose_length_is_no_multiple_of_a_block(rows):
    _compiles(matmul, (rows, 2048 + 256), (2048 + 256, 256))


@ELSEWHERE
@pytest.mark.parametrize("precision, passes", [("default", 0), ("high", 1), ("tensorfloat32", 1), ("highest", 1)])
def test_mosaic_multiplies_float32_once_or_in_full(precision, passes):
    """Compiled for a TPU v5e; narrow numbers ignore the precision requested for float32."""
    with jax.default_matmul_precision(precision):
        x = jnp.ones((128, 128))
        with interpreted("mosaic_tpu"):
            assert str(jax.make_jaxpr(matmul)(x, x)).count("Precision.HIGHEST") == 2 * passes
        for dtype in (jnp.float32, jnp.bfloat16):
            _compiles(matmul, (128, 256), (256, 128), dtype=dtype)


@ELSEWHERE
def test_an_algorithm_that_a_kernel_has_not_is_the_reference_s():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    for chip, name, algorithm in (
        ("tpu-v5e:4", "mosaic_tpu", "BF16_BF16_F32_X3"),
        ("h200-sxm:1", "triton", "F16_F16_F32"),
    ):
        mesh = jax.sharding.Mesh(targets.devices(Target.parse(chip))[:1], ("one",))
        with jax.set_mesh(mesh), jax.default_matmul_precision(algorithm):
            assert "custom_call" not in jax.jit(matmul).lower(x, x).as_text()
            with pytest.raises(
                NotImplementedError, match=f"matmul: {name} .* does not multiply float32 by {algorithm}"
            ):
                jax.eval_shape(functools.partial(matmul, implementation=name), x, x)
            narrow = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
            assert "custom_call" in jax.jit(matmul).lower(narrow, narrow).as_text()
    with jax.set_mesh(mesh), jax.default_matmul_precision("TF32_TF32_F32_X3"):
        lowered = jax.jit(matmul).lower(x, x)
        assert "custom_call" in lowered.as_text()
        lowered.compile()


@ELSEWHERE
def test_mosaic_multiplies_columns():
    """The gradient of a product over one channel is a product with one column."""
    _compiles(lambda a, b: jax.vjp(matmul, a, b)[1](jnp.ones((33, 256), a.dtype)), (33, 1), (1, 256))


def test_no_other_file_of_the_kernels_launches_or_configures_one():
    entry_points = "pallas_call|pl.kernel|CompilerParams|CostEstimate|Interpret(GPU)?Params|elementwise_inline_asm"
    package = Path(launch.__file__).parents[1]
    known = {path.name for path in package.rglob("*.py") if re.search(rf"\b({entry_points})\(", path.read_text())}
    assert known == {"launch.py"}


def _fresh_filters():
    """Yield the filters of a process that imported launch.py."""
    import subprocess

    code = "import warnings, kernels_pallas; [print(f[0], f[1].pattern if f[1] else '') for f in warnings.filters]"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line in ran.stdout.splitlines():
        action, _, pattern = line.partition(" ")
        yield action, re.compile(pattern) if pattern else None
