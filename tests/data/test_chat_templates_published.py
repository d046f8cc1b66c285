"""Chat templates in the styles of five published families, held against transformers where that is installed."""

import datetime
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxlm.data import tokenizers
from jaxlm.data.chat_template import load

DAY = datetime.datetime(2026, 1, 2)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather – in °C.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
QUESTION = {"role": "user", "content": "What is 1 < 2 & 'three'?"}
ANSWER = {"role": "assistant", "content": "<think>\nEasy…\n</think>\n\nTrue, of course. "}
AGAIN = {"role": "user", "content": " And\n\nin Zürich? 🦩"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
}
FOUND = {"role": "tool", "content": "7 °C"}
CONVERSATIONS = {
    "one": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "several": [QUESTION, ANSWER, AGAIN],
    "all": [SYSTEM, QUESTION, ANSWER, AGAIN],
}
WITH_TOOLS = [SYSTEM, AGAIN, CALL, FOUND]

# Written for this test, with what published templates use: namespaces, slices, macros, methods of strings, loop
# controls, blank control, `is defined`, `tojson`, `strftime_now`, `raise_exception`.
TEMPLATES = Path(__file__).parent / "chat_templates"
MERGES = [("t", "h"), ("th", "e"), ("o", "n"), ("i", "n"), ("u", "r"), (":", ":")]


def _byte_level(*controls: AddedToken) -> Backend:
    """Make a byte-level byte-pair encoding, as of Llama 3, Qwen and DeepSeek."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [*MERGES, ("Ġ", "the"), ("Ċ", "Ċ")]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens(list(controls))
    return backend


def _sentencepiece(normalizer: normalizers.Normalizer, *controls: AddedToken) -> Backend:
    """Make a byte-pair encoding with blanks as ▁ and byte fallback, as of Gemma and Mistral."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    merges = [*MERGES, ("▁", "▁"), ("▁", "the"), ("▁▁", "▁▁")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    tokens += ["".join(pair) for pair in merges]
    backend = Backend(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizer
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    backend.decoder = decoders.Sequence(list(steps))
    backend.add_tokens([special(token) for token in ("<unk>", "<s>", "</s>")])
    backend.add_tokens(list(controls))
    return backend


def special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def plain(name: str) -> AddedToken:
    """Return an added token that its file does not call special."""
    return AddedToken(name, special=False, normalized=False)


def llama_3() -> Backend:
    names = "begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"
    return _byte_level(*(special(f"<|{name}|>") for name in names))


def qwen_3() -> Backend:
    names = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    words = "<think>", "</think>", "<tool_call>", "</tool_call>"
    return _byte_level(*map(special, names), *map(plain, words))


def gemma() -> Backend:
    names = "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"
    return _sentencepiece(normalizers.Replace(" ", "▁"), *map(special, names), plain("\n\n"), plain("▁▁▁"))


def mistral() -> Backend:
    steps = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    names = "INST", "TOOL_CALLS", "AVAILABLE_TOOLS", "TOOL_RESULTS"
    brackets = [f"[{slash}{name}]" for name in names for slash in ("", "/")]
    return _sentencepiece(normalizers.Sequence(list(steps)), *map(special, brackets))


def deepseek() -> Backend:
    names = "begin▁of▁sentence", "end▁of▁sentence"
    words = "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<think>", "</think>"
    return _byte_level(*(special(f"<｜{name}｜>") for name in names), *map(plain, words))


# Tokenizer, what begins and ends a text, and the token that ends an answer.
STYLES = {
    "llama3": (llama_3, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    "qwen3": (qwen_3, None, "<|im_end|>", "<|im_end|>"),
    "gemma": (gemma, "<bos>", "<eos>", "<end_of_turn>"),
    "mistral": (mistral, "<s>", "</s>", "</s>"),
    "deepseek": (deepseek, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}


def published(folder, style):
    """Write the files of a style into a folder. Return its chat template, under a fixed clock."""
    backend, begin, end, _ = STYLES[style]
    folder.mkdir(exist_ok=True)
    backend().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    settings |= {
        "chat_template": (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load(folder, tokenizers.load(folder / "tokenizer.json"), lambda: DAY)


CASES = [(style, name, None) for style in STYLES for name in CONVERSATIONS]
CASES += [(style, "tools", TOOLS) for style in STYLES if style != "gemma"]


@pytest.mark.parametrize(("style", "name", "tools"), CASES)
@pytest.mark.parametrize("reply", [True, False])
def test_text_and_ids_are_those_of_transformers(tmp_path, monkeypatch, style, name, tools, reply):
    transformers = pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils

    class Today(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return DAY

    monkeypatch.setattr(chat_template_utils, "datetime", Today)
    ours = published(tmp_path / "model", style)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    messages = WITH_TOOLS if tools else CONVERSATIONS[name]
    asked = {"tools": tools, "add_generation_prompt": reply}
    text = theirs.apply_chat_template(messages, tokenize=False, **asked)
    assert ours.render(messages, reply=reply, tools=tools) == text
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **asked)["input_ids"]
    assert ours.encode(messages, reply=reply, tools=tools) == ids


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_ends_with_what_the_template_writes_behind_it(tmp_path, style):
    chat = published(tmp_path, style)
    assert chat.stop_token_ids == {chat.tokenizer.controls[STYLES[style][-1]]}


@pytest.mark.parametrize("style", STYLES)
def test_what_a_user_spells_out_is_no_control_token(tmp_path, style):
    """Also one that its file does not call special."""
    chat = published(tmp_path, style)
    before = chat.encode([{"role": "user", "content": "x"}], reply=True)
    controls = set(chat.tokenizer.controls.values())
    spelled = "x".join(chat.tokenizer.controls)
    found = chat.encode([{"role": "user", "content": f"x{spelled}x"}], reply=True)
    assert [token for token in found if token in controls] == [token for token in before if token in controls]
    assert ("<｜User｜>" in spelled) == (style == "deepseek")
