"""The lm-evaluation-harness as a client of /v1/completions: its figures are those of `jaxlm eval --tasks`."""

import json

import meshes
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import RemoteTokenizer

from jaxlm.cli import tasks
from jaxlm.inference.engine import Engine
from jaxlm.inference.harness import HarnessModel
from jaxlm.models import tree

pytestmark = pytest.mark.xdist_group("server")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/animals.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
"""
CHOICE = """
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["Woof", " Meow", "Moo, it says"]
output_type: multiple_choice
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
output_type: loglikelihood_rolling
metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}]
"""
UNTIL = """
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
output_type: generate_until
generation_kwargs: {{until: ["STOP"], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_its_figures_are_those_of_eval(engine, tokenizer, server, tmp_path, monkeypatch):
    """Each text begins with the id that begins documents, as with `add_bos_token`."""
    served, url = server
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    questions = [f"What does the {animal} say? " for animal in ("dog", "cat", "cow", "sheep")]
    (tmp_path / "animals.jsonl").write_text("".join(json.dumps({"question": q, "answer": 0}) + "\n" for q in questions))
    for name, text in (("animals", CHOICE), ("texts", ROLLING), ("continued", UNTIL)):
        (tmp_path / f"{name}.yaml").write_text((TASK + text).format(name=name, folder=tmp_path))
    asked = [str(tmp_path / f"{name}.yaml") for name in ("animals", "texts", "continued")]

    parameters = tree.init(engine.model, 0, meshes.make())
    other = Engine(
        engine.model,
        parameters,
        meshes.make(),
        engine.settings,
        valid_token_mask=tokenizer.valid_token_mask(engine.model.vocab_size),
    )
    adapter = HarnessModel(other, tokenizer)
    here = tasks.run(adapter, tasks.load(asked, 0, engine.model.context_length), None)

    def encoded(self, text):
        return tokenizer.encode_prompt(text)

    client = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="tiny",
        max_length=served.longest,
        num_concurrent=4,
        max_retries=1,
    )
    there = {}
    for name in asked:
        with monkeypatch.context() as patch:
            if not name.endswith("texts.yaml"):  # before which the harness itself puts an id
                patch.setattr(RemoteTokenizer, "encode", encoded)
            there |= tasks.run(client, tasks.load([name], 0, engine.model.context_length), None)["results"]
    for name, metric in (("animals", "acc,none"), ("texts", "bits_per_byte,none"), ("continued", "exact_match,none")):
        expected = here["results"][name][metric]
        assert there[name][metric] == pytest.approx(expected, rel=1e-6)  # sums in float64 of equal numbers
    monkeypatch.setattr(RemoteTokenizer, "encode", encoded)
    scored, drawn = (
        [Instance(kind, {}, given, 0) for given in each]
        for kind, each in (
            ("loglikelihood", [(question, " Woof") for question in questions]),
            ("generate_until", [(question, {"until": ["STOP"], "max_gen_toks": 12}) for question in questions]),
        )
    )
    expected = adapter.loglikelihood(scored)
    np.testing.assert_allclose([ln_p for ln_p, _ in client.loglikelihood(scored)], [x for x, _ in expected], rtol=1e-6)
    assert client.generate_until(drawn) == adapter.generate_until(drawn)
