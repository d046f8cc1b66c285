"""A sum over passes whose number is known at run time only, and nearly always one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# The scope in a program of the loops over the passes after the first.
FURTHER = "further_passes"

Tree = Any


def summed_passes(one: Callable[[jax.Array, Tree], jax.Array], passes: jax.Array, operands: Tree) -> jax.Array:
    """Return one(0, operands) + one(1, operands) + …, of so many passes, at least one.

    The backward pass reads what the first pass keeps, as that of `one` does. Of the others it computes each again, so
    that they need the memory of one pass, however many there are.

    Args:
      one: it closes over no array that is traced.
      passes: int32, equal on all devices that a pass computes on together.
      operands: a tree of arrays; gradients are computed of those that something trained is in.
    """
    return _summed(one, passes, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(one: Callable, passes: jax.Array, operands: Tree) -> jax.Array:
    return _added(passes, one(jnp.int32(0), operands), lambda number: one(number, operands))


def _forward(one: Callable, passes: Any, operands: Tree) -> tuple[jax.Array, tuple]:
    trains = jax.tree.map(lambda x: x.perturbed, operands)
    parts = _split(jax.tree.map(lambda x: x.value, operands), trains)
    first, back = jax.vjp(lambda trained: one(jnp.int32(0), _joined(trained, parts[1])), parts[0])
    y = _added(passes.value, first, lambda number: one(number, _joined(*parts)))
    return y, (back, passes.value, parts)


def _backward(one: Callable, saved: tuple, d_y: Any) -> tuple[None, Tree]:
    back, passes, (trained, fixed) = saved
    if not isinstance(d_y, jax.Array):  # a symbolic zero
        d_y = jnp.zeros(d_y.shape, d_y.dtype)

    def gradients(number: jax.Array) -> Tree:
        _, back = jax.vjp(lambda trained: one(number, _joined(trained, fixed)), trained)
        return back(d_y)[0]

    return None, _added(passes, back(d_y)[0], gradients)


_summed.defvjp(_forward, _backward, symbolic_zeros=True)


def _split(tree: Tree, trains: Tree) -> tuple[Tree, Tree]:
    """Return a tree's arrays that train and its others, each with None in the place of the others."""
    trained = jax.tree.map(lambda x, of: x if of else None, tree, trains)
    return trained, jax.tree.map(lambda x, of: None if of else x, tree, trains)


def _joined(trained: Tree, fixed: Tree) -> Tree:
    """Return the tree of which these are the parts of `_split`."""
    return jax.tree.map(lambda x, other: other if x is None else x, trained, fixed, is_leaf=lambda x: x is None)


def _added(passes: jax.Array, first: Tree, of_pass: Callable[[jax.Array], Tree]) -> Tree:
    """Return the sum of what the first pass gave and of what the others give."""

    def add(carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        number, total = carry
        return number + 1, jax.tree.map(jnp.add, total, of_pass(number))

    with jax.named_scope(FURTHER):
        return jax.lax.while_loop(lambda carry: carry[0] < passes, add, (jnp.int32(1), first))[1]
