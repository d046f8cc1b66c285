"""Every test runs on eight emulated CPU devices, in float32 that is float32, without silent broadcasting."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
if os.environ["JAX_PLATFORMS"] == "cpu":  # a chip's programs are to be those that everybody runs on it
    # Most of the time here is LLVM's, optimising programs that run once; what XLA itself does stays the same.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import chex  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import runs  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(tmp_path_factory):
    """Nothing is read from or left in the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def traces_of_its_own():
    """`chex.assert_max_traces` counts by name, across tests."""
    chex.clear_trace_counter()


@pytest.fixture(autouse=True)
def processes_end_with_their_test():
    yield
    runs.end_all()
