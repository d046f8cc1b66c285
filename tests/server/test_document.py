"""The OpenAPI document, and the server held against it: whatever is asked, it keeps to what it says of itself."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from matrices import sampled
from schemathesis import GenerationMode, checks

pytestmark = pytest.mark.xdist_group("server")

OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/tokenize"),
    ("POST", "/v1/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/tokenizer_info"),
    ("GET", "/v1/version"),
]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
# Of what is only read, all is taken.
MODES = [
    (method, path, mode)
    for method, path in OPERATIONS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if method == "POST" or mode is GenerationMode.POSITIVE
]
CASES = [pytest.param(*case, count, id=f"{case[1]}-{case[2].value}-{count}") for case in MODES for count in (8, 150)]


def test_it_has_every_route(server):
    _, url = server
    described = httpx.get(f"{url}/openapi.json").json()
    assert described["openapi"].startswith("3.1") and described == httpx.get(f"{url}/v1/openapi.json").json()
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == set(OPERATIONS)
    bodies = described["components"]["schemas"]
    assert bodies["ChatBody"]["additionalProperties"] is False
    assert bodies["ChatBody"]["properties"]["model"]["enum"] == ["tiny", "poet", "org/critic"]
    assert all("description" in each for each in bodies["CompletionBody"]["properties"].values() if "enum" not in each)


@pytest.mark.parametrize(("method", "path", "mode", "count"), sampled(CASES, lambda *case: case[-1] == 8))
def test_the_server_keeps_to_it(method, path, mode, count, server):
    """No status is 5xx, and every answer is of the type that it says, for bodies that keep to it and for others."""
    _, url = server
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path][method]

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case):
        case.call_and_validate(checks=CHECKS, timeout=60)

    holds()
