"""The mask of rows that are one document each: known while tracing, and the same as the mask of their positions."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import meshes
import model_fixtures
import numpy as np
import pytest
from jax.sharding import AbstractDevice
from matrices import sampled
from model_fixtures import FAMILIES
from store_fixtures import write_store

from jaxlm.data.packing import Rows
from jaxlm.data.tokenizers import characters_tokenizer
from jaxlm.models.masks import OneDocumentMask
from jaxlm.models.positions import document_lengths, packed_causal_mask
from jaxlm.training.goodput import Clock
from jaxlm.training.loop import Start, Trainer
from jaxlm.training.paths import RunPaths
from jaxlm.training.step import TrainStep
from kernels_pallas import explain
from kernels_pallas.flash_attention import cudnn


def step(one_document, model=None, deterministic=True, **settings):
    execution, training = model_fixtures.sections(**settings)
    execution = execution.model_copy(update={"deterministic": deterministic})
    model = model or model_fixtures.model()
    return TrainStep(model, execution, training, model_fixtures.optimization(), one_document=one_document)


def batch(length):
    """Return rows of one document; the second has padding behind it."""
    made = dict(model_fixtures.batch())
    B, T = made["tokens"].shape
    index = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    is_padding = (index >= length) & (np.arange(B)[:, None] == 1)
    made["positions"] = jnp.asarray(np.where(is_padding, index - length, index))
    made["segments"] = jnp.asarray(np.where(is_padding, 0, 1).astype(np.int32))
    return made


@pytest.mark.parametrize("family", sampled(["gpt2", "mistral"], ["mistral"]))
def test_a_step_is_the_same_with_the_mask_of_one_document(family):
    """Padding sees other keys, and no result depends on it; windows take the mask of positions."""
    model = model_fixtures.model(FAMILIES[family], num_layers=1)
    states = {}
    for one_document in (False, True):
        steps = step(one_document, model, remat="full")
        state, metrics = jax.jit(steps.train)(steps.init(), batch(9))
        states[one_document] = state.parameters, metrics["loss"], metrics["grad_norm"]
    chex.assert_trees_all_close(states[True], states[False], rtol=1e-5, atol=1e-6)


def test_lengths_of_documents_do_not_depend_on_it():
    positions = batch(9)["positions"]
    known = OneDocumentMask(positions.shape[1])
    wanted = document_lengths(positions, packed_causal_mask(positions))
    chex.assert_trees_all_equal(document_lengths(positions, known), wanted)
    assert not jax.tree.leaves(known)


def test_cudnn_trains_on_such_rows_where_runs_may_differ(monkeypatch):
    monkeypatch.setattr(cudnn, "is_absent", lambda: None)
    monkeypatch.setattr(cudnn, "flash_attention", lambda operands, *_: operands.query)
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = meshes.abstract(device=device)
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    model = model_fixtures.model(attention=heads, num_layers=2)

    def trained_by(one_document, deterministic):
        settings = dict(dtype="bfloat16", kernels="auto", remat="full")
        steps = step(one_document, model, deterministic, **settings)
        with jax.sharding.use_abstract_mesh(mesh):
            lines = explain(steps.train, jax.eval_shape(steps.init), jax.eval_shape(lambda: batch(9)))
        return {line.split(": ")[1].split(",")[0] for line in lines if line.startswith("flash_attention, training")}

    assert trained_by(True, deterministic=False) == {"cudnn"}
    assert trained_by(True, deterministic=True) == {"triton"}
    assert trained_by(False, deterministic=False) == {"triton"}


def test_rows_of_a_store_are_one_document_each_or_not(tmp_path):
    def store(name, *texts):
        return write_store(tmp_path / name, texts, characters_tokenizer(texts))

    whole, several = store("one", "a" * 20), store("two", "a" * 9, "a" * 9)
    assert Rows(whole, 16).is_one_document
    assert not Rows(several, 16).is_one_document and Rows(several, 8).is_one_document


@pytest.mark.parametrize("second", ["a" * 17, "ab"])
def test_a_run_knows_its_mask_where_each_row_of_every_source_is_one_document(tmp_path, monkeypatch, second):
    def source(name, *texts):
        store = write_store(tmp_path / name, texts, characters_tokenizer(["ab"]))
        return SimpleNamespace(train=store, held_out=store, weight=0.5)

    known, of = [], TrainStep.of
    monkeypatch.setattr(TrainStep, "of", lambda settings, mesh, each: known.append(each) or of(settings, mesh, each))
    sources = {"whole": source("whole", "a" * 20), "other": source("other", second, second)}
    experiment = model_fixtures.experiment(model_fixtures.model(num_layers=1), sequence=16)
    start = Start(clock=Clock(), display=SimpleNamespace(say=print), profiler=None, stop=None, trains_from=known.append)
    Trainer(experiment, SimpleNamespace(sources=sources), meshes.make(), RunPaths(tmp_path), lambda _: None, start)
    assert known == [len(second) > 16]
