"""Published figures as they are counted, once for all tests of them."""

import pytest

from jaxlm.costs.published.cases import PUBLISHED, check


@pytest.fixture(scope="session")
def cases():
    return check(PUBLISHED)
