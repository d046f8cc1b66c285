"""One tiny model behind a server over loopback, for all tests of the server."""

import time

import adapter_fixtures
import meshes
import model_fixtures
import openai
import pytest
import tokenizer_fixtures
from serving import CONTEXT, serving

from jaxlm.inference.engine import Engine
from jaxlm.inference.grammar import Grammars
from jaxlm.inference.settings import EngineSettings
from jaxlm.models import tree
from jaxlm.models.lora_config import LoraConfig

SETTINGS = EngineSettings(slots=8, page=32, chunk_tokens=64, max_queued=64)


@pytest.fixture(scope="session")
def tokenizer():
    return tokenizer_fixtures.chatml()


@pytest.fixture(scope="session")
def engine(tokenizer):
    """An engine of random weights and adapters: its texts are random bytes, few of which are characters."""
    vocabulary = 264  # more rows than tokens
    model = model_fixtures.model(vocab_size=vocabulary, context_length=CONTEXT, num_layers=1)
    parameters = tree.init(model, 0, meshes.make())
    # No id ends every text: so the tests know how long each is.
    engine = Engine(
        model,
        parameters,
        meshes.make(),
        SETTINGS,
        valid_token_mask=tokenizer.valid_token_mask(vocabulary),
        grammars=Grammars(tokenizer, vocabulary),
        adapters=[
            adapter_fixtures.adapter("poet", model, LoraConfig(rank=2), 1),
            adapter_fixtures.adapter("org/critic", model, LoraConfig(rank=3, targets=("*/down",)), 2),
        ],
    )
    engine.warm(scores=True)
    return engine


@pytest.fixture(scope="session")
def server(engine, tokenizer):
    with serving(engine, tokenizer) as (served, url):
        yield served, url


@pytest.fixture(scope="session")
def client(server):
    _, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """No page is in use soon after a test of the server.

    A client has the answer that a stop string ended before the engine's thread has freed its pages.
    """
    yield
    if "server" in request.fixturenames:
        served, _ = request.getfixturevalue("server")
        deadline = time.monotonic() + 10
        while served.service.engine.pages_held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not served.service.engine.pages_held
