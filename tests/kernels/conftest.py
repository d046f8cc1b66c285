import jax
import pytest


@pytest.fixture
def constant(monkeypatch):
    """Gives a module's constant another value; programs that operations keep were made with one of the two."""

    def change(module, name, value):
        monkeypatch.setattr(module, name, value)
        jax.clear_caches()

    yield change
    jax.clear_caches()
