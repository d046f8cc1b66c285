"""Vocabularies in other files than a tokenizer.json: what they become, and that nothing else does."""

import itertools
import json
import random
import unicodedata
from pathlib import Path

import pytest
import vocabulary_fixtures as written
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from jaxlm.core.errors import InputError
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.families.vocabularies import code_points, conversion, gpt2, protobuf, sentencepiece, tekken, tiktoken
from jaxlm.families.vocabularies.charsmap import CharacterTable
from jaxlm.families.vocabularies.conversion import PROBE

CHARACTERS = {"ﬁ": "fi", "Ⅷ": "VIII", "½": "1⁄2", "\u3000": " ", "\t": " ", "\u200d": "", "\u00e9": "e\u0301"}
TOKENS = len(written.ranks())
KNOWN = {"name": "small", "ranks": TOKENS, "pattern": r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+| \p{L}+"}
KNOWN |= {
    "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "specials": {"<|endoftext|>": TOKENS + 1},  # and no token before it
    "rest": {"name": "<|extra_{}|>", "count": 0, "first": TOKENS + 2, "last": TOKENS + 6},
}
SENTENCEPIECE = {
    "bpe": written.bpe_file,
    "bpe with user-defined pieces": lambda: written.bpe_file(user_defined=True),
    "unigram": written.unigram_file,
    "unigram without bytes": lambda: written.unigram_file(byte_fallback=False),
    "unigram that normalizes": lambda: written.unigram_file(charsmap=written.charsmap(CHARACTERS)),
}
KINDS = {
    **{kind: lambda write=write: sentencepiece.convert(write()) for kind, write in SENTENCEPIECE.items()},
    "tiktoken": lambda: tiktoken.convert(written.tiktoken_file(), {}),
    "tekken": lambda: tekken.convert(written.tekken_file()),
    "gpt2": lambda: gpt2.convert(*written.gpt2_files(), None),
    "qwen2": lambda: gpt2.convert(*written.gpt2_files(), "Qwen2Tokenizer"),
}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(tiktoken, "known", lambda: {TOKENS: KNOWN})


def texts(seed: int = 0) -> list[str]:
    """Return texts of all kinds: of the corpus, of odd characters, and of blanks and names of control tokens."""
    draw = random.Random(seed)
    odd = [
        "\n",
        "\n\n",
        "  ",
        " " * 7,
        "\t",
        "▁",
        "é",
        "e\u0301",
        "😀",
        "ﬁ",
        "[REF]",
        "<0x41>",
        "it's",
        "12345",
        "word",
    ]
    return [*PROBE, *written.CORPUS[:20], *("".join(draw.choices([*odd, *PROBE[1]], k=40)) for _ in range(40))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_has_the_ids_of_its_format(kind):
    made = KINDS[kind]()
    tokenizer = Tokenizer(Backend.from_str(made.backend.to_str()))
    conversion.verify(made, tokenizer)
    for text in texts():
        expected = made.ids(text)
        assert expected is None or made.backend.encode(text, add_special_tokens=False).ids == expected
        (ids,) = tokenizer.encode_batch([text])
        assert made.unknown in ids or tokenizer.decode(ids) == made.restored(text)
    assert len(tokenizer.encode(written.CORPUS[7])) < len(written.CORPUS[7]) / 1.5  # something is merged


def _model(key, value):
    def change(described):
        described["model"][key] = value(described["model"][key])

    return change


def _step(part, change):
    def changed(described):
        described[part] = change(described[part])

    return changed


def _without(kind):
    """Leave a step out of a sequence."""

    def change(steps):
        [name] = [key for key in steps if key != "type"]
        return {**steps, name: [step for step in steps[name] if step["type"] != kind]}

    return change


def _renamed(vocabulary):
    first, second = "a", "e"
    return {**vocabulary, first: vocabulary[second], second: vocabulary[first]}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("bpe", _model("merges", lambda merges: merges[::-1])),
        ("bpe", _model("merges", lambda merges: merges[:-30])),
        ("bpe", _model("byte_fallback", lambda _: False)),
        ("bpe", _step("normalizer", _without("Prepend"))),
        ("bpe", _step("decoder", _without("Strip"))),
        ("bpe", _step("decoder", _without("ByteFallback"))),
        ("bpe", _model("vocab", _renamed)),
        ("bpe with user-defined pieces", _step("pre_tokenizer", lambda _: None)),
        ("bpe with user-defined pieces", _model("ignore_merges", lambda _: False)),
        ("unigram", _model("vocab", lambda pieces: [[text, -score] for text, score in pieces])),
        ("unigram", _step("normalizer", lambda steps: {**steps, "normalizers": steps["normalizers"][1:]})),
        ("unigram that normalizes", _step("normalizer", _without("Precompiled"))),
        ("tiktoken", _model("ignore_merges", lambda _: False)),
        ("tiktoken", _model("merges", lambda merges: merges[::-1])),
        ("tiktoken", _model("merges", lambda merges: merges[:-60])),
        ("tekken", _step("pre_tokenizer", lambda steps: steps["pretokenizers"][1])),
        ("gpt2", _step("pre_tokenizer", lambda step: {**step, "add_prefix_space": True})),
        ("gpt2", _step("pre_tokenizer", lambda step: {**step, "use_regex": False})),
        ("qwen2", _step("normalizer", lambda _: None)),
    ],
)
def test_a_conversion_that_does_not_agree_is_refused(kind, change):
    made = KINDS[kind]()
    described = json.loads(made.backend.to_str())
    change(described)
    backend = Backend.from_str(json.dumps(described))
    with pytest.raises(InputError, match="^it cannot be converted: .*'"):
        conversion.verify(made._replace(backend=backend), Tokenizer(Backend.from_str(json.dumps(described))))


def test_control_tokens_have_the_ids_of_their_format():
    made = {kind: KINDS[kind]().backend for kind in ("bpe", "tiktoken", "tekken", "gpt2")}
    assert [made["bpe"].token_to_id(name) for name in ("<unk>", "<s>", "</s>")] == [0, 1, 2]
    found = made["tiktoken"].get_added_tokens_decoder()
    assert {number: token.content for number, token in found.items()} == {
        TOKENS + 1: "<|endoftext|>", **{TOKENS + 2 + at: f"<|extra_{at}|>" for at in range(5)}
    }  # fmt: skip
    assert [made["tekken"].token_to_id(name) for name in ("<s>", "[INST]", "<SPECIAL_29>")] == [1, 3, 29]
    assert made["tekken"].encode("a").ids == [30 + ord("a")]
    assert made["gpt2"].token_to_id("<|endoftext|>") == TOKENS - 1


def test_names_of_the_files_beside_go_before_those_that_are_known():
    named = {TOKENS + 3: "<|tool|>", TOKENS + 5: "<|extra_0|>", 5: "!"}
    found = tiktoken.convert(written.tiktoken_file(), named).backend.get_added_tokens_decoder()
    assert {number - TOKENS: token.content for number, token in found.items()} == {
        1: "<|endoftext|>", 3: "<|tool|>", 4: "<|extra_2|>", 5: "<|extra_0|>", 6: "<|extra_4|>"
    }  # fmt: skip


def test_special_tokens_of_a_tekken_file_are_read():
    named = [{"rank": 1, "token_str": "<s>", "is_control": True}, {"rank": 0, "token_str": "<think>"}]
    backend = tekken.convert(written.tekken_file(special_tokens=named, reserved=4)).backend
    assert [backend.id_to_token(number) for number in range(5)] == ["<think>", "<s>", "<SPECIAL_2>", "<SPECIAL_3>", "Ā"]


def test_a_file_of_unknown_byte_strings_is_refused_by_their_number():
    content = written.tiktoken_file().rsplit(b"\n", 2)[0]
    with pytest.raises(InputError, match=rf"^it has {TOKENS - 1} tokens of bytes: .* is not run; jaxlm knows small \("):
        tiktoken.convert(content, {})


def test_a_class_whose_pattern_is_in_code_is_refused_by_name():
    with pytest.raises(InputError, match="tokenizer_class 'MyTokenizer', whose pattern is in code; jaxlm knows GPT2"):
        gpt2.convert(*written.gpt2_files(), "MyTokenizer")


@pytest.mark.parametrize(
    ("name", "digits"), [("Llama 3", 2), ("cl100k_base", 2), ("o200k_base", 2), ("Qwen", 5), ("Kimi", 2)]
)
def test_known_vocabularies_are_whole(monkeypatch, name, digits):
    """Their patterns split as their publishers' do, and their special tokens are beyond the byte strings."""
    monkeypatch.undo()
    [entry] = [entry for entry in tiktoken.known().values() if entry["name"] == name]
    specials = tiktoken._specials(entry, {}, range(entry["ranks"]))
    assert min(specials.values()) >= entry["ranks"] and len({*specials.values()}) == len(specials)
    assert entry.get("begin", next(iter(specials))) in specials
    monkeypatch.setattr(tiktoken, "known", lambda: {TOKENS: {**entry, "specials": {}, "rest": None}})
    made = tiktoken.convert(written.tiktoken_file(), {})
    splits = made.backend.pre_tokenizer.pre_tokenize_str("12345")
    assert len(splits) == digits
    words = [word for word, _ in made.backend.pre_tokenizer.pre_tokenize_str("don't 中文English\n\n x")]
    assert words[0] == ("don't" if name in ("o200k_base", "Kimi") else "don")
    assert ("Ġä¸ŃæĸĩEnglish" in words) == (name != "Kimi")
    conversion.verify(made, Tokenizer(Backend.from_str(made.backend.to_str())))


@pytest.mark.parametrize(
    ("pieces", "settings", "message"),
    [
        ([*written.CONTROLS, ("a", 0.0, 7)], {}, "a piece b'a' of kind 7, which is none"),
        ([*written.CONTROLS, ("a", float("nan"), 1)], {}, "a piece 'a' of score nan"),
        ([*written.CONTROLS, ("", 0.0, 1)], {}, "a piece '' of score 0"),
        ([*written.CONTROLS, ("a", 0.0, 1), ("a", 0.0, 1)], {}, "two tokens of one spelling"),
        ([*written.CONTROLS, ("<unk2>", 0.0, 2)], {}, r"the unknown pieces \[0, 3\], and not 0 alone"),
        ([*written.CONTROLS, ("ab", 0.0, 1), ("a", 0.0, 1)], {3: 2}, "the letters of its piece 'ab' are no pieces"),
        (written.CONTROLS, {3: 3}, "of kind word; jaxlm reads bpe and unigram"),
        (written.CONTROLS, {24: 1}, "does not write ▁ for a blank before a word"),
        (written.CONTROLS, {35: 1}, "falls back to bytes and has not all of them"),
        (written.CONTROLS, {41: 9}, "begins texts with the id 9"),
    ],
)
def test_a_model_that_cannot_be_converted_is_one_line(pieces, settings, message):
    with pytest.raises(InputError, match=message):
        sentencepiece.convert(written.sentencepiece(pieces, settings))


@pytest.mark.parametrize(
    ("convert", "content", "message"),
    [
        (tekken.convert, b"[]", "holds no table"),
        (tekken.convert, b"\xff", "not valid JSON"),
        (tekken.convert, b'{"config": {}, "vocab": []}', "no config of pattern"),
        (tekken.convert, written.tekken_file(reserved=1), "special tokens that are not 1 or fewer"),
        (tekken.convert, written.tekken_file(pattern="(a"), r"the pattern '\(a' is none"),
        (tekken.convert, written.tekken_file().replace(b'"rank": 7,', b'"rank": 8,'), "with rank 7 at its place"),
        (lambda content: tiktoken.convert(content, {}), b"YQ== 0\nYQ== 1\n", "its line 2 is no byte string"),
        (lambda content: tiktoken.convert(content, {}), b"YQ=== 0\n", "its line 1 is no byte string"),
        (lambda content: gpt2.convert(content, b"", None), b'{"a": "b"}', "ids that are no numbers"),
        (lambda content: gpt2.convert(content, b"", None), b'{"a": 1}', "no token 'Ā', which stands for a byte"),
        (lambda content: gpt2.convert(content, b"a zz\n", None), written.gpt2_files()[0], "no tokens for the merge"),
    ],
)
def test_a_file_that_cannot_be_converted_is_one_line(convert, content, message):
    with pytest.raises(InputError, match=message):
        convert(content)


def test_a_table_of_characters_is_read_as_it_was_written():
    table = CharacterTable(written.charsmap(CHARACTERS))
    assert all(table.replaced(key) == text for key, text in CHARACTERS.items())
    assert table.replaced("a½ ﬁ\u200d😀é") == "a1⁄2 fi😀e\u0301"


# Entries of a table like NFKC's: kana, jamo and letters with marks, alone and together, some removed.
_BASES = "ｶ カ が ﾊ ハ e é ệ ẹ ﬁ Å ア".split(" ")
_MARKS = ["\uff9e", "\uff9f", "\u3099", "\u309a", "\u0301", "\u0302", "\u0323"]
_JAMO = ["\u1100", "\u1112", "\u1161", "\u11a8", "\u11ab", "\uffa1", "\uffc2", "가", "하"]
_OTHERS = [*"a ab〜～ \r\n", "\u200d", "\x01", "\u0600", "\u0e33", "\ufdd0", "\ufdd1", "\ufdd2", "😀", "\U0001f3fb"]


def compatibility_table() -> dict[str, str]:
    """Return what NFKC makes of each character, of each with one mark and of jamo, where it changes these."""
    some = [*_BASES, *_MARKS, *_JAMO]
    sequences = [
        *some,
        *map("".join, itertools.product(_BASES, _MARKS)),
        *map("".join, itertools.product(_JAMO, _JAMO)),
    ]
    sequences += map("".join, itertools.product(_BASES, _MARKS[4:], _MARKS[4:]))
    table = {text: unicodedata.normalize("NFKC", text) for text in sequences}
    whole = {text: other for text, other in table.items() if len(text) == 1 or len(other) < len(text)}
    return {text: other for text, other in whole.items() if text != other} | {"\x01": "", "\u2460": "1"}


def replaced_by_code_points(table: dict[str, str], text: str) -> str:
    """Replace the longest entry at each position (SentencePiece's normalizer), written as plainly as can be."""
    output, at = "", 0
    while at < len(text):
        sizes = [size for size in range(4, 0, -1) if text[at : at + size] in table and at + size <= len(text)]
        size = sizes[0] if sizes else 1
        output += table.get(text[at : at + size], text[at])
        at += size
    return output


@pytest.mark.parametrize("custom", [{}, {"ab": "c", "aba": "", "〜": "~"}])
def test_a_text_is_normalized_by_code_points(custom):
    """Half-width kana with voiced marks, conjoining jamo and two marks lose nothing."""
    table, draw = compatibility_table() | custom, random.Random(0)
    compiled = written.charsmap(table)
    read = CharacterTable(compiled)
    assert read.entries() == table
    normalizer = normalizers.Sequence(code_points.steps(read, compiled))
    characters = [*_BASES, *_MARKS, *_MARKS, *_JAMO, *_OTHERS]
    for _ in range(3000):
        text = "".join(draw.choices(characters, k=draw.randrange(1, 12)))
        expected = replaced_by_code_points(table, text)
        assert read.replaced(text) == expected
        assert normalizer.normalize_str(text) == expected, ascii(text)


def test_the_probe_holds_what_graphemes_lose():
    """A conversion that keeps the library's own normalizer is refused."""
    compiled = written.charsmap(compatibility_table())
    made = sentencepiece.convert(written.unigram_file(charsmap=compiled))
    described = json.loads(made.backend.to_str())
    steps = described["normalizer"]["normalizers"]
    kept = {"Precompiled", "Prepend"}
    described["normalizer"]["normalizers"] = [step for step in steps if step["type"] in kept or "▁" in str(step)]
    backend = Backend.from_str(json.dumps(described))
    with pytest.raises(InputError, match="^it cannot be converted"):
        conversion.verify(made._replace(backend=backend), Tokenizer(Backend.from_str(json.dumps(described))))


def test_a_table_that_no_steps_can_say_is_refused():
    compiled = written.charsmap({"\ufdd0": "a"})
    with pytest.raises(InputError, match="replaces code points that are no characters"):
        code_points.steps(CharacterTable(compiled), compiled)


def test_damaged_files_are_refused_or_read_and_nothing_else():
    """A bit that flips or an end that is lost never leads out of the file, nor into the library's own failures."""
    draw = random.Random(0)
    compiled, model = written.charsmap(CHARACTERS), written.unigram_file(charsmap=written.charsmap(CHARACTERS))
    readers = [(CharacterTable, compiled), (lambda content: [*protobuf.fields(content)], model)]
    readers += [(sentencepiece.convert, model[:60] + model[-len(compiled) :]), (tiktoken.read, written.tiktoken_file())]
    refused = 0
    for read, content in readers:
        for _ in range(300):
            damaged = bytearray(content[: draw.randrange(len(content))] if draw.random() < 0.3 else content)
            for _ in range(draw.randrange(3)):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8) if damaged else 0
            try:
                read(bytes(damaged))
            except InputError:
                refused += 1
    assert refused > 200


def test_a_damaged_table_that_is_read_does_not_fail_in_the_library():
    compiled, draw = written.charsmap(CHARACTERS), random.Random(1)
    normalizer = pytest.importorskip("tokenizers").normalizers.Precompiled
    for _ in range(300):
        damaged = bytearray(compiled)
        for _ in range(1 + draw.randrange(3)):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        try:
            CharacterTable(bytes(damaged))
        except InputError:
            continue
        for text in PROBE:
            normalizer(bytes(damaged)).normalize_str(text)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_itself_gives_the_same_ids(kind):
    library = pytest.importorskip("sentencepiece")
    content = SENTENCEPIECE[kind]()
    _same_as_sentencepiece(library.SentencePieceProcessor(model_proto=content), sentencepiece.convert(content))


def _same_as_sentencepiece(processor, made):
    made.backend.encode_special_tokens = True
    for text in texts(1):
        ids = processor.encode(text)
        if (expected := made.ids(text)) is not None:
            assert made.backend.encode(text, add_special_tokens=False).ids == expected == ids
        if made.unknown not in ids:
            assert processor.decode(ids) == made.restored(text)


def test_tiktoken_itself_gives_the_same_ids():
    library = pytest.importorskip("tiktoken")
    real = library.Encoding("small", pat_str=KNOWN["pattern"], mergeable_ranks=written.ranks(), special_tokens={})
    made = tiktoken.convert(written.tiktoken_file(), {})
    assert all(made.ids(text) == real.encode(text, disallowed_special=()) for text in texts(1))


def test_mistral_itself_gives_the_same_ids(tmp_path):
    library = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    (tmp_path / "tekken.json").write_bytes(written.tekken_file())
    real, made = library.Tekkenizer.from_file(tmp_path / "tekken.json"), tekken.convert(written.tekken_file())
    assert all(made.ids(text) == real.encode(text, bos=False, eos=False) for text in texts(1))
    assert [real.id_to_piece(number) for number in range(30)] == [made.backend.id_to_token(n) for n in range(30)]


@pytest.mark.exhaustive
def test_the_files_of_mistral_give_the_ids_of_their_libraries():
    """SentencePiece v1, v2, v3 and v7 and both tekken files, as the package mistral_common has them."""
    package = pytest.importorskip("mistral_common")
    tekkenizer = pytest.importorskip("mistral_common.tokens.tokenizers.tekken").Tekkenizer
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor
    [folder] = package.__path__
    files = [*(Path(folder) / "data").iterdir()]
    assert len(files) > 4
    for file in files:
        if file.name.startswith("tekken"):
            real, made = tekkenizer.from_file(file), tekken.convert(file.read_bytes())
            made.backend.encode_special_tokens = True
            for text in texts(1):
                ids = made.backend.encode(text, add_special_tokens=False).ids
                assert ids == made.ids(text) == real.encode(text, bos=False, eos=False)
        elif ".model" in file.name:
            _same_as_sentencepiece(processor(model_file=str(file)), sentencepiece.convert(file.read_bytes()))
