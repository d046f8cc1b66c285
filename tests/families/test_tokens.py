"""The tokenizer of a published directory: its files in order, and the tokens and ends that the files beside it say."""

import json

import numpy as np
import pytest
import tokenizer_fixtures
import vocabulary_fixtures as written
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors

from jaxlm.core.errors import InputError
from jaxlm.families import post_processor, tokens
from jaxlm.families.vocabularies import sentencepiece, tekken, tiktoken

TEXT = "Plain text, with digits 1234 and\n\n  blanks. <s>"


@pytest.fixture
def folder(tmp_path):
    """A directory with a tokenizer.json of ChatML: 256 bytes, three control tokens and one that takes blanks."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_fixtures.chatml().to_json())
    return tmp_path


def write(folder, **files):
    """Write tables: tokenizer_config, special_tokens_map, added_tokens, config, generation_config."""
    for name, table in files.items():
        (folder / f"{name}.json").write_text(json.dumps(table))


def described(text, number=None, **switches):
    table = {"content": text, "special": True, **switches}
    return table if number is None else {str(number): table}


def load(folder, rows=512):
    return tokens.load(tokens.complete(folder, rows), folder)


def test_a_tokenizer_that_lacks_nothing_is_used_as_it_is(folder):
    write(folder, tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": described("<|im_end|>", 258)})
    assert tokens.complete(folder, 260) == folder / "tokenizer.json"


def test_any_end_of_any_file_ends_a_text(folder):
    assert load(folder).stop_token_ids == {256}  # without any, the separator
    write(folder, config={"eos_token_id": 7})
    assert load(folder).stop_token_ids == {7}
    write(
        folder,
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
        generation_config={"eos_token_id": [9, 10]},
    )
    assert load(folder).stop_token_ids == {7, 8, 9, 10}
    write(
        folder,
        tokenizer_config={"eos_token": "<|im_end|>"},
        special_tokens_map={"eos_token": described("<|endoftext|>")},
    )
    assert load(folder).stop_token_ids == {7, 8, 9, 10, 256, 258}
    write(folder, generation_config={"eos_token_id": "x"})
    with pytest.raises(InputError, match="eos_token_id = 'x' of .*generation_config.json is no id"):
        load(folder)


@pytest.mark.parametrize("flag", [True, False])
def test_the_post_processor_decides_what_begins_a_text(folder, flag):
    """Whatever `add_bos_token` says beside a tokenizer.json: transformers 5.24 drops it there, and so do we."""
    write(folder, tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": flag})
    assert load(folder).begin == ()
    content = json.loads((folder / "tokenizer.json").read_text())
    write(folder, tokenizer={**content, "post_processor": post_processor.template("<|im_start|>", 257)})
    assert load(folder).begin == (257,)


def _template(single):
    return processors.TemplateProcessing(
        single=single,
        pair=single.replace("$A", "$A $B"),
        special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258), ("<|note|>", 259), ("<|endoftext|>", 256)],
    )


_END, _BEGIN = ("<|im_end|>", 258), ("<|im_start|>", 257)
POST_PROCESSORS = {
    "nothing": (processors.ByteLevel(), (), ()),
    "an end": (_template("$A <|im_end|>"), (), (258,)),
    "an end that files do not name": (_template("$A <|note|>"), (), (259,)),
    "a beginning that also ends": (_template("<|endoftext|> $A"), (256,), ()),
    "an end that also begins": (_template("$A <|endoftext|>"), (), (256,)),
    "both": (_template("<|endoftext|> <|im_start|> $A <|note|> <|endoftext|>"), (256, 257), (259, 256)),
    "BERT": (processors.BertProcessing(_END, _BEGIN), (257,), (258,)),
    "RoBERTa": (processors.RobertaProcessing(_END, _BEGIN), (257,), (258,)),
    "two steps": (processors.Sequence([processors.ByteLevel(), _template("$A <|im_end|>")]), (), (258,)),
    "one around the other": (
        processors.Sequence([_template("<|im_start|> $A"), _template("$A <|im_end|>")]),
        (257,),
        (258,),
    ),
}


@pytest.mark.parametrize(("post_processor", "begin", "end"), POST_PROCESSORS.values(), ids=POST_PROCESSORS)
@pytest.mark.parametrize("ends", [{}, {"config": {"eos_token_id": 256, "bos_token_id": 256}}])
def test_what_ends_a_text_never_begins_one(folder, post_processor, begin, end, ends):
    """Wherever files name an end or not, and where one token begins and ends texts, as of GPT-2."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = post_processor
    backend.save(str(folder / "tokenizer.json"))
    write(folder, **ends)
    tokenizer = load(folder)
    text = tokenizer.encode("a b")
    assert (tokenizer.begin, tokenizer.end) == (begin, end)
    assert tokenizer.encode_prompt("a b") == [*begin, *text]
    assert tokenizer.encode_whole("a b") == [*begin, *text, *end] == backend.encode("a b").ids


@pytest.mark.parametrize(("flag", "begin"), [(None, (1,)), (True, (1,)), (False, ())])
def test_add_bos_token_decides_where_there_is_no_post_processor(tmp_path, flag, begin):
    (tmp_path / "tokenizer.model").write_bytes(written.bpe_file())
    write(tmp_path, tokenizer_config={} if flag is None else {"add_bos_token": flag})
    tokenizer = load(tmp_path, 1000)
    assert tokenizer.begin == begin and tokenizer.stop_token_ids == {2}
    assert tokenizer.encode_prompt("")[: len(begin)] == list(begin)


def test_tokens_that_a_tokenizer_lacks_are_added_at_their_ids(folder):
    decoder = described("<|tool|>", 300) | described("<think>", 270, special=False)
    write(folder, tokenizer_config={"added_tokens_decoder": decoder, "pad_token": "[PAD]", "eos_token": "ĊĊ"})
    write(folder, added_tokens={"[PAD]": 260, "plain": 261})
    tokenizer = load(folder)
    assert tokenizer.controls.keys() == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|note|>", "<|tool|>", "[PAD]"}
    assert (tokenizer.controls["<|tool|>"], tokenizer.controls["[PAD]"]) == (300, 260)
    assert tokenizer.controls["<|note|>"] == 259  # those that were there have the ids that they had
    assert tokenizer.encode("a<think>plain<|tool|>")[:3] == [tokenizer.encode("a")[0], 270, 261]
    assert not {300, 260} & {*tokenizer.encode("<|tool|>[PAD]")} and tokenizer.decode([300, 270]) == "<think>"
    assert np.flatnonzero(tokenizer.valid_token_mask(512)).tolist() == [*range(262), 270, 300]
    pieces = ["a", 300, "b"]
    assert tokenizer.encode_rendered(pieces) == [*tokenizer.encode("a"), 300, *tokenizer.encode("b")]


def test_what_files_call_special_is_special(folder):
    """A tokenizer.json may have it as ordinary text, or only in its vocabulary; a single letter stays one of text."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][2] |= {"content": "<end>", "special": False}
    content["model"]["vocab"]["<s>"] = 400
    write(folder, tokenizer=content, special_tokens_map={"bos_token": "<s>", "sep_token": "!"})
    assert "<end>" not in load(folder).controls
    write(folder, tokenizer_config={"additional_special_tokens": ["<end>"]})
    tokenizer = load(folder)
    assert (tokenizer.controls["<end>"], tokenizer.controls["<s>"]) == (258, 400)
    assert tokenizer.decode(tokenizer.encode("hey!")) == "hey!"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<|im_end|>": 300}}, "'<|im_end|>' has the id 300 in added_tokens.json, and 258 in it"),
        ({"added_tokens": {"<new>": 258}}, "the id 258 is '<new>' in added_tokens.json, and '<|im_end|>' in it"),
        (
            {"tokenizer_config": {"added_tokens_decoder": described("<x>", 300)}, "added_tokens": {"<x>": 301}},
            "'<x>' has the id 301 in added_tokens.json, and 300 in tokenizer_config.json",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": described("<x>", 300)}, "added_tokens": {"<y>": 300}},
            "the id 300 is '<y>' in added_tokens.json, and '<x>' in tokenizer_config.json",
        ),
        ({"added_tokens": {"<x>": "7"}}, "added_tokens.json is no table of tokens and ids"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "an added_tokens_decoder that is no table"),
        ({"tokenizer": {"model": 5}}, "tokenizer.json: it is not a tokenizer.json"),
    ],
)
def test_files_that_contradict_each_other_are_refused(folder, files, message):
    write(folder, **files)
    with pytest.raises(InputError) as refused:
        load(folder)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_special_tokens_that_the_model_has_no_row_for_are_left_out(folder):
    """As of Gemma 3, whose tokenizer has a token of pictures beyond the model of text."""
    assert load(folder, 260).controls["<|note|>"] == 259
    tokenizer = load(folder, 259)
    assert tokenizer.vocab_size == 259 and "<|note|>" not in tokenizer.controls
    write(folder, added_tokens={"<|pad|>": 260, "word": 261})
    assert tokens.complete(folder, 260) == folder / "tokenizer.json"


def test_a_unigram_has_no_gaps(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(written.unigram_file())
    size = load(tmp_path, 1000).vocab_size
    write(tmp_path, added_tokens={"<next>": size})
    assert load(tmp_path, 1000).vocab_size == size + 1
    write(tmp_path, added_tokens={"<next>": size + 1})
    with pytest.raises(InputError, match=rf"'<next>' has the id {size + 1}, and would become {size}"):
        load(tmp_path, 1000)


def test_the_first_file_of_the_order_is_taken(tmp_path, monkeypatch):
    ranks = len(written.ranks())
    known = {"ranks": ranks, "pattern": r"\p{L}+|\P{L}", "specials": {"<|end_of_text|>": ranks + 3}, "name": "small"}
    monkeypatch.setattr(tiktoken, "known", lambda: {ranks: known})
    vocabulary, merges = written.gpt2_files()
    contents = {
        **{"vocab.json": vocabulary, "merges.txt": merges, "tokenizer.model": written.bpe_file()},
        **{"some.tiktoken": written.tiktoken_file(), "tekken.json": written.tekken_file()},
        "tokenizer.json": tokenizer_fixtures.chatml().to_json().encode(),
    }
    separators = ["<|endoftext|>", "</s>", "<|end_of_text|>", "</s>", "<|endoftext|>"]
    found = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        if name == "vocab.json":
            assert tokens.files(tmp_path) == []  # without merges it is none
            continue
        assert tokens.files(tmp_path)[-1].name == name
        tokenizer = load(tmp_path, 1000)
        found.append(tokenizer.name_of(tokenizer.separator))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert found == separators
    for name in ("tokenizer.json", "tekken.json", "some.tiktoken"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.model").write_bytes(written.tiktoken_file())  # as in Llama 3's own folder
    assert load(tmp_path, 1000).separator == ranks + 3


def test_a_conversion_is_made_once(tmp_path, monkeypatch):
    (tmp_path / "tekken.json").write_bytes(written.tekken_file())
    made = tokens.complete(tmp_path, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(tekken, "convert", None)
        assert tokens.complete(tmp_path, 1000) == made
    (tmp_path / "tekken.json").write_bytes(written.tekken_file(reserved=40))
    assert tokens.complete(tmp_path, 1000) != made


def test_a_conversion_that_does_not_agree_is_not_kept(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(written.bpe_file())
    convert = sentencepiece.convert

    def wrong(content):
        made = convert(content)
        made.backend.decoder = decoders.Fuse()
        return made

    monkeypatch.setattr(sentencepiece, "convert", wrong)
    for _ in range(2):
        with pytest.raises(InputError, match=r"tokenizer.model: it cannot be converted: decoding does not give back"):
            tokens.complete(tmp_path, 999)  # of which none is in the cache


def test_a_sentencepiece_model_is_the_tokenizer_json_that_was_made_of_it(tmp_path, stories):
    """The pieces and scores of the published tokenizer of stories260K give the same ids again."""
    content = json.loads((stories / "tokenizer.json").read_text())
    vocabulary, pairs = content["model"]["vocab"], content["model"]["merges"]
    rank = {}
    for number, pair in enumerate(pairs):
        rank.setdefault("".join(pair), number)
    kinds = {"<unk>": written.UNKNOWN, "<s>": written.CONTROL, "</s>": written.CONTROL}
    kinds |= {f"<0x{byte:02X}>": written.BYTE for byte in range(256)}
    pieces = [
        (piece, -float(rank.get(piece, len(pairs) + number)), kinds.get(piece, written.NORMAL))
        for piece, number in sorted(vocabulary.items(), key=lambda item: item[1])
    ]
    (tmp_path / "tokenizer.model").write_bytes(written.sentencepiece(pieces, {3: 2, 35: 1}, {3: 1, 4: 0, 5: 1}))
    mine, own = load(tmp_path), load(stories)
    texts = [(stories / "expected.txt").read_text(), TEXT, "  Once\n\tupon é 😀"]
    assert mine.encode_batch(texts) == own.encode_batch(texts)
    assert (mine.begin, mine.stop_token_ids, mine.controls) == (own.begin, own.stop_token_ids, own.controls)


@pytest.fixture
def stories(pytestconfig):
    return pytestconfig.rootpath / "tests" / "families" / "stories260K"


def test_code_is_named_and_not_run(tmp_path):
    assert tokens.code(tmp_path) is None
    write(tmp_path, tokenizer_config={"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}})
    assert tokens.code(tmp_path) == "tokenization_x.XTokenizer"
    (tmp_path / "tokenization_y.py").write_text("raise SystemExit")
    assert tokens.code(tmp_path) == "tokenization_y.py" and tokens.files(tmp_path) == []


def test_the_library_reads_what_is_made(folder):
    write(folder, added_tokens={"<|tool|>": 300})
    made = Backend.from_file(str(tokens.complete(folder, 512)))
    assert made.token_to_id("<|tool|>") == 300 and made.get_vocab_size() == 261
