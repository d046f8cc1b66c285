"""Text that is decoded token by token is the text of all tokens."""

import os
import random

import pytest
import tokenizer_fixtures
from tokenizer_fixtures import llama2, sentencepiece, wordpiece
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend

from jaxlm.data.tokenizers import Tokenizer, bytes_tokenizer, characters_tokenizer
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
def test_a_character_is_shown_once_nothing_can_change_it(tokenizer):
    """One more byte token of Llama 2 could turn the run of them before it into U+FFFD."""
    ids = tokenizer.encode("the 😀")
    whole, rest = ("😀", "") if tokenizer.name_of(ids[-1]) == "Ģ" else ("", "😀")
    assert pieces(tokenizer, ids[:-4], ids[-4:]) == ["", "", "", whole, rest]
    assert pieces(tokenizer, ids[:-2], ids[-2:]) == ["", whole, rest]
    assert set(pieces(tokenizer, ids[:-4], ids[-4:-1])[-1]) == {"\ufffd"}
    following = tokenizer.encode("the 😀.")[len(ids) :]
    assert pieces(tokenizer, ids, following) == [".", ""]  # the prompt has shown its last character


def test_bytes_that_are_no_character_are_shown_as_such():
    text = "".join(pieces(bytes_tokenizer(), [97], [0xFF] * 30 + [98]))
    assert text == "\ufffd" * 30 + "b"


def test_bytes_that_are_no_character_are_not_held_to_the_end():
    """The streaming decoder of the library shows none of them before a character follows."""
    *shown, rest = pieces(bytes_tokenizer(), [97], [0xFF] * 30)
    assert shown == ["\ufffd"] * 30 and rest == ""


def test_replacement_characters_in_a_text_are_characters():
    tokenizer = tokenizer_fixtures.chatml()
    assert pieces(tokenizer, [], tokenizer.encode("\ufffd\ufffd😀"))[2::3] == ["\ufffd", "\ufffd", ""]
    for text in ("\ufffd\ufffd😀", "a\ufffd", "\ufffdé\ufffd"):
        assert "".join(pieces(tokenizer, [], tokenizer.encode(text))) == text


def _of_pieces(decoder):
    """Make a tokenizer of pieces that decoders treat in ways of their own, with byte and control tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = "▁ ▁▁ a ▁a aa b</w> ##c c . ' n't ▁▁b | é 好 \ufffd do_not".replace("_", " ").split(" ")
    names = ["<unk>", "<pad>", *bytes_, *pieces, " ", "  "]
    backend = Backend(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<unk>"])
    backend.add_tokens(["<x>", "é x"])
    return Tokenizer(backend)


def _with_added_names():
    backend = Backend.from_str(tokenizer_fixtures.chatml(("a", "b")).to_json())
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("好 x", "é", "word")])
    return Tokenizer(backend)


def _sequence(*steps):
    return lambda: _of_pieces(decoders.Sequence(list(steps)))


_BLANK, _BYTES, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
KINDS = TOKENIZERS | {
    "byte-level": _with_added_names,
    "none": lambda: _of_pieces(None),
    "fused": lambda: _of_pieces(decoders.Fuse()),
    "bytes alone": lambda: _of_pieces(decoders.ByteFallback()),
    "metaspace of pieces": lambda: _of_pieces(decoders.Metaspace()),
    "metaspace without a first blank": lambda: _of_pieces(decoders.Metaspace(prepend_scheme="never")),
    "wordpiece of pieces": lambda: _of_pieces(decoders.WordPiece()),
    "ends of words": lambda: _of_pieces(decoders.BPEDecoder()),
    "ctc": lambda: _of_pieces(decoders.CTC()),
    "gemma": _sequence(_BLANK, _BYTES, _FUSE),
    "llama": _sequence(_BLANK, _BYTES, _FUSE, decoders.Strip(" ", 1, 0)),
    "two blanks less": _sequence(_BLANK, _BYTES, _FUSE, decoders.Strip(" ", 2, 0)),
    "each stripped": _sequence(_BLANK, decoders.Strip(" ", 1, 0)),
    "bytes, then metaspace": _sequence(_BYTES, decoders.Metaspace()),
    "bytes, then ends of words": _sequence(_BYTES, decoders.BPEDecoder()),
    "letters replaced": _sequence(_FUSE, _BLANK, decoders.Replace(" ", "")),
    "pairs replaced": _sequence(_FUSE, decoders.Replace("aa", "")),
    "patterns replaced": _sequence(decoders.Replace(Regex("▁+"), "_")),
    "bytes, then replaced": _sequence(decoders.ByteLevel(), decoders.Replace("a", "b")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_any_tokens_are_what_the_library_decodes(kind):
    """Also of control tokens and of bytes that form no character, and after a prompt that ends within one."""
    tokenizer, draw = KINDS[kind](), random.Random(0)
    size = tokenizer.vocab_size + 1  # one id without a token
    parts = {"<0xF0>", "<0x9F>", "<0x98>", "<0x80>", *"ðŁĺĢä½ł"}
    bytes_ = [number for number in range(size) if tokenizer.name_of(number) in parts]
    for _ in range(300):
        few = draw.choices(range(size), k=6)
        ids = draw.choices(draw.choice([range(size), few, few + bytes_, bytes_ or few]), k=draw.randrange(30))
        prompt = ids[: draw.choice([0, 0, draw.randrange(len(ids) + 1)])]
        before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
        expected = whole[len(os.path.commonprefix([before, whole])) :]
        assert "".join(pieces(tokenizer, prompt, ids[len(prompt) :])) == expected


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("ctc", "pairs replaced", "bytes, then replaced")]
)
def test_text_is_given_out_while_it_comes(kind):
    tokenizer = KINDS[kind]()
    ids = [number for number in range(tokenizer.vocab_size) if tokenizer.decode([number]).isalpha()] * 20
    shown = "".join(pieces(tokenizer, [], ids)[:-1])
    assert len(tokenizer.decode(ids)) - len(shown) <= 3


def test_a_long_prompt_is_decoded_at_its_end_alone(tokenizer, monkeypatch):
    named: list[int] = []
    name_in_text = tokenizer.name_in_text
    monkeypatch.setattr(tokenizer, "name_in_text", lambda token: named.append(token) or name_in_text(token))
    ids = tokenizer.encode(TEXT * 40)
    assert "".join(pieces(tokenizer, ids[:-5], ids[-5:])) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:-5])) :]
    assert len(named) < 80


def test_the_work_does_not_grow_with_the_text(tokenizer, monkeypatch):
    decoded: list[int] = [1]
    decode = tokenizer.decode_names
    monkeypatch.setattr(tokenizer, "decode_names", lambda names: decoded.append(len(names)) or decode(names))
    ids = tokenizer.encode(TEXT * 9)
    detokenizer = Detokenizer(tokenizer, ids[:1])
    for token in [*ids[1:], *[ids[-1]] * 200]:
        detokenizer.add(token)
    assert max(decoded) <= 16
