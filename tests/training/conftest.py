import functools

import model_fixtures
import pytest


@pytest.fixture(scope="module")
def programs_once():
    """For a module whose tests run the same programs: each is traced and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_fixtures, "jitted", functools.cache(model_fixtures.jitted))
        yield
