"""Recordings of a model: while one is made, each door stands in the jaxpr as a marker that says what it computes.

The recorded jaxpr is that of the model's own forward pass: loops tell how often a door runs, variables what it reads,
and names what rematerialisation may keep. It knows no mesh, no chip and no implementation.
"""

import contextlib
from collections.abc import Iterator

import jax

# A user context: JAX keys its caches by it, so that what is traced here is not reused outside.
_recording = jax.make_user_context(False)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Trace models inside as recordings, which know nothing of a mesh around."""
    with _recording(True), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def is_recording() -> bool:
    """Return whether a recording is made around."""
    return _recording.value
