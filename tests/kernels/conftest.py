import jax
import pytest


@pytest.fixture
def constant(monkeypatch):
    """Return a function that sets a module's constant; compiled programs are cleared with every change."""

    def change(module, name, value):
        monkeypatch.setattr(module, name, value)
        jax.clear_caches()

    yield change
    jax.clear_caches()
