"""Chat templates by name: what they show, and how an answer ends for a tokenizer without their control tokens."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxlm.core.errors import InputError
from jaxlm.data import named_templates
from jaxlm.data.chat_template import chosen
from jaxlm.data.conversations import Conversation, encode, ends_answers
from jaxlm.data.tokenizers import Tokenizer, characters_tokenizer, train_bpe
from jaxlm.runs import conversion

MARKS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)
PLAIN = train_bpe(["some text without any marks " * 9], 280)
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
AGAIN = {"role": "user", "content": "2+2?"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": [1, 2]}'}}]}
RESULT = {"role": "tool", "content": "3"}

# Published formats, written out.
SHOWN = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral": "<s>[INST] Be brief.\n\n1+1?[/INST] 2</s>[INST] 2+2?[/INST]",
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    ),
}


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Return a folder that names what begins and ends a text, and a tokenizer with every mark as a control token."""
    backend = Backend.from_str(PLAIN.to_json())
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    folder = tmp_path_factory.mktemp("marked")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder, Tokenizer(backend)


def named(name, folder, tokenizer):
    return chosen(name, "data.chat_template", folder, tokenizer)


@pytest.mark.parametrize("name", named_templates.NAMES)
def test_a_conversation_is_shown_as_published(name, marked):
    template = named(name, *marked)
    assert template.render([SYSTEM, QUESTION, ANSWER, AGAIN], reply=True) == SHOWN[name]
    (end,) = template.stop_token_ids
    assert marked[1].name_of(end) in SHOWN[name] and ends_answers(template)


@pytest.mark.parametrize("name", named_templates.NAMES)
@pytest.mark.parametrize("turns", [1, 2])
def test_answers_are_learned_up_to_their_end(name, turns, marked):
    template = named(name, *marked)
    if name == "qwen3" and turns == 2:
        template = template.with_kwargs({"keep_thoughts": True})
    messages = [SYSTEM, *[QUESTION, ANSWER] * turns]
    tokens, learned = encode(Conversation(messages), template)
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    end = marked[1].name_of(next(iter(template.stop_token_ids)))
    expected = f"{thought}{' ' if name == 'mistral' else ''}2{end}" * turns
    assert marked[1].spelled_out(tokens[learned].tolist()) == expected


def test_tools_are_shown_as_qwen3_and_mistral_have_them(marked):
    messages = [QUESTION, CALL, RESULT]
    signatures = json.dumps(TOOL)
    shown = named("qwen3", *marked).render(messages, reply=True, tools=[TOOL])
    assert (
        shown.startswith("<|im_start|>system\n# Tools\n\nYou may call") and f"<tools>\n{signatures}\n</tools>" in shown
    )
    assert shown.endswith(
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"x": [1, 2]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert named("mistral", *marked).render(messages, reply=True, tools=[TOOL]) == (
        f"<s>[AVAILABLE_TOOLS] [{signatures}][/AVAILABLE_TOOLS][INST] 1+1?[/INST]"
        '[TOOL_CALLS] [{"name": "add", "arguments": {"x": [1, 2]}, "id": "123456789"}]</s>'
        '[TOOL_RESULTS] {"content": 3, "call_id": "123456789"}[/TOOL_RESULTS]'
    )


def test_what_qwen3_thought_is_shown_after_the_last_question_alone(marked):
    thinking = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"}
    template = named("qwen3", *marked)
    answer = "<|im_start|>assistant\n<think>\nEasy.\n</think>\n\n2<|im_end|>\n"
    assert template.render([QUESTION, thinking], reply=False).endswith(answer)
    before = template.render([QUESTION, thinking, AGAIN], reply=True)
    assert "Easy" not in before and before.endswith("<|im_start|>assistant\n")
    no_thoughts = template.with_kwargs({"enable_thinking": False})
    assert no_thoughts.render([QUESTION], reply=True).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", named_templates.NAMES)
def test_without_the_control_tokens_marks_are_text_and_answers_end_with_that_of_the_text(name, tmp_path):
    template = named(name, tmp_path, PLAIN)
    assert template.stop_token_ids == {PLAIN.separator} and ends_answers(template)
    tokens, learned = encode(Conversation([QUESTION, ANSWER]), template)
    assert PLAIN.spelled_out(tokens[learned].tolist()).endswith("2<|endoftext|>")
    if name == "chatml":
        assert template.render([QUESTION], reply=True) == "<|im_start|>user\n1+1?<|endoftext|>\n<|im_start|>assistant\n"


def test_where_nothing_ends_a_text_marks_stay_as_they_are(tmp_path):
    tokenizer = characters_tokenizer(["<|im_start|>user\nassistant1+2?!_end"])
    template = named("chatml", tmp_path, tokenizer)
    assert template.render([QUESTION], reply=False) == "<|im_start|>user\n1+1?<|im_end|>\n"
    assert not ends_answers(template)


def test_a_file_goes_before_a_name_and_an_unknown_name_lists_those_that_are_known(tmp_path, monkeypatch, marked):
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("{{ messages[0].content }}")
    assert named("chatml", *marked).render([QUESTION], reply=True) == "1+1?"
    with pytest.raises(InputError, match="data.chat_template: there is no file chatlm, .* chatml, gemma, llama3, mist"):
        named("chatlm", *marked)


def test_content_that_is_no_text_is_refused_and_not_spelled_out(marked):
    for name in ("chatml", "llama3", "mistral"):
        with pytest.raises(InputError, match=f"the chat template {name} cannot show these messages"):
            named(name, *marked).render([{"role": "user", "content": [{"type": "text", "text": "x"}]}], reply=True)


def test_an_export_names_what_the_template_of_a_run_needs(marked):
    """Its base ends a text with </s>, and ChatML an answer with <|im_end|>."""
    folder, tokenizer = marked
    ids = {name: tokenizer.controls[name] for name in ("</s>", "<|im_end|>")}
    base = Tokenizer(Backend.from_str(tokenizer.to_json()), stop_token_ids=[ids["</s>"]])

    def exported(name, **files):
        source = SimpleNamespace(chat=SimpleNamespace(template=lambda: named(name, folder, base)))
        return {file: json.loads(text) for file, text in conversion.ending_answers(source, files).items()}

    assert exported("chatml") == {"generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["</s>"]]}}
    assert exported("mistral") == {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}
    settings = {"tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode()}
    assert exported("mistral", **settings)["tokenizer_config.json"] == {"bos_token": "<s>", "eos_token": "</s>"}
