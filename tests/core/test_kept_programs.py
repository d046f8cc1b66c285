"""Compiled programs that are kept whole."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import kept_programs, plugins

X = np.arange(3, dtype=np.float32)


class Lowered(Exception):
    """A program was not found."""


def refused():
    raise Lowered


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch):
    """Forget the plug-ins that other tests of this process imported."""
    monkeypatch.setattr(plugins, "_imported", {})


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder of programs of its own, which holds the doubling of `X`, and what asks for that."""
    monkeypatch.setattr(kept_programs, "_kept", kept_programs.KeptPrograms(tmp_path, 1 << 20))
    doubled()
    return tmp_path


def doubled(made_from="x", device=0, lower=None, factor=2.0):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[device])
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=one)
    lower = lower or (lambda: jax.jit(lambda x: {"doubled": factor * jnp.sin(x)}).lower(x))
    return kept_programs.compiled(made_from, [jax.devices()[device]], lower)(X)["doubled"]


def files(folder):
    return sorted(path for path in folder.iterdir() if not path.is_symlink())


def test_a_program_that_was_kept_is_not_lowered(store):
    found, made = doubled(lower=refused), jax.jit(lambda x: 2.0 * jnp.sin(x))(X)
    assert found.tobytes() == made.tobytes()


def test_a_program_of_a_mesh_keeps_shardings_and_donation(store):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    lowered = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=by_rows).lower(
        jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=by_rows)
    )
    kept_programs.compiled("rows", jax.devices()[:4], lambda: lowered)
    found = kept_programs.compiled("rows", jax.devices()[:4], refused)
    given = jax.device_put(np.ones((8, 2), np.float32), by_rows)
    result = found(given)
    assert given.is_deleted() and result.sharding == by_rows and (np.asarray(result) == 2).all()
    with pytest.raises(TypeError):
        found(np.ones((8, 3), np.float32))
    with pytest.raises(Lowered):
        kept_programs.compiled("rows", jax.devices()[4:], refused)


@pytest.mark.parametrize(
    "changed",
    [
        "made_from",
        "device",
        "XLA_FLAGS",
        "LIBTPU_INIT_ARGS",
        "setting",
        "setting of a thread",
        "cores",
        "sources",
        "platform",
    ],
)
def test_what_a_program_depends_on_makes_another(store, monkeypatch, changed):
    """A program is lowered where any of it differs."""
    asked = {}
    match changed:
        case "made_from":
            asked = {"made_from": "y"}
        case "device":
            asked = {"device": 1}
        case "XLA_FLAGS" | "LIBTPU_INIT_ARGS":
            monkeypatch.setenv(changed, "--one=1")
        case "cores":
            monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(1000))
        case "sources":
            monkeypatch.setattr(kept_programs, "_sources", lambda: "others")
        case "platform":
            described = kept_programs._described
            monkeypatch.setattr(kept_programs, "_described", lambda devices: f"newer {described(devices)}")
    if changed == "setting":
        before = jax.config.jax_default_prng_impl
        jax.config.update("jax_default_prng_impl", "rbg")
        try:
            with pytest.raises(Lowered):
                doubled(lower=refused)
        finally:
            jax.config.update("jax_default_prng_impl", before)
        return
    with jax.default_matmul_precision("bfloat16" if changed == "setting of a thread" else "highest"):
        with pytest.raises(Lowered):
            doubled(lower=refused, **asked)


def test_sources_are_the_files_of_both_packages_and_the_versions(tmp_path, monkeypatch):
    for package in ("jaxlm", "kernels_pallas"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("1")
    found = lambda name: type("Spec", (), {"origin": str(tmp_path / name / "__init__.py")})  # noqa: E731
    monkeypatch.setattr(kept_programs, "find_spec", found)
    seen = {kept_programs._sources.__wrapped__()}
    for path in ("jaxlm/__init__.py", "kernels_pallas/__init__.py", "jaxlm/table.toml"):
        (tmp_path / path).write_text("2")
        seen.add(kept_programs._sources.__wrapped__())
    monkeypatch.setattr(jax, "__version__", "0.0")
    assert len(seen | {kept_programs._sources.__wrapped__()}) == 5


def test_sources_that_leave_a_program_as_it_was_cost_no_compiling(store, monkeypatch):
    monkeypatch.setattr(kept_programs, "_sources", lambda: "edited")
    monkeypatch.setattr(kept_programs, "_compiled", lambda lowered: refused())
    doubled()
    doubled(lower=refused)  # and the next start none at all
    with pytest.raises(Lowered):
        doubled(made_from="z", factor=3.0)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:50] + b"?" + data[51:], lambda data: b""]
)
def test_a_damaged_program_is_made_again(store, damage):
    (file,) = files(store)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.raises(Lowered):
        doubled(lower=refused)
    assert doubled().tobytes() == doubled(lower=refused).tobytes()


def test_a_folder_that_cannot_be_written_costs_the_speed_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_programs, "_kept", kept_programs.KeptPrograms(tmp_path / "missing", 1 << 20))
    assert doubled().tobytes() == doubled().tobytes()


def test_programs_used_least_recently_go_first(store, monkeypatch):
    (first,) = files(store)
    size = first.stat().st_size
    monkeypatch.setattr(kept_programs, "_kept", kept_programs.KeptPrograms(store, int(2.5 * size)))
    os.utime(first, ns=(1, 1))
    doubled(made_from="second")
    (second,) = {*files(store)} - {first}
    os.utime(second, ns=(2, 2))
    doubled(lower=refused)  # now the first was used last
    doubled(made_from="third")
    assert first in files(store) and second not in files(store)
    doubled(made_from="fourth")
    assert len(files(store)) == 2 and all(path.exists() for path in store.iterdir())


def test_a_program_from_the_cache_of_jax_is_not_kept(tmp_path, monkeypatch):
    """XLA would write it without the names of its functions, so that it could not run."""
    monkeypatch.setattr(kept_programs, "_kept", kept_programs.KeptPrograms(tmp_path, 1 << 20))
    least = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, least)
    jax.config.update(least, 0.0)
    try:
        doubled(factor=5.0)
        assert len(files(tmp_path)) == 1 and getattr(jax.config, least) == 0.0
        jax.jit(lambda x: {"doubled": 7.0 * jnp.sin(x)}).lower(X).compile()
        jax.clear_caches()
        doubled("other", lower=lambda: jax.jit(lambda x: {"doubled": 7.0 * jnp.sin(x)}).lower(X))
    finally:
        jax.config.update(least, before)
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("why", ["processes", "plug-ins", "no folder"])
def test_where_programs_are_not_kept(store, monkeypatch, why):
    if why == "processes":
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    elif why == "plug-ins":
        monkeypatch.setattr(plugins, "_imported", {"mine": "digest"})
    else:
        kept_programs.keep_in(None)
    with pytest.raises(Lowered):
        doubled(lower=refused)


def test_a_program_that_reads_other_operands_is_another(store, monkeypatch):
    """Its module may be the same, since JAX leaves out operands that nothing reads."""
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def read(index):
        monkeypatch.setattr(kept_programs, "_sources", lambda: f"sources {index}")
        lower = lambda: jax.jit(lambda *operands: 2.0 * operands[index]).lower(x, x)  # noqa: E731
        return kept_programs.compiled("one of two", jax.devices()[:1], lower)(X, X + 10.0)

    assert read(0).tolist() == (2 * X).tolist() and read(1).tolist() == (2 * X + 20).tolist()


def test_flags_that_a_process_began_with_are_part_of_the_key(store, monkeypatch, tmp_path_factory):
    """Also those in a file. A variable that is set later is one that no backend reads; no other process has both."""
    file = tmp_path_factory.mktemp("flags") / "flags"
    found = []
    for content in ("--xla_a=1", "--xla_a=2"):
        file.write_text(content)
        monkeypatch.setenv("XLA_FLAGS", str(file))
        found.append(kept_programs._settings())
    monkeypatch.setattr(kept_programs, "_at_start", kept_programs._variables())
    found.append(kept_programs._settings())
    assert len(set(found)) == 3


def test_a_link_to_nothing_among_the_sources_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "there.py").write_text("")
    (tmp_path / ".#there.py").symlink_to("me@host.1:2")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(kept_programs, "find_spec", lambda _: spec)
    assert kept_programs._sources.__wrapped__()
