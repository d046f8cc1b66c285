"""Texts that are held to a form, by the client of OpenAI: JSON of a schema, choices, expressions and calls of tools."""

import asyncio
import json
import re
import threading
from typing import Literal

import jsonschema
import openai
import pytest
from call_templates import CALLS, template_of
from pydantic import BaseModel, ConfigDict, Field
from serving import SEED, serving

from jaxlm.data.chat_template import ChatTemplate
from jaxlm.inference import grammar as grammar_module
from jaxlm.inference.grammar import CompiledGrammar
from jaxlm.server.served import ServedModel

pytestmark = pytest.mark.xdist_group("server")

QUESTION = [{"role": "user", "content": "Where?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Zürich", "東京"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def chat(client):
    def chat(**options):
        asked = {"model": "tiny", "messages": QUESTION, "seed": SEED, "max_tokens": 150}
        return client.chat.completions.create(**{**asked, **options})

    return chat


def is_trip(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def test_an_answer_is_a_value_of_its_schema(chat):
    """Whole or streamed, and so is each of several."""
    answer = chat(response_format=FORMAT, n=3)
    assert all(choice.finish_reason == "stop" and is_trip(choice.message.content) for choice in answer.choices)
    texts = ["", "", ""]
    for chunk in chat(response_format=FORMAT, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


class Trip(BaseModel):
    """A class whose values the client asks for and reads."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Bern"]
    nights: int = Field(ge=1, le=9)


def test_the_client_reads_values_of_a_class(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Trip, seed=SEED, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_an_answer_is_an_object_or_any_text(chat, tokenizer):
    ends = {str(tokenizer.encode(mark)[0]): 5 for mark in '"}],'}
    answer = chat(response_format={"type": "json_object"}, logit_bias=ends, temperature=0.5)
    assert answer.choices[0].message.content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    plain = chat(max_tokens=5)
    assert chat(max_tokens=5, response_format={"type": "text"}).choices == plain.choices


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"regex": "[a-c]{2,4}[0-9]"}, lambda text: re.fullmatch("[a-c]{2,4}[0-9]", text)),
        ({"choice": ["ja", "nein", 'viel"leicht']}, lambda text: text in ("ja", "nein", 'viel"leicht')),
        ({"grammar": 'start: "<" /[xyz]{3}/ ">"'}, lambda text: re.fullmatch("<[xyz]{3}>", text)),
        ({"json": SCHEMA}, is_trip),
        ({"json": json.dumps(SCHEMA)}, is_trip),
        ({"json": SCHEMA, "whitespace_pattern": "[ ]"}, lambda text: is_trip(text) and re.search("[^:,] ", text)),
    ],
)
def test_texts_have_the_forms_of_vllm(form, fits, client, chat):
    assert fits(chat(extra_body={"structured_outputs": form}).choices[0].message.content)
    completion = client.completions.create(
        model="tiny",
        prompt=["a", "b"],
        n=2,
        seed=SEED,
        max_tokens=150,
        extra_body={"structured_outputs": form},
    )
    assert len(completion.choices) == 4 and all(fits(choice.text) for choice in completion.choices)


def test_others_are_answered_while_grammars_are_compiled(server, monkeypatch):
    """However many wait. A request compiles its grammar once, and the engine finds it compiled."""
    gate, threads, compile_one = threading.Event(), [], CompiledGrammar.of
    arrived, compiled = [], ServedModel.compiled

    def compile_behind_gate(grammar, *rest):
        threads.append(threading.current_thread().name)
        assert gate.wait(60)
        return compile_one(grammar, *rest)

    def arrive(served, grammar, param):
        arrived.append(grammar)
        return compiled(served, grammar, param)

    monkeypatch.setattr(CompiledGrammar, "of", compile_behind_gate)
    monkeypatch.setattr(ServedModel, "compiled", arrive)
    monkeypatch.setattr(grammar_module, "_KEPT", 0)

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server[1]}/v1", api_key="any", max_retries=0, timeout=30) as client:

            async def held(number):
                form = {"structured_outputs": {"regex": f"x{number}"}}
                asked = {"model": "tiny", "prompt": "a", "n": 1 + (number == 2), "max_tokens": 9, "extra_body": form}
                answer = await client.completions.create(**asked)
                return {choice.text for choice in answer.choices} == {f"x{number}"}

            waiting = [asyncio.create_task(held(number)) for number in range(2, 47)]
            while len(arrived) < 40:  # as many as there are threads for all else
                await asyncio.sleep(0.01)
            others = [client.completions.create(model="tiny", prompt="a", max_tokens=3) for _ in range(3)]
            answers = await asyncio.gather(*others)
            assert not any(task.done() for task in waiting) and all(answer.choices for answer in answers)
            gate.set()
            return await asyncio.gather(*waiting)

    try:
        assert all(asyncio.run(ask()))
    finally:
        gate.set()
    assert len(threads) == 45 and not {"engine", "MainThread"} & set(threads)


def test_a_response_has_a_form(client):
    form = {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}
    answer = client.responses.create(
        model="tiny", input="Where?", text={"format": form}, max_output_tokens=200, extra_body={"seed": SEED}
    )
    assert answer.status == "completed" and is_trip(answer.output_text)
    assert answer.text.format.type == "json_schema"


def test_what_stands_beside_it_stays_as_it_is(client, chat):
    """A text whose neighbours in a batch are held to a form."""
    alone = client.completions.create(model="tiny", prompt="a", seed=SEED, max_tokens=40, logprobs=1)
    held = chat(response_format=FORMAT, n=4, stream=True)
    beside = client.completions.create(model="tiny", prompt="a", seed=SEED, max_tokens=40, logprobs=1)
    assert beside.choices == alone.choices
    assert [choice.finish_reason for chunk in held for choice in chunk.choices if choice.finish_reason] == ["stop"] * 4


def test_a_text_that_cannot_go_on_is_refused_alone(chat):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(extra_body={"structured_outputs": {"regex": "abc"}, "min_tokens": 9})
    assert refused.value.code == "grammar_failed" and "min_tokens = 9" in refused.value.body["message"]
    assert is_trip(chat(response_format=FORMAT).choices[0].message.content)


TOOLS = [
    {"type": "function", "function": {"name": "trip", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]


@pytest.fixture(scope="module", params=["hermes", "llama3", "qwen3-coder"])
def calling(request, engine, tokenizer):
    """Ask a server whose template shows calls in a form."""
    template = ChatTemplate(template_of(CALLS[request.param]), tokenizer, {}, "chat_template.jinja")
    with (
        serving(engine, tokenizer, chat_template=template) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):

        def create(**options):
            asked = {"model": "tiny", "messages": QUESTION, "seed": SEED, "tools": TOOLS}
            return client.chat.completions.create(**{**asked, "max_tokens": 160, **options}).choices[0]

        yield create


def test_asked_calls_are_calls(calling):
    """Random weights write them too, with arguments of the schema."""
    named = calling(tool_choice={"type": "function", "function": {"name": "trip"}})
    (call,) = named.message.tool_calls
    assert (call.function.name, named.finish_reason, named.message.content) == ("trip", "tool_calls", None)
    assert is_trip(call.function.arguments)
    for seed in range(3):
        choice = calling(tool_choice="required", parallel_tool_calls=False, seed=seed)
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name in ("trip", "now")
        assert call.function.name == "now" or is_trip(call.function.arguments)


def test_a_strict_call_that_is_not_asked_for_has_its_schema(calling, tokenizer):
    """A text may stand in its place; what has begun as a call becomes one. Beside a form there is either."""
    opening = "<tool_call>", "{"
    for seed in range(3):
        choice = calling(seed=seed, max_tokens=20)
        assert choice.finish_reason == "length" and choice.message.tool_calls is None and choice.message.content
        assert not any(choice.message.content.startswith(each) for each in opening)
        word = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"const": "w"}}}
        choice = calling(seed=seed, response_format=word)
        if calls := choice.message.tool_calls:
            assert all(call.function.name == "now" or is_trip(call.function.arguments) for call in calls)
        else:
            assert choice.message.content == '"w"'
