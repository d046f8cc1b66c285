"""The jaxprs of the steps that an engine runs for a workload, with rows as the engine lays them out."""

from collections.abc import Iterator

import expert_tiles
import jax
import jax.numpy as jnp
import meshes
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxlm.costs.jaxpr.cost import JaxprCost
from jaxlm.costs.jaxpr.count import count
from jaxlm.costs.workload import Workload
from jaxlm.inference.cache_memory import CacheSize, most_pages
from jaxlm.inference.programs import EnginePrograms
from jaxlm.inference.ragged_step import Batch, NextTokens, ragged_step
from jaxlm.inference.settings import EngineSettings
from jaxlm.inference.step_shapes import TILE, StepShape, fitting, prompt_chunks
from jaxlm.models.config import ModelConfig
from jaxlm.models.kernels import using_kernels
from jaxlm.parallel.layout import AXES
from jaxlm.parallel.partition import using_rules
from jaxlm.parallel.rules import ENGINE

CHIPS = {"gpu": AbstractDevice("NVIDIA H200", 1, "gpu"), "tpu": AbstractDevice("TPU v5 lite", 1, "tpu")}


def batches(work: Workload, programs: EnginePrograms, cache: CacheSize) -> Iterator[tuple[StepShape, Batch]]:
    """Yield the shape and the rows of each step of a workload on one device, written row by row."""
    shapes = programs.shapes
    if work.kind == "decode":
        shape = fitting(shapes.all(), work.batch, 0)
        batch = programs.empty_batch(shape, cache)
        batch.position_R[: work.batch] = work.sequence - 1
        yield shape, batch
        return
    for chunks in prompt_chunks(work.batch, work.sequence, shapes.tiles[-1]):
        rows = sum(-(-len(chunk) // TILE) * TILE for chunk in chunks)
        shape = fitting(shapes.all(), sum(chunk.stop == work.sequence for chunk in chunks), rows)
        batch, row = programs.empty_batch(shape, cache), shape.decode
        for chunk in chunks:
            batch.position_R[row : row + len(chunk)] = chunk
            row += -(-len(chunk) // TILE) * TILE
        yield shape, batch


def decoding(model: ModelConfig) -> ClosedJaxpr:
    """Return the jaxpr of a step in which two sequences decode, in float32."""
    settings = EngineSettings(slots=2, page=32)
    programs = EnginePrograms.of(model, meshes.make(), jnp.dtype("float32"), settings)
    cache = CacheSize(32, tuple(3 for _ in programs.layout.groups))
    return programs.step(StepShape(2, 0, TILE), cache).trace().jaxpr


def cache_bytes(work: Workload) -> int:
    """Return the bytes of the pages that an engine on one device keeps for the sequences of a workload."""
    programs, cache = _programs(work)
    dtype, mesh = jnp.dtype(work.page_dtype), meshes.make()
    each = (programs.layout.page_bytes(group, dtype, mesh, ENGINE) for group in range(len(cache.counts)))
    return sum(count * size for count, size in zip(cache.counts, each, strict=True))


def _programs(work: Workload) -> tuple[EnginePrograms, CacheSize]:
    settings = EngineSettings(slots=work.batch, page=work.page, chunk_tokens=work.chunk_tokens)
    programs = EnginePrograms.of(work.model, meshes.make(), jnp.dtype(work.dtype), settings)
    pages = (most_pages(work.sequence, window, work.page) for window in programs.layout.groups)
    return programs, CacheSize(work.sequence, tuple(1 + work.batch * n for n in pages))


def _most_trips(work: Workload, shape: StepShape) -> dict[str, int]:
    """Return the most trips of the loops over the rows of experts in a step, by their scope."""
    trips = {}
    for layer in work.model.layers:
        if (mixture := layer.feed_forward).kind == "mixture":
            rows = shape.rows * mixture.experts_per_token
            trips |= expert_tiles.most_trips(rows, mixture.num_experts)
    return trips


def shapes(work: Workload) -> list[StepShape]:
    """Return the shape of each step of a workload."""
    return [shape for shape, _ in batches(work, *_programs(work))]


def costs(work: Workload) -> list[JaxprCost]:
    """Return the cost of each step of a workload on one device of its platform, with as many tiles of experts' rows as
    there may be."""
    programs, cache = _programs(work)
    layout = programs.layout._replace(row_by_row=work.platform == "cpu")
    pages = programs.abstract_pages(cache)
    upcoming, valid = NextTokens.empty(work.batch + 1), np.ones(work.model.vocab_size, bool)
    mesh = AbstractMesh((1,) * len(AXES), AXES, (AxisType.Auto,) * len(AXES), abstract_device=CHIPS[work.platform])
    with jax.sharding.use_abstract_mesh(mesh), using_rules(ENGINE), using_kernels(work.execution.kernels):
        return [
            count(
                lambda parameters, *operands, shape=shape: ragged_step(
                    programs.weights.module(parameters), layout, shape, *operands
                ),
                programs.abstract_parameters(),
                *(pages, upcoming, batch, valid),
                trips=_most_trips(work, shape),
            )
            for shape, batch in batches(work, programs, cache)
        ]
