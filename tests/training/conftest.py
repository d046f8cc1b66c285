import functools

import pytest
import tiny


@pytest.fixture(scope="module")
def programs_once():
    """For a module whose tests run the same programs: each is traced and compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "jitted", functools.cache(tiny.jitted))
        yield
