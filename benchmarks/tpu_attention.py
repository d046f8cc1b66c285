"""Bundles of attention's kernels for TPUs that are not here, with different blocks.

    python benchmarks/tpu_attention.py [--only TEXT]

Compiles causal attention of 8,192 tokens of width 128 with Llama 3's heads, and adds to
`results/compiled/tpu_attention.json` the bundles that a query head takes with each variant of blocks: those of a tile
whose scores are all unmasked, and of parts of the other tiles, without a mask and with one, times their numbers.
Bundles between tiles are left out. Variants in the file are compiled again where `--only` selects them, and kept
otherwise.
"""

import argparse
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import results

from jaxlm.core import accelerators
from jaxlm.lowering import bundles

FILE = results.FOLDER / "compiled" / "tpu_attention.json"
TOKENS, WIDTH, HEADS, KEY_HEADS = 8192, 128, 32, 8
KINDS = ("unmasked", "unmasked part", "masked part")
# Bundles of a head before tiles had parts, and the gradients one kernel instead of two (commit 86443f3, the same
# compiler): of two kernels of 36 tiles of 1024 × 1024 and 72 of 512 × 1024, and of one of 72.
BEFORE = {"v5p, gradients": 263_204 + 209_568, "v5p, forward": 174_744, "v6e, forward": 112_960}


@dataclass(frozen=True)
class Variant:
    """A kernel with its blocks on a chip; None are those that it takes by default."""

    chip: str
    kernel: str
    blocks: tuple[int, int, int] | None

    def __str__(self) -> str:
        blocks = "default" if self.blocks is None else "×".join(map(str, self.blocks))
        return f"{self.chip}, {self.kernel}, {blocks}"


CHIPS = ("v5p", "v6e", "v7x", "v5e", "v4")
VARIANTS = {
    str(variant): variant
    for variant in (
        *(Variant(chip, kernel, None) for kernel in ("gradients", "forward") for chip in CHIPS),
        Variant("v6e", "gradients", (256, 1024, 256)),
        Variant("v5p", "gradients", (512, 1024, 128)),
        Variant("v6e", "forward", (1024, 1024, 256)),
        Variant("v6e", "forward", (512, 1024, 512)),
        Variant("v6e", "forward", (512, 1024, 128)),
    )
}


class LoweredVariant(NamedTuple):
    """A variant's program and its digest, its blocks, and the times that each of KINDS of tiles is computed."""

    program: Any
    digest: str
    blocks: tuple[int, ...]
    times: tuple[int, ...]


def lower(variant: Variant) -> LoweredVariant:
    """Lower a variant for its chip."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxlm.costs.hardware.target import Target
    from jaxlm.lowering import kernel_matrix, targets
    from kernels_pallas.core import tuning
    from kernels_pallas.core.attention.scores import FlashSettings
    from kernels_pallas.flash_attention import KeyRange, causal, mosaic_tpu
    from kernels_pallas.flash_attention.operands import Operands
    from kernels_pallas.flash_attention.tile_schedule import PARTS, ScheduledTile, schedule_tiles

    mesh = Mesh(np.array(targets.devices(Target.parse(kernel_matrix.CHIPS[variant.chip]))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    query, key = (
        jax.ShapeDtypeStruct((1, TOKENS, heads, WIDTH), jnp.bfloat16, sharding=whole) for heads in (HEADS, KEY_HEADS)
    )
    row = jax.ShapeDtypeStruct((1, HEADS, TOKENS), jnp.float32, sharding=whole)
    mask = KeyRange(*(np.asarray(x) for x in causal(TOKENS)))
    settings = FlashSettings(WIDTH**-0.5, None, TOKENS * (TOKENS + 1) // 2, mask, "mosaic_tpu")

    def run(query: Any, key: Any, value: Any, *rows: Any) -> Any:
        operands = Operands(query, key, value, *mask, None, None)
        if variant.kernel == "forward":
            return mosaic_tpu.forward(settings, operands)
        return mosaic_tpu.backward(settings, operands, *rows)

    sizes = (TOKENS, TOKENS, WIDTH, WIDTH)
    name = tuning.KernelKey(f"flash_attention_{variant.kernel}", "mosaic_tpu", sizes, "bfloat16")
    chosen = {} if variant.blocks is None else {name: mosaic_tpu.FlashTpuBlocks(*variant.blocks)}
    arrays = (query, key, key) if variant.kernel == "forward" else (query, key, key, row, row, query)
    with tuning.trying(chosen) as asked, jax.set_mesh(mesh), kernel_matrix.without_locations():
        program = jax.jit(run).lower(*arrays)
    blocks = asked[name].blocks
    tiles = ScheduledTile(schedule_tiles(*mask, blocks.queries, blocks.keys, TOKENS // blocks.keys).tiles)
    complete = int(np.sum(tiles.unmasked == (1 << PARTS) - 1))
    unmasked, computed = (
        sum(int(np.sum(bits >> part & 1)) for part in range(PARTS)) for bits in (tiles.unmasked, tiles.computed)
    )
    digest = hashlib.sha256(program.as_text().encode()).hexdigest()[:16]
    return LoweredVariant(program, digest, tuple(blocks), (complete, unmasked - PARTS * complete, computed - unmasked))


def compile_variant(variant: Variant, folder: Path) -> dict[str, Any]:
    """Compile a variant. Return its blocks, and bundles by kind of tile and of a query head."""
    lowered = lower(variant)
    lowered.program.compile()
    named = dict(bundles.read_runs(folder))
    for path in folder.iterdir():
        path.unlink()
    runs = named[f"flash_attention_{variant.kernel}"]
    # The longest runs are those of the kinds of tiles: of a whole one, then of a part, without a mask and with one.
    longest = sorted(range(len(runs)), key=lambda i: -runs[i].bundles)[:3]
    kinds = list(zip(KINDS, (longest[0], *sorted(longest[1:])), lowered.times, strict=True))
    return {
        "program": lowered.digest,
        "blocks": lowered.blocks,
        "bundles_of_a_head": sum(runs[i].bundles * times for _, i, times in kinds),
        "bundles_in_all": sum(run.bundles for run in runs),
        "tiles": [{"kind": kind, "times": times, **runs[i]._asdict()} for kind, i, times in kinds],
    }


def selected(only: str | None, rows: dict[str, Any]) -> Iterator[Variant]:
    for name, variant in VARIANTS.items():
        if only in name if only is not None else name not in rows:
            yield variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="compile the variants whose names contain a text")
    arguments = parser.parse_args()
    rows = results.compiled_earlier(FILE, "variants")
    with tempfile.TemporaryDirectory(prefix="jaxlm-schedules-") as folder:
        os.environ |= bundles.environment(Path(folder))  # before libtpu starts
        accelerators.choose()
        for variant in selected(arguments.only, rows):
            rows[str(variant)] = compile_variant(variant, Path(folder))
            print(f"{variant}: {rows[str(variant)]['bundles_of_a_head']}", flush=True)
            write(rows)
    write(rows)


def write(rows: dict[str, Any]) -> None:
    ordered = {name: rows[name] for name in VARIANTS if name in rows}
    results.write("tpu_attention", "compiled", {"before": BEFORE, "variants": ordered})


if __name__ == "__main__":
    main()
