"""`jaxlm generate`, called here on a model that is not trained."""

import json

import jax
import pytest
import runs

from jaxlm.cli import main
from jaxlm.inference import generate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.untrained(tmp_path_factory.mktemp("generate") / "run", "training.dtype=bfloat16")


def generated(capsys, run, *arguments):
    assert main(["generate", str(run), *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_no_parameter_lies_in_float32_while_tokens_are_drawn(run, monkeypatch, capsys):
    before = {id(array) for array in jax.live_arrays()}
    largest = []

    def watched(*arguments, **options):
        for tokens in original(*arguments, **options):
            new = [array for array in jax.live_arrays() if id(array) not in before]
            largest.append(max((array.size for array in new if array.dtype == "float32"), default=0))
            assert sum(array.size for array in new if array.dtype == "bfloat16") > 10_000
            yield tokens

    original = generate.generate
    monkeypatch.setattr(generate, "generate", watched)
    generated(capsys, run, "--token-ids", "1,2,3", "--max-tokens", 3)
    assert len(largest) == 3 and max(largest) < 1000
