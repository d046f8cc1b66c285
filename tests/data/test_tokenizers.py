import json
import os
import random
import string
import subprocess
import sys

import numpy as np
import pytest
import tokenizer_fixtures
from tokenizer_fixtures import dropping
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxlm.core.errors import InputError
from jaxlm.data import tokenizers
from jaxlm.data.tokenizers import END_OF_TEXT, Tokenizer, bytes_tokenizer, characters_tokenizer, train_bpe

SHAKESPEARE = "\n !$&',-.3:;?" + string.ascii_letters  # the characters of nanoGPT's data set
TEXTS = [
    "",
    "plain words, and\tmore  of   them",
    "\n\nlines\r\nof every\rkind\n",
    "Grüße, Здравствуй, 你好, שלום, é as e\u0301",
    "😀👩‍👩‍👧 and a zero \0, a space \u00a0, a joiner \u200d",
    f"a {END_OF_TEXT} spelled out{END_OF_TEXT}",
]
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
CORPUS = [f"def {a}{b}(value):\n    return {b}{a} + value\n" for a in SYLLABLES for b in SYLLABLES[::5]]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 400)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tokenizer as published with large models: a custom pattern splits words, and byte pairs are merged."""
    pattern = r"(?i:'(?:s|ll|re))|[^\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+\n*|\s*\n+|\s+(?!\S)|\s+"
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*CORPUS, *map(odd_text, range(5))], trainer)
    path = tmp_path_factory.mktemp("published") / "tokenizer.json"
    backend.save(str(path))
    return tokenizers.load(path)


@pytest.fixture(params=["bytes", "characters", "bpe", "published"])
def tokenizer(request):
    made = {"bytes": bytes_tokenizer, "characters": lambda: characters_tokenizer(TEXTS)}.get(request.param)
    return made() if made else request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_undoes_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_many_texts_are_encoded_as_each_alone(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_ids_are_below_the_vocabulary(tokenizer):
    assert max(max(ids, default=0) for ids in tokenizer.encode_batch(TEXTS)) < tokenizer.vocab_size


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_of_bytes_is_its_byte(text):
    assert bytes_tokenizer().encode(text) == list(text.encode())


def test_all_256_bytes_are_tokens_and_256_separates():
    tokenizer = bytes_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    assert {i: tokenizer.decode([i]) for i in range(128)} == {i: chr(i) for i in range(128)}
    two = [tokenizer.decode([first, 0x80]) for first in range(0xC2, 0xE0)]
    assert two == [chr((first - 0xC0) << 6) for first in range(0xC2, 0xE0)]


def test_broken_utf8_decodes_to_the_replacement_character():
    assert bytes_tokenizer().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


@pytest.mark.parametrize(
    "make", [bytes_tokenizer, tokenizer_fixtures.llama2, tokenizer_fixtures.chatml, lambda: train_bpe(CORPUS, 400)]
)
def test_bytes_of_tokens_are_those_of_the_text(make):
    """Wherever a text is cut into tokens; of one of another kind but for a blank that it begins with."""
    tokenizer = make()
    for text in ("the mon, the é", "你😀", "babe def"):
        found = b"".join(map(tokenizer.bytes_of, tokenizer.encode(text)))
        assert found.removeprefix(b" ") == text.encode()
    assert [tokenizer.bytes_of(token) for token in tokenizer.controls.values()] == [
        *map(str.encode, tokenizer.controls)
    ]
    assert tokenizer.bytes_of(10**6) == b""


def test_characters_are_numbered_in_code_point_order():
    tokenizer = characters_tokenizer([SHAKESPEARE[::-1], SHAKESPEARE[:30]])
    assert (tokenizer.vocab_size, tokenizer.separator) == (65, None)
    assert tokenizer.encode("".join(sorted(SHAKESPEARE))) == list(range(65))


@pytest.mark.parametrize("strange", ["é", "0", "\t", "\r", "😀"])
def test_an_unknown_character_is_named(strange):
    with pytest.raises(InputError) as refused:
        characters_tokenizer([SHAKESPEARE]).encode(f"To be{strange}or not")
    assert repr(strange) in str(refused.value) and "65" in str(refused.value)


def test_characters_that_are_left_out_are_named():
    tokenizer = dropping("abcä")
    assert tokenizer.encode("abäc") == tokenizer.encode_batch(["abä你c"])[0]
    assert tokenizer.dropped("你b你x") == ["x", "你"]
    with pytest.raises(InputError, match="the character '你' is not among the 9 tokens"):
        tokenizer.encode("abä你c")


def test_what_is_bytes_or_unknown_is_not_left_out(tokenizer):
    for each in (tokenizer, tokenizer_fixtures.llama2(), tokenizer_fixtures.wordpiece("abc")):
        assert each.dropped("".join(map(chr, range(0x20, 0x3000)))) == []


def test_what_is_normalized_is_known_by_what_it_becomes(tmp_path):
    def lowercase(values):
        values["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "NFC"}]}

    assert changed(tmp_path, lowercase, dropping("abcä")).dropped("ABÄ") == []


def test_the_token_of_the_unknown_is_known():
    assert tokenizer_fixtures.wordpiece("abc").unknown == 0
    assert bytes_tokenizer().unknown is characters_tokenizer("abc").unknown is None
    assert Tokenizer(Backend(models.Unigram([("a", 0.0), ("<unk>", 0.0)], unk_id=1))).unknown == 1


@pytest.mark.parametrize("size", [257, 300, 400])
def test_bpe_has_the_vocabulary_asked_for(size):
    tokenizer = train_bpe(CORPUS, size)
    assert tokenizer.vocab_size == size
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


def test_bpe_of_a_text_with_one_pair_has_one_merge():
    assert train_bpe(["ab"], 1000).vocab_size == 258


def test_bpe_is_shorter_than_bytes_on_its_own_text(bpe):
    assert len(bpe.encode(CORPUS[7])) < len(CORPUS[7]) / 3


def test_bpe_training_is_deterministic_on_one_thread_or_many(bpe):
    code = (
        "import json, sys; from jaxlm.data.tokenizers import train_bpe;"
        "print(train_bpe(json.load(sys.stdin), 400).to_json())"
    )
    alone = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(CORPUS),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONUTF8": "1"},
    )
    assert train_bpe(CORPUS, 400).to_json() == bpe.to_json() == alone.stdout.rstrip("\n")


def test_bpe_learns_no_separator_from_text_that_spells_it_out():
    tokenizer = train_bpe([END_OF_TEXT * 50], 1000)
    assert tokenizer.separator not in tokenizer.encode(END_OF_TEXT)
    assert tokenizer.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(InputError, match="model.vocab_size = 256 is too small .* 257"):
        train_bpe(CORPUS, 256)


def test_a_separator_in_the_text_is_text(tokenizer):
    ids = tokenizer.encode(TEXTS[-1])
    assert tokenizer.separator is None or tokenizer.separator not in ids


def test_documents_lie_between_separators(tokenizer):
    ends = [] if tokenizer.separator is None else [tokenizer.separator]
    for text, ids in zip(TEXTS, tokenizer.encode_documents(TEXTS), strict=True):
        assert ids.tolist() == ends + tokenizer.encode(text) + ends
        assert ids.dtype == tokenizer.dtype == np.uint16


def test_separators_are_not_decoded():
    assert bytes_tokenizer().decode([256, 97, 256, 98, 256]) == "ab"


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_are_kept_in_the_smallest_type_that_holds_them(size, dtype):
    characters = [chr(i) for i in range(0x11000) if not 0xD800 <= i < 0xE000][:size]
    tokenizer = characters_tokenizer(characters)
    assert tokenizer.vocab_size == size
    (ids,) = tokenizer.encode_documents([characters[-1]])
    assert ids.dtype == dtype and ids.tolist() == [size - 1]


def odd_text(seed: int) -> str:
    """Make random text of words, blanks of every kind, contractions and separators."""
    blanks = [" ", "  ", "\n", " \n ", "\r\n", "\t", "\x1c", "\u2028"]
    runs = [" " * 9, "\n\n  ", "0123456789", "長い文章", "x" * 40, "...!\n"]
    some = [*TEXTS[1:], *CORPUS[:5], *blanks, *runs, "it's", "'ll", "12 345", "?!"]
    return "".join(random.Random(seed).choices(some, k=400))


@pytest.mark.parametrize("tokenizer", ["characters", "bpe", "published"], indirect=True)
@pytest.mark.parametrize("seed", range(10))
def test_a_long_document_has_the_tokens_of_the_whole(tokenizer, monkeypatch, seed):
    text = odd_text(seed)
    tokenizer = characters_tokenizer([text]) if tokenizer.separator is None else tokenizer
    ends = [] if tokenizer.separator is None else [tokenizer.separator]
    whole = [*ends, *tokenizer.encode(text), *ends]
    given: list[str] = []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: given.extend(texts) or encode(texts))
    for size in (1, 2, 7, 50):
        monkeypatch.setattr(tokenizers, "_PIECE", size)
        monkeypatch.setattr(tokenizers, "_AT_ONCE", 10 * size)
        given.clear()
        short, long, empty = tokenizer.encode_documents(["a", text, ""])
        assert long.tolist() == whole and long.dtype == tokenizer.dtype
        assert (len(short), len(empty)) == (1 + 2 * len(ends), 2 * len(ends))
        assert len(given) > 50 and "".join(given) == f"a{text}"


def test_characters_need_no_blanks(monkeypatch):
    tokenizer, sizes = characters_tokenizer(["x"]), []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: sizes.extend(map(len, texts)) or encode(texts))
    monkeypatch.setattr(tokenizers, "_PIECE", 100)
    tokenizer.encode_documents(["x" * 1001])
    assert sizes == [100] * 10 + [1]


def test_a_long_document_is_not_cut_where_tokens_may_reach_over_it(tmp_path, monkeypatch):
    def any_words(values):
        values["pre_tokenizer"]["use_regex"] = False
        values["model"]["vocab"] |= {"aĠ": 257, "aĠa": 258}
        values["model"]["merges"] = [["a", "Ġ"], ["aĠ", "a"]]

    def named(values):
        values["added_tokens"].append({**values["added_tokens"][0], "id": 257, "content": "a a", "special": False})

    def prefixed(values):
        values["pre_tokenizer"]["add_prefix_space"] = True

    def behind(values, pattern="(?<=a) a|a| "):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        own = {**values["pre_tokenizer"], "use_regex": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, own]}
        values["model"]["vocab"]["Ġa"], values["model"]["merges"] = 257, [["Ġ", "a"]]

    def ahead(values):
        behind(values, "(?=( a)*$) a|a| ")

    monkeypatch.setattr(tokenizers, "_PIECE", 1)
    monkeypatch.setattr(tokenizers, "_UNSURE", 1)
    for change in (any_words, named, prefixed, behind, ahead):
        tokenizer = changed(tmp_path, change)
        (ids,) = tokenizer.encode_documents(["a a a a"])
        assert ids[1:-1].tolist() == tokenizer.encode("a a a a")


def test_a_tokenizer_is_trained_on_pieces_as_on_the_whole(monkeypatch):
    texts = [*map(odd_text, range(5)), *CORPUS]
    whole = train_bpe(texts, 500).to_json()
    monkeypatch.setattr(tokenizers, "_PIECE", 20)
    cut = [piece for text in texts for piece in tokenizers.pieces(text)]
    assert len(cut) > 2 * len(texts) and train_bpe(cut, 500).to_json() == whole


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(InputError, match="not UTF-8 after its first 12 characters"):
        tokenizer.encode("half a pair \ud800")


def test_loading_undoes_saving(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = tokenizers.load(tmp_path / "tokenizer.json")
    assert again.to_json() == tokenizer.to_json()
    assert (again.vocab_size, again.separator) == (tokenizer.vocab_size, tokenizer.separator)
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(InputError, match="data.tokenizer.*no file.*missing.json"):
        tokenizers.load(tmp_path / "missing.json")


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": 5}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=r"data.tokenizer.*tokenizer.json") as refused:
        tokenizers.load(tmp_path / "tokenizer.json")
    assert "\n" not in str(refused.value)


def changed(tmp_path, change, tokenizer=None):
    """Return a tokenizer (default: bytes) after a change to its JSON."""
    values = json.loads((tokenizer or bytes_tokenizer()).to_json())
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    return tokenizers.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("separator", [END_OF_TEXT, "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "</s>"])
def test_the_separator_of_a_published_tokenizer_is_found(tmp_path, separator):
    tokenizer = changed(tmp_path, lambda values: values["added_tokens"][0].update(content=separator))
    assert tokenizer.separator == 256


def test_a_tokenizer_file_that_truncates_and_pads_still_gives_whole_documents(tmp_path):
    def published(values):
        values["truncation"] = {
            "strategy": "LongestFirst",
            "direction": "Right",
            "max_length": 4,
            "stride": 0,
        }
        values["padding"] = {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }

    assert changed(tmp_path, published).encode("whole text") == list(b"whole text")


def test_the_vocabulary_is_above_every_id_where_ids_have_gaps(tmp_path):
    def published(values):
        values["model"]["vocab"]["a"] = 1000

    tokenizer = changed(tmp_path, published)
    assert tokenizer.encode("a") == [1000]
    assert tokenizer.vocab_size == 1001
    assert np.flatnonzero(tokenizer.valid_token_mask(1024)).tolist() == [
        *(i for i in range(257) if i != ord("a")),
        1000,
    ]
