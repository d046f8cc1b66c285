"""The descriptions that the engine's programs are kept by."""

from dataclasses import fields, replace

import jax.numpy as jnp
import meshes
import model_fixtures
import pytest

from jaxlm.core import kept_programs
from jaxlm.inference import programs as engine_programs
from jaxlm.inference.cache_memory import CacheSize
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.settings import EngineSettings
from jaxlm.inference.step_shapes import TILE, StepShape
from jaxlm.models.adapter_set import AdapterSet
from jaxlm.models.quantize_config import Quantization
from kernels_pallas.core.interpretation import interpreted

SHAPE, CACHE = StepShape(2, 2, TILE), CacheSize(64, (5,))


@pytest.fixture(scope="module")
def programs():
    model = model_fixtures.model()
    return EnginePrograms.of(model, meshes.make(), jnp.dtype("float32"), EngineSettings(slots=4, page=TILE))


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """Return the description that a program is kept by in place of the program."""
    monkeypatch.setattr(kept_programs, "compiled", lambda made_from, devices, lower: made_from)


def step(programs, cache=CACHE, shape=SHAPE):
    return engine_programs.compiled_step.__wrapped__(programs, cache, shape)


def changes(programs):
    model = programs.model
    return {
        "model": model.model_copy(update={"context_length": model.context_length // 2}),
        "mesh": meshes.make(data=2),
        "dtype": jnp.dtype("bfloat16"),
        "page": 2 * programs.page,
        "slots": programs.slots + 1,
        "chunk_tokens": programs.chunk_tokens + TILE,
        "exact": not programs.exact,
        "drafts": 1,
        "history": 8,
        "kernels": "xla",
        "quantized": Quantization("int8"),
        "cache_dtype": "int8",
        "steps": 8,
        "adapters": AdapterSet((2,), ("layers/attention/query",)),
    }


def test_each_field_is_part_of_the_description(programs):
    changed = changes(programs)
    assert set(changed) == {field.name for field in fields(programs)}
    others = [step(replace(programs, **{name: value})) for name, value in changed.items()]
    assert len({step(programs), *others}) == 1 + len(others)


def test_each_size_is_part_of_the_description(programs):
    shapes = [SHAPE, *(SHAPE._replace(**{name: SHAPE._asdict()[name] + 1}) for name in ("decode", "tiles"))]
    caches = [CACHE._replace(context=128), CACHE._replace(counts=(6,))]
    found = [
        *(step(programs, shape=shape) for shape in (*shapes, SHAPE._replace(scores=True))),
        *(step(programs, cache) for cache in caches),
        *(
            engine_programs.compiled_draw.__wrapped__(programs, n, is_masked=masked)
            for n in (2, 3)
            for masked in (False, True)
        ),
        *(engine_programs.compiled_put.__wrapped__(programs, field) for field in ("how", "counts_SV")),
    ]
    with interpreted():
        found.append(step(programs))
    assert len(set(found)) == len(found)


def test_the_description_is_the_same_in_each_process(programs):
    """The description has no address in memory, and no order of a set."""
    again = EnginePrograms.of(
        type(programs.model).model_validate(programs.model.model_dump()),
        meshes.make(),
        jnp.dtype("float32"),
        EngineSettings(slots=4, page=TILE),
    )
    assert step(programs) == step(again) and " at 0x" not in step(programs)
    assert "frozenset" not in step(programs)
