"""No text becomes a control token, whatever the model of a tokenizer is, and a text has one encoding."""

import json
import string

import pytest
import tokenizer_fixtures
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxlm.data import tokenizers
from jaxlm.data.config import DataConfig
from jaxlm.data.dataset import prepare
from jaxlm.data.tokenizers import END_OF_TEXT, Tokenizer, bytes_tokenizer

LETTERS = [*string.ascii_letters, *string.digits, *"<>/|[]_. "]
CONTROLS = ["<pad>", "</s>", "<unk>"]


def special(backend, *tokens):
    backend.add_special_tokens(list(tokens))
    return backend


def unigram(special_tokens=CONTROLS, byte_fallback=False):
    pieces = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback), "▁", *LETTERS, "word"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 2, byte_fallback))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return special(backend, *special_tokens)


def byte_level(**options):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, END_OF_TEXT, "<|pad|>", "or", "Ġ<", "|>"])}
    backend = Backend(models.BPE(vocabulary, [("o", "r"), ("Ġ", "<"), ("|", ">")], **options))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    return special(backend, END_OF_TEXT, "<|pad|>")


def sentencepiece_merging():
    """The merges themselves make </s>, as those of a tokenizer that was trained on HTML."""
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, *map("".join, merges)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return special(backend, "<unk>", "</s>")


def wordpiece():
    tokens = ["[UNK]", "[SEP]", "</s>", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.WhitespaceSplit()
    return special(backend, "[UNK]", "[SEP]", "</s>")


def word_level():
    tokens = ["[UNK]", "</s>", "a", "b"]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return special(backend, "</s>")


TOKENIZERS = {
    "unigram": unigram,
    "unigram, not marked special": lambda: unigram(()),
    "unigram with bytes": lambda: unigram(byte_fallback=True),
    "byte-level": byte_level,
    "byte-level, ignore_merges": lambda: byte_level(ignore_merges=True),
    "sentencepiece": lambda: json_of(tokenizer_fixtures.llama2()),
    "sentencepiece, merged": sentencepiece_merging,
    "wordpiece": wordpiece,
    "word level": word_level,
    "bytes": lambda: json_of(bytes_tokenizer()),
}
TEXTS = ["a{}b", "{}", "{0}{0}", "x {} y", "<{}>", "a {0} {0}"]


def json_of(tokenizer):
    return Backend.from_str(tokenizer.to_json())


def controls(tokenizer):
    """The control tokens but for the unknown token, which stands for unknown text."""
    values = json.loads(tokenizer.to_json())
    known = {END_OF_TEXT, "</s>", *(token["content"] for token in values["added_tokens"])}
    if values["model"].get("byte_fallback"):
        known |= {f"<0x{byte:02X}>" for byte in b"\n a"}
    return {
        token: i for token in known if (i := tokenizer._backend.token_to_id(token)) not in (None, tokenizer.unknown)
    }


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_control_token_spelled_out_stays_text(kind):
    tokenizer = Tokenizer(TOKENIZERS[kind]())
    found = controls(tokenizer)
    assert tokenizer.separator in found.values()
    for token in found:
        for text in (text.format(token) for text in TEXTS):
            (ids,) = tokenizer.encode_batch([text])
            assert not set(ids) & set(found.values()), text
            if tokenizer.separator is not None and not tokenizer.dropped(text):
                (document,) = tokenizer.encode_documents([text])
                assert document.tolist() == [tokenizer.separator, *ids, tokenizer.separator]
                assert tokenizer.encode_prompt(text) == [tokenizer.separator, *ids]


def test_an_unknown_token_spelled_out_is_its_letters():
    tokenizer = Tokenizer(unigram())
    assert tokenizer.unknown not in tokenizer.encode("a<unk>b")
    assert tokenizer.decode(tokenizer.encode("a<unk>b</s>")) == "a<unk>b</s>"


def _words_with_signs(controls, ignore_merges):
    """Make a byte-level BPE that merges "</" and has control tokens that no merges make, as of Mistral."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "/"), ("s", ">"), ("|", ">")]
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, merges), *controls])}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    return special(backend, *controls) if controls else backend


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_a_control_token_spelled_out_has_the_tokens_of_a_vocabulary_without_it(ignore_merges):
    tokenizer = Tokenizer(_words_with_signs(["</s>", "<|x|>", "<s>", "<<s>"], ignore_merges))
    other = _words_with_signs([], False)
    for text in ("</s>", "a</s>b", "</s></s>", " </s>", "<|x|>", "<|x|>.", "x <s>", "<s>"):
        assert tokenizer.encode(text) == other.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_likely_control_token_spelled_out_has_the_likely_tokens_of_its_text():
    pieces = ["<unk>", "</s>", "▁", "</", "s", ">", "<", "/", "a", "b"]
    backend = Backend(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], 0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(special(backend, "<unk>", "</s>"))
    assert [tokenizer.name_of(token) for token in tokenizer.encode("a</s>b")] == ["▁", "a", "</", "s", ">", "b"]


def test_what_a_normalizer_makes_of_a_text_is_text():
    tokenizer = Tokenizer(wordpiece())
    assert tokenizer.separator not in tokenizer.encode("a ＜/s＞")  # full-width signs, which NFKC makes plain


def test_a_separator_that_is_not_marked_as_special_is_one():
    values = json.loads(bytes_tokenizer().to_json())
    values["added_tokens"][0]["special"] = False
    tokenizer = Tokenizer(Backend.from_str(json.dumps(values)))
    assert tokenizer.encode(END_OF_TEXT) == list(END_OF_TEXT.encode())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_other_text_keeps_its_tokens(kind):
    plain, tokenizer = TOKENIZERS[kind](), Tokenizer(TOKENIZERS[kind]())
    for text in ("a word or b", "a", "b a", "x < y > z"):
        assert tokenizer.encode_batch([text]) == [plain.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_saved_tokenizer_is_loaded_as_it_is(kind, tmp_path):
    tokenizer = Tokenizer(TOKENIZERS[kind]())
    tokenizer.save(tmp_path / "tokenizer.json")
    assert tokenizers.load(tmp_path / "tokenizer.json").to_json() == tokenizer.to_json()


def test_a_tokenizer_that_makes_no_control_token_is_left_alone():
    for backend in (byte_level(), json_of(tokenizer_fixtures.llama2()), json_of(bytes_tokenizer())):
        before = backend.to_str()
        assert Tokenizer(backend).to_json() == before


def test_dropout_is_switched_off_and_said(tmp_path):
    (tmp_path / "a.txt").write_text("words or more words\n" * 50)
    path = tmp_path / "tokenizer.json"
    byte_level(dropout=0.5).save(str(path))
    tokenizer = tokenizers.load(path)
    assert len({tuple(tokenizer.encode("or " * 20)) for _ in range(50)}) == 1
    said: list[str] = []
    data = DataConfig(text=str(tmp_path / "a.txt"), tokenizer=str(path), cache=str(tmp_path / "cache"))
    digests = {prepare(data, 300, said.append).digest for _ in range(2)}
    assert len(digests) == 1
    assert said.count(f"data.tokenizer: the BPE dropout of 0.5 in {path} is switched off") == 2
