"""Text that is decoded token by token is the text of all tokens."""

import random

import pytest
from tokenizer_fixtures import llama2, sentencepiece, wordpiece
from tokenizers import decoders

from jaxlm.data.tokenizers import bytes_tokenizer, characters_tokenizer
from jaxlm.inference.detokenizer import Detokenizer

TEXT = "the model, its théorème and 你好 😀 go on: it's here. "
TOKENIZERS = {
    "bytes": bytes_tokenizer,
    "characters": lambda: characters_tokenizer([TEXT]),
    "metaspace": lambda: sentencepiece(decoders.Metaspace()),
    "llama2": llama2,
    "wordpiece": lambda: wordpiece(TEXT),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def pieces(tokenizer, prompt, tokens):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.add, tokens), detokenizer.rest()]


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_text_after_the_prompt(tokenizer, seed):
    words = random.Random(seed).choices(TEXT.split(" "), k=20)
    ids = tokenizer.encode(" ".join(words))
    for at in (0, 1, 5, len(ids) - 1):
        if "\ufffd" in (before := tokenizer.decode(ids[:at])):
            continue
        assert before + "".join(pieces(tokenizer, ids[:at], ids[at:])) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", ["metaspace", "llama2", "wordpiece"], indirect=True)
def test_the_first_blank_stays(tokenizer):
    prompt = tokenizer.encode("the model")
    following = tokenizer.encode("the model goes")[len(prompt) :]
    assert "".join(pieces(tokenizer, prompt, following)) == " goes"


@pytest.mark.parametrize("tokenizer", ["bytes", "llama2"], indirect=True)
def test_a_character_is_shown_once_it_is_whole(tokenizer):
    ids = tokenizer.encode("the 😀")
    assert pieces(tokenizer, ids[:-4], ids[-4:]) == ["", "", "", "😀", ""]
    assert pieces(tokenizer, ids[:-2], ids[-2:]) == ["", "😀", ""]
    assert set(pieces(tokenizer, ids[:-4], ids[-4:-1])[-1]) == {"\ufffd"}


def test_bytes_that_are_no_character_are_shown_as_such():
    text = "".join(pieces(bytes_tokenizer(), [97], [0xFF] * 30 + [98]))
    assert text == "\ufffd" * 30 + "b"


def test_bytes_that_are_no_character_are_not_held_to_the_end():
    """The streaming decoder of the library shows none of them before a character follows."""
    *shown, rest = pieces(bytes_tokenizer(), [97], [0xFF] * 30)
    assert "".join(shown) == "\ufffd" * 24 and rest == "\ufffd" * 6


def test_the_work_does_not_grow_with_the_text(tokenizer, monkeypatch):
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    ids = tokenizer.encode(TEXT * 9)
    detokenizer = Detokenizer(tokenizer, ids[:1])
    for token in [*ids[1:], *[ids[-1]] * 200]:
        detokenizer.add(token)
    assert max(decoded) <= 16
