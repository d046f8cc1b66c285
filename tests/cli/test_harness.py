"""`jaxlm eval --tasks`: tasks of the lm-evaluation-harness in local files, run on a small model trained here."""

import json
import math
import sys
from collections import Counter

import jax
import model_fixtures
import numpy as np
import pytest
import runs
import tokenizer_fixtures
from engine_fixtures import WrittenEngine

from jaxlm import api
from jaxlm.cli import main, tasks
from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import characters_tokenizer
from jaxlm.inference.engine import Engine
from jaxlm.inference.requests import Sampling
from jaxlm.inference.settings import EngineSettings
from jaxlm.models.tree import abstract

pytestmark = pytest.mark.slow

CONTEXT, SEPARATOR = 32, 256
LLAMA2 = tokenizer_fixtures.llama2()  # of more tokens than bytes; the model has as many
FEW, AS_FEW = EngineSettings(slots=2), ("--slots", 2)  # one engine's programs serve all tests
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{train: {folder}/{name}-solved.jsonl, test: {folder}/{name}.jsonl}}
  cache_dir: {folder}/cache
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
{rest}
"""
CHOICE = """
output_type: multiple_choice
fewshot_split: train
doc_to_choice: ["alpha", " beta", "x"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
UNTIL = """
output_type: generate_until
num_fewshot: 0
generation_kwargs: {until: ["STOP"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
DOC = {"question": "delta ", "answer": 0}
ROLLING = """
output_type: loglikelihood_rolling
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    (folder / "text").mkdir()
    config = runs.write_config(folder / "text", "model.num_layers=1", f"model.vocab_size={LLAMA2.vocab_size}")
    assert main(["train", str(config), "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder):
    """The trained model, as jaxlm's own functions take it."""
    loaded = api.load(folder / "run", dtype="float32", engine=FEW)
    return loaded, abstract(loaded.config)[0], loaded.tokenizer


@pytest.fixture(scope="module")
def adapter(model):
    return make_adapter(model[0], model[2])


def make_adapter(loaded, tokenizer):
    from jaxlm.inference.harness import HarnessModel

    valid_token_mask = tokenizer.valid_token_mask(loaded.config.vocab_size)
    engine = Engine(
        loaded.config,
        loaded.parameters,
        loaded.mesh,
        FEW,
        valid_token_mask=valid_token_mask,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    return HarnessModel(engine, tokenizer)


def ask(adapter, kind, *arguments):
    from lm_eval.api.instance import Instance

    return getattr(adapter, kind)([Instance(kind, {}, given, 0) for given in arguments])


def log_softmax(model, tokens):
    """ln p of every token behind each of these, [T, V]."""
    loaded, graph, _ = model
    return np.asarray(jax.nn.log_softmax(model_fixtures.full_logits(graph, loaded.parameters, tokens)))


def greedy(model, prompt, count=12):
    """The likeliest continuation of a text, one prompt alone."""
    loaded, _, tokenizer = model
    ids = tokenizer.encode_prompt(prompt)[-(CONTEXT - count + 1) :]
    (completion,) = loaded.generate([ids], count, temperature=0)
    ids = list(completion.token_ids)
    return tokenizer.decode(ids[: ids.index(SEPARATOR)] if SEPARATOR in ids else ids)


def write_task(folder, name, rest, docs):
    solved = {"question": "beta ", "answer": type(docs[0]["answer"])(1)}  # all splits have the same types
    for split, rows in {f"{name}-solved": [solved], name: docs}.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{name}.yaml"
    path.write_text(TASK.format(name=name, folder=folder, rest=rest))
    return str(path)


def evaluate(capsys, *arguments):
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


PAIRS = [("alpha ", "beta"), ("", "gamma"), ("beta " * 20, "alpha"), ("e", " "), ("delta ", "alpha beta gamma delta")]


def test_log_likelihoods_are_those_of_the_logits(model, adapter):
    tokenizer = model[2]
    answers = ask(adapter, "loglikelihood", *PAIRS)
    for (context, continuation), (logprob, is_greedy) in zip(PAIRS, answers, strict=True):
        # The harness counts spaces at the end of a context to what follows.
        count = len(tokenizer.encode(context + continuation)) - len(tokenizer.encode(context.rstrip()))
        tokens = [SEPARATOR, *tokenizer.encode(context + continuation)][-CONTEXT - 1 :]
        table = log_softmax(model, tokens[:-1])
        scored, targets = table[-count:], tokens[-count:]
        # Each of the summed numbers, near 4, is rounded twice to float32.
        expected = scored[np.arange(count), targets].sum(dtype=np.float64)
        assert logprob == pytest.approx(expected, abs=1e-6 * count)
        assert is_greedy == (scored.argmax(axis=-1).tolist() == targets)


@pytest.mark.exhaustive
def test_answers_do_not_depend_on_what_else_is_asked(adapter):
    """To the last bit."""
    for kind, asked in {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [(text,) for text in ("alpha beta " * 9, "", "gamma")],
        "generate_until": [(context + "a", {"until": [], "max_gen_toks": 6}) for context, _ in PAIRS],
    }.items():
        assert ask(adapter, kind, *asked) == [ask(adapter, kind, one)[0] for one in asked]


@pytest.mark.exhaustive
def test_rolling_is_what_eval_measures(folder, model, adapter, capsys):
    """Compare on whole windows, so that both cut the text at the same places; eval includes the final separator."""
    text = ("alpha beta gamma delta " * 9)[: 4 * CONTEXT]
    (folder / "rolled.txt").write_text(text)
    measured = evaluate(capsys, folder / "run", "--data", folder / "rolled.txt")
    (rolling,) = ask(adapter, "loglikelihood_rolling", (text,))
    end = log_softmax(model, model[2].encode(text[-1]))[-1, SEPARATOR]
    assert measured["tokens"] == len(text) + 1
    assert measured["loss"] * measured["tokens"] == pytest.approx(-(rolling + end), rel=1e-5)

    task = write_task(folder, "rolling", ROLLING, [{"question": "", "answer": text}])
    (found,) = evaluate(capsys, folder / "run", "--tasks", task)["tasks"].values()
    assert found["bits_per_byte,none"] == pytest.approx(-rolling / math.log(2) / len(text), rel=1e-5)


@pytest.mark.exhaustive
def test_generation_ends_before_the_first_stop(model, adapter):
    for prompt in ("alpha ", "gamma " * 30):
        whole = greedy(model, prompt)
        assert len(whole) > 6
        for stops in ([whole[3:6]], [whole[5:6], "never"], []):
            options = {"until": stops, "max_gen_toks": 12, "do_sample": False}
            end = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
            assert ask(adapter, "generate_until", (prompt, options)) == [whole[:end]]


def test_a_continuation_goes_on_from_its_context():
    """Its first blank stays, and a stop is found where it begins in one token and ends in another."""
    from jaxlm.inference.harness import HarnessModel

    context = LLAMA2.encode("the model")
    following = LLAMA2.encode("the model goes on 😀 here")[len(context) :]
    adapter = HarnessModel(WrittenEngine(lambda _: following), LLAMA2)
    for until, text in {"never": " goes on 😀 here", "on 😀": " goes ", " go": "", "😀 h": " goes on "}.items():
        assert ask(adapter, "generate_until", ("the model", {"until": until})) == [text]


def test_sampling_draws_other_texts_and_repeats(adapter):
    options = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.95}
    first, second = ask(adapter, "generate_until", *[("alpha", options)] * 2)
    assert first != second
    assert ask(adapter, "generate_until", *[("alpha", options)] * 2) == [first, second]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams is nothing that jaxlm"),
        ({"max_gen_toks": CONTEXT + 1}, "max_gen_toks = 33 must be 1 to model.context_length = 32"),
        ({"max_gen_toks": "many"}, "max_gen_toks = 'many': input should be a valid integer"),
        ({"max_new_tokens": 0}, "max_gen_toks = 0 must be 1 to"),
        ({"do_sample": True, "top_p": 2.0}, r"generation_kwargs\.top_p = 2 must be above 0"),
        ({"repetition_penalty": 0.0}, r"generation_kwargs\.repetition_penalty = 0 must be from"),
        ({"min_p": "low"}, "min_p = 'low': input should be a valid number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias = .*: input should be a valid integer"),
        ({"logprobs": 2}, "logprobs is nothing that jaxlm"),
        ({"do_sample": True, "top_k": 2.5}, "top_k = 2.5: input should be a valid integer"),
        ({"temperature": "hot"}, "temperature = 'hot': input should be a valid number"),
        ({"temperature": -1.0, "do_sample": True}, r"generation_kwargs\.temperature = -1 must be 0"),
        ({"do_sample": "sometimes"}, "do_sample = 'sometimes': input should be a valid boolean"),
        ({"until": [5]}, r"until = \[5\]: input should be a valid string"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, message, adapter):
    with pytest.raises(InputError, match=message):
        ask(adapter, "generate_until", ("alpha", {"until": [], **options}))


def test_what_changes_nothing_may_be_given():
    from jaxlm.inference.harness import generation_options

    off = {"num_beams": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "top_p": None}
    plain = {"until": "\n", "max_gen_toks": 8, "do_sample": True, "temperature": 0.7}
    expected = Sampling(temperature=0.7), 8, ("\n",)
    for given in (plain, plain | off, plain | {"temperature": "0.7", "max_gen_toks": 8.0, "top_k": -1}):
        assert generation_options(given, CONTEXT) == expected


def test_penalties_hold_for_the_likeliest_too():
    """And filters do not, as in transformers."""
    from jaxlm.inference.harness import generation_options

    given = {"until": [], "max_gen_toks": 8, "top_p": 0.5, "repetition_penalty": "1.2", "logit_bias": {"5": -1}}
    expected = Sampling(0.0, repetition_penalty=1.2, logit_bias={5: -1.0})
    assert generation_options(given, CONTEXT) == (expected, 8, ())


def test_a_way_to_generate_is_refused_before_anything_is_restored(folder, capsys, monkeypatch):
    monkeypatch.setattr(api.LoadedModel, "parameters", None)
    task = write_task(folder, "beams", UNTIL.replace("do_sample", "num_beams: 4, do_sample"), [DOC])
    assert main(["eval", str(folder / "run"), "--tasks", task]) == 2
    assert "--tasks: beams: generation_kwargs: num_beams is nothing" in capsys.readouterr().err


def test_requests_that_lose_their_beginning_are_counted(folder, capsys):
    long, short = DOC | {"question": "alpha " * 20}, DOC
    choice = write_task(folder, "cut_choice", CHOICE, [long, short | {"answer": 1}])
    until = write_task(folder, "cut_until", UNTIL, [long | {"answer": "x"}, DOC | {"answer": "x"}])
    assert main(["eval", str(folder / "run"), "--tasks", f"{choice}, {until}", *map(str, AS_FEW), "--json"]) == 0
    out, error = capsys.readouterr()
    found = json.loads(out)["tasks"]
    assert (found["cut_choice"]["truncated"], found["cut_until"]["truncated"]) == (3, 1)
    said = "jaxlm: requests longer than model.context_length lost their beginning: 3 of cut_choice, 1 of cut_until\n"
    assert error.count(said) == 1
    assert (
        evaluate(capsys, folder / "run", "--tasks", choice, "--limit", 1, *AS_FEW)["tasks"]["cut_choice"]["truncated"]
        == 3
    )


def test_requests_without_an_answer_are_counted(capsys):
    results = {"results": {"odd": {"acc,none": 0.5}, "plain": {"acc,none": 1.0}}, "configs": {"odd": {}, "plain": {}}}
    tasks.show(results, Counter(), Counter(odd=2, plain=0), step=40, dtype="float32", as_json=True)
    out, error = capsys.readouterr()
    assert json.loads(out)["tasks"]["odd"] == {"acc,none": 0.5, "truncated": 0, "unanswered": 2}
    said = "requests that cannot be encoded, or begin with nothing, scored −∞ or gave no text"
    assert error == f"jaxlm: {said}: 2 of odd\n"


def test_a_text_needs_something_before_its_first_token(model):
    characters = make_adapter(model[0], characters_tokenizer(["alpha beta"]))
    (alone,) = ask(characters, "loglikelihood", ("alpha", " beta"))
    asked = ("", "beta"), ("alpha", " beta"), ("", ""), ("alpha", "strange")
    unanswered = (-math.inf, False)
    answers = ask(characters, "loglikelihood", *asked)
    assert answers == [unanswered, pytest.approx(alone, abs=1e-5), (0.0, True), unanswered]
    greedily = {"until": [], "max_gen_toks": 4}
    texts = ask(characters, "generate_until", *[(context, greedily) for context in ("", "alpha", "strange")])
    assert texts[0] == texts[2] == "" != texts[1]
    assert sum(characters.unanswered.values()) == 4
    with pytest.raises(InputError, match="tokenizer has no separator"):
        ask(characters, "loglikelihood_rolling", ("beta",))


def test_a_degenerate_request_takes_no_other_down(model, adapter):
    """Each has an answer of its own, and the others have theirs."""
    plain = [("alpha ", "beta"), ("", "gamma")]
    expected = ask(adapter, "loglikelihood", *plain)
    long = "alpha beta " * 9
    (rolled,) = ask(adapter, "loglikelihood_rolling", (long,))
    odd = {
        ("", ""): (0.0, True),
        ("alpha", ""): (0.0, True),
        ("alpha", None): (0.0, True),
        ("", long): (pytest.approx(rolled, abs=1e-3), False),
        ("half a pair \ud800", "beta"): (-math.inf, False),
    }
    before = adapter.unanswered.total()
    answers = ask(adapter, "loglikelihood", plain[0], *odd, plain[1], (5, 7), ("5", "7"))
    assert answers[1 : 1 + len(odd)] == list(odd.values())
    assert [answers[0][0], answers[len(odd) + 1][0]] == pytest.approx([p for p, _ in expected], abs=1e-5)
    assert answers[-2] == answers[-1] and adapter.unanswered.total() == before + 1
    assert ask(adapter, "loglikelihood_rolling", ("",), ("\ud800",)) == [0.0, -math.inf]
    options = {"until": [], "max_gen_toks": 6, "do_sample": False}
    (alone,) = ask(adapter, "generate_until", ("alpha ", options))
    assert ask(adapter, "generate_until", ("alpha ", options), ("\ud800", options)) == [alone, ""]


def test_choices_that_merge_with_their_context_are_told_apart(model):
    """As "e" and "ey" after "th" with a tokenizer that has "the": each follows the same tokens, as no blank does."""
    tokenizer, merged = LLAMA2, make_adapter(model[0], LLAMA2)
    context = tokenizer.encode_prompt("th")
    letters = [tokenizer.encode(f"b{letter}")[-1] for letter in "eya"]
    assert merged._pair("th", "e") == (context, letters[:1])
    assert merged._pair("th", "ey") == (context, letters[:2])
    assert merged._pair("th", " on") == (context, tokenizer.encode("th on")[len(context) - 1 :])
    answers = ask(merged, "loglikelihood", ("th", "e"), ("th", "ey"), ("th", "ay"), ("th", " on"))
    assert len({logprob for logprob, _ in answers}) == 4 and all(math.isfinite(logprob) for logprob, _ in answers)


def test_local_tasks_are_evaluated(folder, model, adapter, capsys):
    questions = ["alpha ", "beta", "gamma x", "delta "]
    choices = ["alpha", " beta", "x"]
    likeliest = [
        int(np.argmax([p for p, _ in ask(adapter, "loglikelihood", *[(q, choice) for choice in choices])]))
        for q in questions
    ]
    docs = [{"question": q, "answer": best} for q, best in zip(questions, likeliest, strict=True)]
    docs[0]["answer"] = (docs[0]["answer"] + 1) % 3
    choice = write_task(folder, "choice", CHOICE, docs)
    answers = [greedy(model, question) for question in questions]
    docs = [{"question": q, "answer": a} for q, a in zip(questions, [*answers[:2], "wrong", "wrong"], strict=True)]
    until = write_task(folder, "until", UNTIL, docs)

    found = evaluate(capsys, folder / "run", "--tasks", f"{choice},{until}", *AS_FEW)
    assert set(found) == {"tasks", "step", "dtype"} and found["step"] == 40
    assert found["tasks"]["choice"]["acc,none"] == 0.75 and found["tasks"]["choice"]["sample_len"] == 4
    assert found["tasks"]["until"]["exact_match,none"] == 0.5
    found = evaluate(capsys, folder / "run", "--tasks", choice, "--limit", 1, *AS_FEW)
    assert found["tasks"]["choice"]["acc,none"] == 0.0 and found["tasks"]["choice"]["sample_len"] == 1

    assert main(["eval", str(folder / "run"), "--tasks", choice, *map(str, AS_FEW)]) == 0
    shown = capsys.readouterr().out
    assert "step 40" in shown and ["choice", "0", "acc", "0.7500"] == shown.splitlines()[3].split()[:4]


@pytest.mark.exhaustive  # tests/inference/test_scoring.py has meshes
def test_local_tasks_are_evaluated_on_a_mesh(folder, capsys):
    choice = write_task(folder, "meshed", CHOICE, [DOC, DOC | {"answer": 1}, DOC | {"answer": 2}])
    one, two = (evaluate(capsys, folder / "run", "--tasks", choice, *mesh, *AS_FEW) for mesh in ([], ["mesh.fsdp=2"]))
    assert two == one and one["tasks"]["meshed"]["acc,none"] == pytest.approx(1 / 3)


def test_solved_examples_stand_before_a_question(folder):
    task = write_task(folder, "shots", CHOICE, [{"question": "delta ", "answer": 0}] * 3)
    (loaded,) = tasks.load([task], 1, CONTEXT)["tasks"].values()
    loaded.build_all_requests(limit=1)
    assert {i.args for i in loaded.instances} == {("beta  beta\n\ndelta ", end) for end in ("alpha", " beta", "x")}


@pytest.mark.exhaustive
def test_bad_tasks_are_one_line(folder, capsys):
    run = str(folder / "run")
    choice = write_task(folder, "refused", CHOICE, [{"question": "delta ", "answer": 0}])
    until = write_task(folder, "unshot", UNTIL, [{"question": "delta ", "answer": "x"}])
    (folder / "broken.yaml").write_text("task: [\n")
    (folder / "text.txt").write_text("no task: at all: " * 200)
    (folder / "lost.yaml").write_text((folder / "refused.yaml").read_text().replace("refused.jsonl", "lost.jsonl"))
    (folder / "group.yaml").write_text(f"group: some\ntask: [{choice}]\n")
    nothing = write_task(folder, "nothing", CHOICE, [DOC])
    for name in ("nothing", "nothing-solved"):
        (folder / f"{name}.jsonl").write_text("")
    for arguments, says in {
        f"--tasks {folder}/group.yaml": "of a group of files, name the files",
        f"--tasks {nothing}": "nothing.yaml cannot be loaded (it has no documents)",
        "--tasks hellaswg": "'hellaswg' is no task of the harness and no file; near it: hellaswag",
        f"--tasks {folder}/none.yaml": "none.yaml' is no task of the harness and no file",
        f"--tasks {folder}/broken.yaml": "broken.yaml cannot be loaded",
        f"--tasks {folder}/lost.yaml": "lost.yaml cannot be loaded",
        f"--tasks {folder}/text.txt": "text.txt cannot be loaded",
        f"--tasks {until} --num-fewshot 1": "--num-fewshot 1: unshot takes no examples",
        f"--tasks {choice} --num-fewshot 2": "--num-fewshot 2: refused has 1 examples",
        f"--tasks {choice} --num-fewshot -1": "--num-fewshot -1 must be 0 or more",
        f"--tasks {choice} --limit 0": "--limit 0 must be 1 or more",
    }.items():
        assert main(["eval", run, *arguments.split()]) == 2
        printed = capsys.readouterr()
        last = printed.err.splitlines()[-1]
        assert printed.out == "" and last.startswith("jaxlm: ") and says in last and len(last) < 600
        assert "Traceback" not in printed.err


def test_without_the_extra_one_line_says_how_to_get_it(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(folder / "run"), "--tasks", "hellaswag"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxlm: --tasks needs the lm-evaluation-harness: pip install -e '.[lm-eval]'")
    assert error.count("\n") == 1
