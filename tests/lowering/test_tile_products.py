"""Work on tiles that kernels need in their hot loops."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from markers import ELSEWHERE

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import targets
from jaxlm.lowering.kernel_matrix import CHIPS
from jaxlm.lowering.tile_products import TileWork, tile_work
from kernels_pallas import flash_attention, matmul, paged_attention
from kernels_pallas.core import target
from kernels_pallas.flash_attention.triton import default_blocks as attention_blocks
from kernels_pallas.matmul.triton import default_blocks as matmul_blocks


def _needed(function, *shapes, dtype="bfloat16"):
    """Return what the kernels of a call and of its gradients need on an H100."""

    def program(*arrays):
        results, pull_back = jax.vjp(function, *arrays)
        return pull_back(results)

    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS["H100"]))[:1]), ("one",))
    with jax.set_mesh(mesh):
        traced = jax.jit(program).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
        return tile_work(traced.jaxpr), target.current()


@ELSEWHERE
def test_products_of_triton_are_shared_by_all_warps():
    """Attention forward has a product of width H and one of V; the gradients two more of each, and one more of H."""
    width = 192  # in chunks of 128 and 64
    needed, chip = _needed(
        lambda *arrays: flash_attention(*arrays, implementation="triton"),
        *((1, 512, 4, width), (1, 512, 2, width), (1, 512, 2, 128)),
    )
    blocks = attention_blocks(chip, width, jnp.bfloat16)
    widths = {"forward": width + 128, "query_gradient": 2 * width + 128, "key_gradient": 2 * (width + 128)}
    for kernel, columns in widths.items():
        tile = getattr(blocks, kernel)
        work = TileWork(tile.queries * tile.keys * columns // tile.warps)
        assert needed.pop(f"flash_attention_{kernel}") == work
    assert not needed


@ELSEWHERE
def test_products_of_mosaic_gpu_are_shared_by_a_warpgroup():
    """A warp has 16 rows of its warpgroup's 64: of scores and sums forward, and of the five products of a gradient."""
    needed, _ = _needed(lambda *arrays: flash_attention(*arrays, implementation="mosaic_gpu"), *[(1, 512, 2, 64)] * 3)
    for kernel, products in (("forward", 2), ("gradients", 5)):
        work = needed.pop(f"flash_attention_{kernel}")
        assert not work.copied  # another warpgroup loads
        tile = work.multiply_adds / (16 * 64 * products)
        assert tile >= 64 and tile % 16 == 0  # keys, or queries, of a step
    assert not needed


@ELSEWHERE
def test_products_of_float32_count_twice():
    needed, chip = _needed(lambda a, b: matmul(a, b, implementation="triton"), (512, 512), (512, 512), dtype="float32")
    m, n, k, warps, *_ = matmul_blocks(512, 512, 512, 4, chip)
    assert needed == dict.fromkeys(
        ("matmul", "matmul_backward_a", "matmul_backward_b"), TileWork(2 * m * n * k // warps)
    )


@ELSEWHERE
def test_a_warpgroup_shares_what_the_copy_engine_loads():
    """Paged attention loads 64 keys and values in a step; the join of its programs 64 columns, of 8 rows at least."""
    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS["H100"]))[:1]), ("one",))
    shapes = [(2, 1, 8, 128), (5, 2, 128, 64), (5, 2, 64, 64), (2, 16), (2, 1), (2, 1)]
    structs = map(jax.ShapeDtypeStruct, shapes, ["bfloat16"] * 3 + ["int32"] * 3)
    with jax.set_mesh(mesh):
        work = tile_work(
            jax.make_jaxpr(
                lambda q, k, v, t, *seen: paged_attention(q, k, v, t, key_range=seen, implementation="mosaic_gpu")
            )(*structs)
        )
    attend, join = work["paged_attention"], work["paged_attention_join"]
    assert attend == TileWork(64 * 64 * (128 + 64) // 4, 2 * 64 * (128 + 64) // 4) and join == TileWork(
        0, 4 * 8 * 64 // 4
    )
