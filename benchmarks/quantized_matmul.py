"""Time products with quantised matrices on a CPU, beside a product in float32.

    python benchmarks/quantized_matmul.py [--rounds 25]

The matrix has 2048 inputs and 8192 outputs and is kept by its outputs, as the engine keeps it. The forms take turns,
on random rows, after one call each that is not timed; medians are written to the results of this processor.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import results

from kernels_pallas.quantized_matmul import quantize, quantized_matmul

INPUTS, OUTPUTS = 2048, 8192
ROWS = (2, 8, 32, 512)
GROUPS = {"int8": INPUTS, "int4": 128, "w8a8": INPUTS}  # inputs that share a scale, by kind


def products(matrix: jax.Array) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return the product with a float32 matrix [inputs, outputs] in float32 and with each kind of its values."""
    by_outputs = matrix.T.copy()

    def quantised(kind: str, group: int) -> Callable[[jax.Array], jax.Array]:
        values, scales = (each.T.copy() for each in quantize(matrix, kind, group))
        return jax.jit(lambda x: quantized_matmul(x, values, scales, kind=kind, by_outputs=True))

    of_kinds = {kind: quantised(kind, group) for kind, group in GROUPS.items()}
    return {"float32": jax.jit(lambda x: x @ by_outputs.T), **of_kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    forms = products(jax.random.normal(jax.random.key(0), (INPUTS, OUTPUTS)))
    rows = []
    for count in ROWS:
        x = jax.random.normal(jax.random.key(1), (count, INPUTS))
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for product in forms.values():
            jax.block_until_ready(product(x))
        for _ in range(arguments.rounds):
            for name, product in forms.items():
                begin = time.perf_counter()
                jax.block_until_ready(product(x))
                seconds[name].append(time.perf_counter() - begin)
        rows.append({"rows": count, "median_s": {name: statistics.median(each) for name, each in seconds.items()}})
        print(rows[-1])
    print(results.write("quantized_matmul", results.cpu(), {"inputs": INPUTS, "outputs": OUTPUTS, "cases": rows}))


if __name__ == "__main__":
    main()
