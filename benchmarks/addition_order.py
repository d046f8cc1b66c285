"""The price of deterministic gradients of attention on Hopper, without a GPU: what the order of additions adds.

    python benchmarks/addition_order.py

Compiles the backward kernel of causal attention, 8192 × 128, with the order and without, and writes
`results/compiled/addition_order.json`: what the producer's loop over blocks of queries has with each assembler at hand,
and the time of the grid from its schedule of blocks, in steps of a block, for additions that take so many steps.
"""

import argparse
import functools
import heapq
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import results
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.costs.hardware.target import Target
from jaxlm.lowering import assembly, targets
from jaxlm.lowering.assemblers import assemblers, tool
from jaxlm.lowering.kernel_matrix import CHIPS
from kernels_pallas.flash_attention import causal, flash_attention
from kernels_pallas.flash_attention.blocks import add_order, key_ranges, query_ranges

TOKENS, WIDTH = 8192, 128
QUERIES, KEYS = 64, 128  # of the kernel's blocks at this width
HEADS, BATCH, SMS = 16, 2, 132  # FlashAttention-3's 16k tokens and heads × width of 2048, on an H100
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;|^\s*(\.L_\w+):", re.MULTILINE)
_COUNTED = {
    "block barriers": r"BAR\.SYNC",
    "polls of a counter": r"LDG\.E\.STRONG\.GPU",
    "additions to a counter": r"REDG?\.",
    "fences of the whole GPU": r"MEMBAR\.\w+\.GPU",
    "invalidations of the L1 cache": r"CCTL\.IVALL",
}


def producer_loop(listing: str) -> dict[str, int]:
    """Count instructions in the smallest loop in which the copy engine adds to global memory."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    loops: list[list[str]] = []
    for instruction, label in _LINE.findall(listing):
        if label:
            places[label] = len(instructions)
            continue
        instructions.append(instruction)
        jump = re.match(r"BRA\b.*`\((\.L_\w+)\)", instruction)
        if jump and jump[1] in places:
            loops.append(instructions[places[jump[1]] :])
    loop = min((loop for loop in loops if any(x.startswith("UTMAREDG") for x in loop)), key=len)
    counts = Counter(name for x in loop for name, pattern in _COUNTED.items() if re.match(pattern, x))
    return {"instructions": len(loop)} | {name: counts[name] for name in _COUNTED}


def compiled(deterministic: bool) -> dict[str, dict[str, int]]:
    """Return the counts of the kernel's producer by the assembler's release."""
    mesh = Mesh(np.array(targets.devices(Target.parse(CHIPS["H100"]))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((1, TOKENS, 1, WIDTH), jnp.bfloat16, sharding=whole)
    options = dict(key_range=causal(TOKENS), implementation="mosaic_gpu", deterministic=deterministic)
    attend = functools.partial(flash_attention, **options)

    def gradients(*operands: jax.Array) -> tuple:
        out, pull_back = jax.vjp(attend, *operands)
        return pull_back(out)

    with jax.set_mesh(mesh):
        texts = assembly.compile_to_ptx(jax.jit(gradients).lower(x, x, x))
    (ptx,) = (text for text in texts if "cp.reduce.async.bulk" in text)
    counts = {}
    with tempfile.TemporaryDirectory(prefix="jaxlm-order-") as folder:
        for assembler in assemblers():
            program = Path(folder, "kernel.cubin")
            program.write_bytes(assembler.run(ptx, "sm_90a")[0])
            shown = subprocess.run([tool("nvdisasm"), "-c", program], capture_output=True, text=True, check=True)
            counts[assembler.release] = producer_loop(shown.stdout)
    return counts


def schedule() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first and last block of queries of each block of keys, and `add_order` of both."""
    ranges = query_ranges(key_ranges(*map(np.asarray, causal(TOKENS)), QUERIES, KEYS), TOKENS // KEYS)
    first, last = (np.asarray(x)[0] for x in (ranges.first, ranges.last))
    return first, last, np.asarray(add_order(ranges, TOKENS // QUERIES))[0]


def grid_steps(addition: float, in_order: bool) -> float:
    """Return when the last block ends, in steps, where an addition takes `addition` steps.

    Blocks start as SMs become free, one on each; a step's sums replace those before, which have to be on their way.
    """
    first, last, order = schedule()
    free = [0.0] * SMS
    added = np.zeros((BATCH, HEADS, *order.shape))
    for b, c, h in np.ndindex(BATCH, len(first), HEADS):
        now = heapq.heappop(free)
        began = now
        for i in range(last[c] - 1, first[c] - 1, -1):
            began = max(now + 1, began)
            if in_order and order[c, i] > 0:
                began = max(began, added[b, h, order[c, i] - 1, i])
            now = began
            added[b, h, order[c, i], i] = began + addition
        heapq.heappush(free, began + addition)
    return max(free)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    _, _, order = schedule()
    chip = [
        {"steps of an addition": a, "in order": grid_steps(a, True), "in any order": grid_steps(a, False)}
        for a in (0.5, 1.0, 2.0)
    ]
    record = {
        "producer": {"in order": compiled(True), "in any order": compiled(False)},
        "longest chain of additions": int(order.max()) + 1,
        "grid": chip,
    }
    results.write("addition_order", "compiled", record)


if __name__ == "__main__":
    main()
