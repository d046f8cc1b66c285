import functools

import model_fixtures
import pytest


@pytest.fixture(scope="module")
def programs_once():
    """Trace and compile each program once for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_fixtures, "jitted", functools.cache(model_fixtures.jitted))
        yield
