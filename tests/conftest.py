"""Every test runs on eight emulated CPU devices, with full float32 products and without silent broadcasting."""

import gc
import os
from importlib.metadata import version

from packaging.version import Version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
if os.environ["JAX_PLATFORMS"] == "cpu":  # on a chip, compile the programs that users run
    # Programs here run once, and their machine code is made quickly. XLA's passes stay the same.
    QUICK_CODE = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if Version(version("jaxlib")) < Version("0.11"):  # later ones have no such flag
        QUICK_CODE.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_CODE))

import chex  # noqa: E402
import jax  # noqa: E402
import measured_machine  # noqa: E402
import pytest  # noqa: E402
import runs  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

CACHED_FROM_S = 0.1  # of compiling: smaller programs are compiled as fast as they are read

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects: a seventh of the time went to look through them

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Let one worker of xdist run a file, and make its fixtures and small programs once, unless it names a group.

    xdist 3.8 writes groups to `_nodeid`, which pytest 9.2 reads no more
    (https://github.com/pytest-dev/pytest-xdist/issues/1386): they go into ids here.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    modified = yield
    for item in items:
        if written := vars(item).get("_nodeid"):
            item._id = type(item._id).parse(written)
    return modified


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(tmp_path_factory):
    """Keep the tests' caches apart from the user's.

    All workers, and processes that tests start, share one JAX cache: a program that one test compiled serves others.
    The calibration of this machine is there.
    """
    folder = tmp_path_factory.getbasetemp()
    (folder / "cache" / "jaxlm" / "hardware").mkdir(parents=True)
    measured_machine.keep(folder / "cache" / "jaxlm" / "hardware")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        programs = str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "programs")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", programs)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(CACHED_FROM_S))
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_FROM_S)
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_are_cached():
    """A module that compiles for chips that are not here goes on without the cache (`lowering.targets.devices`)."""
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()  # JAX asks once whether there is one


@pytest.fixture(autouse=True)
def traces_of_its_own():
    """Reset `chex.assert_max_traces`, which counts by name across tests."""
    chex.clear_trace_counter()


@pytest.fixture(autouse=True)
def processes_end_with_their_test():
    yield
    runs.end_all()
