"""Fixtures of the engine's tests."""

import os

import pytest

from jaxlm.inference import programs


@pytest.fixture
def as_users_compile(monkeypatch):
    """Compile an engine's programs at XLA's own level: the suite's machine code is made quickly, without fused
    multiply-adds."""
    flags = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        flags["xla_cpu_use_fusion_emitters"] = True
    compiled = [each for each in vars(programs).values() if hasattr(each, "cache_clear")]
    for each in compiled:
        each.cache_clear()
    monkeypatch.setattr(programs, "_EXACT_ON_CPU", programs._EXACT_ON_CPU | flags)
    yield
    for each in compiled:
        each.cache_clear()
