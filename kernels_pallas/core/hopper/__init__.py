"""The language of kernels for Hopper: the one folder that knows the operations of Pallas's Mosaic GPU backend.

`warpgroup.py` has the operations, `memory.py` arrays and barriers in shared memory, `launch.py` the call of a kernel,
and `ring.py` the pipeline by which a warpgroup loads what others compute with.

A block of the grid is several warpgroups of 128 threads that run one body, share memory and meet at barriers. A value
is spread over the registers of its warpgroup: a tile in wgmma's layout (PTX ISA, "asynchronous warpgroup level matrix
instructions"), a vector of its rows or columns in the layout of the tile's reductions.

Interpreted (on any platform), copies, barriers and warpgroups are those of Mosaic GPU's own interpreter, which detects
races and deadlocks at barriers; products, which not every version of it has, are those of `jax.numpy`. Warpgroups are
threads of JAX's CPU client, and a kernel under `jax.vmap` holds one more. With too few threads, which is refused, they
might wait for one another for ever (`JAX_NUM_CPU_DEVICES`).
"""
