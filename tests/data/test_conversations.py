"""Conversations: what of them is learned, how they are stored and packed, and which are refused."""

import json
import re

import numpy as np
import pytest
import tokenizer_fixtures
from tokenizer_fixtures import CHATML

from jaxlm.core.errors import InputError
from jaxlm.data import conversations
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.config import DataConfig
from jaxlm.data.conversations import Conversation, NotAConversation, encode, ends_answers
from jaxlm.data.dataset import prepare
from jaxlm.data.packing import NothingToLearn, Rows, cut_remark

TOKENIZER = tokenizer_fixtures.chatml()


def message(role, content, **more):
    return {"role": role, "content": content, **more}


TWO_TURNS = [
    message("system", "Be brief."),
    message("user", "1+1?"),
    message("assistant", "2"),
    message("user", "2+2?"),
    message("assistant", "4"),
]


def learned(record, template=CHATML, tokenizer=TOKENIZER) -> list[str]:
    """Return the texts that are learned of a record."""
    conversation = Conversation.from_json(Conversation.of_record(record).to_json())
    tokens, marks = encode(conversation, ChatTemplate(template, tokenizer, {}, "the template"))
    cuts = [0, *(np.flatnonzero(np.diff(marks)) + 1), len(marks)]
    pieces = [(tokenizer.spelled_out(tokens[a:b].tolist()), marks[a]) for a, b in zip(cuts, cuts[1:], strict=False)]
    return [text for text, mark in pieces if mark]


def test_answers_are_learned_with_the_end_of_their_turn_and_nothing_else():
    assert learned({"messages": TWO_TURNS}) == ["2<|im_end|>", "4<|im_end|>"]


def test_of_prompt_and_completion_the_completion_is_learned():
    assert learned({"prompt": "1+1?", "completion": "2"}) == ["2<|im_end|>"]
    assert learned({"prompt": TWO_TURNS[:-1], "completion": [TWO_TURNS[-1]]}) == ["4<|im_end|>"]


def test_a_message_of_weight_0_is_not_learned():
    turns = [*TWO_TURNS[:2], TWO_TURNS[2] | {"weight": 0}, *TWO_TURNS[3:]]
    assert learned({"messages": turns}) == ["4<|im_end|>"]


def test_an_answer_without_an_end_is_learned_whole():
    assert learned({"prompt": "1+1?", "completion": "2 "}, "{% for m in messages %}{{ m.content }}\n{% endfor %}") == [
        "2 \n"
    ]


@pytest.mark.parametrize(
    "template",
    [
        # The last message alone has its end, and what was thought is dropped from earlier ones.
        "{% for m in messages %}<|im_start|>{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content if loop.last else m.content[:1] }}<|im_end|>{% endfor %}",
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_whose_text_does_not_only_grow_is_refused(template):
    with pytest.raises(InputError, match="the template shows message 3 otherwise once its answer or others follow"):
        learned({"messages": [*TWO_TURNS[:2], message("assistant", "22"), *TWO_TURNS[3:]]}, template)


def test_a_blank_that_becomes_one_token_with_an_answer_is_named():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    merging = tokenizer_fixtures.chatml(("Ġ", "f"))
    assert learned({"prompt": "2+2?", "completion": "4"}, template, merging) == ["4\n"]
    with pytest.raises(InputError, match=r'ends with "2\+2\?\\nassistant: " where message 2 begins, .*: "four"'):
        learned({"prompt": "2+2?", "completion": "four"}, template, merging)


@pytest.mark.parametrize(
    "record, why",
    [
        ({"text": "x"}, "has no messages, or prompt and completion, but 'text'"),
        ({"messages": []}, "has messages that are no list of messages"),
        ({"messages": [{"content": "x"}]}, "has messages of which one has no role"),
        ({"messages": [{"role": "user"}]}, "has messages of which one has no content"),
        ({"messages": [{"role": "user", "content": 7}]}, "has messages of which one has no content"),
        ({"messages": [message("user", "x")]}, "has no message of the assistant to learn"),
        ({"prompt": [message("assistant", "x")], "completion": [message("user", "y")]}, "no message of the assistant"),
        ({"prompt": "x", "completion": 3}, "has completion that are no list"),
        ({"messages": TWO_TURNS, "tools": "f"}, "has tools that are no list"),
    ],
)
def test_a_record_that_is_no_conversation_says_why(record, why):
    with pytest.raises(NotAConversation, match=why):
        Conversation.of_record(record)


@pytest.fixture
def model(tmp_path):
    """The path of a tokenizer with a chat template beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    TOKENIZER.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder / "tokenizer.json"


def records(file, number, start=0):
    """Write conversations of one question each."""
    lines = [{"prompt": f"{i}+1?", "completion": str(i + 1)} for i in range(start, start + number)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def data(model, tmp_path, **keys):
    return DataConfig(tokenizer=str(model), cache=str(tmp_path / "cache"), **keys)


def texts(rows):
    """Return what is learned in each row, and check positions and padding."""
    found = []
    for number in range(len(rows)):
        row = rows[number]
        starts = np.flatnonzero(row["positions"] == 0)
        assert all(np.diff(row["positions"])[i - 1] < 0 for i in starts[1:])
        found.append(TOKENIZER.spelled_out(row["targets"][row["segments"] > 0].tolist()))
    return found


def test_conversations_are_packed_apart_and_only_answers_count(model, tmp_path):
    chat = data(model, tmp_path, chat=records(tmp_path / "x.jsonl", 40))
    source = prepare(chat, 300).sources["data"]
    assert source.train.of_conversations and source.held_out.of_conversations
    sides = [texts(Rows(side, 64)) for side in (source.train, source.held_out)]
    assert max(map(len, sides[0])) > len("10<|im_end|>") * 1.5, "no row holds two conversations"
    answers = sorted(answer for side in sides for row in side for answer in row.split("<|im_end|>") if answer)
    assert answers == sorted(str(i + 1) for i in range(40))
    counted = sum(int((Rows(source.train, 64)[i]["segments"] > 0).sum()) for i in range(len(Rows(source.train, 64))))
    assert counted == source.train.targets
    assert source.train.predicted_bytes == sum(len(row.replace("<|im_end|>", "")) for row in sides[0])


def test_a_conversation_longer_than_a_row_is_cut_at_its_end(model, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "q", "completion": "abcdefgh" * 20}) + "\n")
    chat = data(model, tmp_path, chat=str(tmp_path / "x.jsonl"), validation=records(tmp_path / "v.jsonl", 3))
    rows = Rows(prepare(chat, 300).sources["data"].train, 40)
    assert len(rows) == 1 and ("abcdefgh" * 20).startswith(texts(rows)[0]) and texts(rows)[0]


def test_conversations_that_keep_no_token_of_an_answer_are_left_out_and_counted(model, tmp_path):
    lines = [{"prompt": "q" * 30 * (i % 3), "completion": "yes"} for i in range(9)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = data(model, tmp_path, chat=str(tmp_path / "x.jsonl"), validation=records(tmp_path / "v.jsonl", 3))
    store = prepare(chat, 300).sources["data"].train
    rows = Rows(store, 60)
    assert (rows.left_out, Rows(store, 60).left_out, Rows(store, 200).left_out) == (3, 3, 0)
    assert all((rows[number]["segments"] > 0).any() for number in range(len(rows)))
    said = "3 of 9 conversations are longer than training.sequence = 60 tokens (the longest has 83) and are cut there"
    assert cut_remark(rows) == f"{said}; 3 of them keep no token of an answer and are left out"
    with pytest.raises(NothingToLearn, match="none of the 9 conversations .*sequence = 12 .* raise it to 19"):
        Rows(store, 12)


def test_an_answer_without_a_token_is_left_out(model, tmp_path):
    (model.parent / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    lines = [{"prompt": "q", "completion": "yes" * (i % 2)} for i in range(6)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = data(model, tmp_path, chat=str(tmp_path / "x.jsonl"), validation=records(tmp_path / "v.jsonl", 3))
    rows = Rows(prepare(chat, 300).sources["data"].train, 60)
    assert rows.left_out == 3
    assert cut_remark(rows) == "3 of 6 conversations have no token of an answer and are left out"


def test_arguments_of_a_call_are_a_table_to_the_template_however_they_are_given():
    template = "{% for m in messages %}<|im_start|>{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    template += "{% endfor %}{{ m.content }}<|im_end|>{% endfor %}"
    for arguments in ('{"tz": "UTC"}', {"tz": "UTC"}):
        call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
        record = {"messages": [message("user", "time?"), message("assistant", "", tool_calls=[call])]}
        assert learned(record, template) == ['<|im_start|>{"tz": "UTC"}<|im_end|>']
    call["function"]["arguments"] = '{"tz": NaN}'
    with pytest.raises(NotAConversation, match="the arguments of a call must be JSON, and are '{\"tz\": NaN}'"):
        Conversation.of_record(record)


def test_a_text_of_json_in_the_arguments_stays_a_text():
    """It is read once, not twice."""
    template = "{% for m in messages %}{{ m.tool_calls[0].arguments.x if m.tool_calls else '' }}<|im_end|>{% endfor %}"
    calls = [{"name": "f", "arguments": json.dumps({"x": '{"y": 1}'})}]
    record = {"messages": [message("user", "?"), message("assistant", "", tool_calls=calls)]}
    assert learned(record, template) == ['{"y": 1}<|im_end|>']


@pytest.mark.parametrize("end, ends", [("<|im_end|>", True), ("{{ eos_token }}", False), ("\n", False)])
def test_whether_what_is_learned_ends_an_answer(end, ends):
    template = f"{{% for m in messages %}}<|im_start|>{{{{ m.content }}}}{end}{{% endfor %}}"
    assert ends_answers(ChatTemplate(template, TOKENIZER, {}, "the template")) is ends


def test_validation_takes_the_place_of_what_is_held_out(model, tmp_path):
    train, validation = records(tmp_path / "x.jsonl", 30), records(tmp_path / "v.jsonl", 5, start=100)
    for held_out in (0.0, 0.1):
        found = prepare(data(model, tmp_path, chat=train, validation=validation, held_out=held_out), 300)
        source = found.sources["data"]
        assert len(source.train.lengths) == 30 and len(source.held_out.lengths) == 5
    other = prepare(data(model, tmp_path, chat=train, validation=records(tmp_path / "w.jsonl", 5)), 300)
    assert other.digest != found.digest


def test_text_has_validation_too(tmp_path):
    for name, text in (("x", "abc"), ("y", "defg")):
        (tmp_path / f"{name}.txt").write_text(text)
    keys = {"text": str(tmp_path / "x.txt"), "validation": str(tmp_path / "y.txt"), "held_out": 0.0}
    source = prepare(DataConfig(tokenizer="bytes", cache=str(tmp_path / "cache"), **keys), 257).sources["data"]
    sides = (source.train, source.held_out)
    assert ["".join(map(chr, side.read(0, 1, side.targets - 1))) for side in sides] == ["abc", "defg"]


def test_text_and_conversations_are_mixed(model, tmp_path):
    (tmp_path / "x.txt").write_text("some text, of which every token is learned " * 20)
    sources = {"text": {"text": str(tmp_path / "x.txt")}, "chat": {"chat": records(tmp_path / "x.jsonl", 30)}}
    found = prepare(data(model, tmp_path, sources=sources), 300).sources
    assert found["chat"].train.of_conversations and not found["text"].train.of_conversations
    assert found["text"].train.targets == sum(found["text"].train.lengths - 1)


def test_parquet_holds_conversations(model, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"messages": [TWO_TURNS] * 4, "source": ["x"] * 4})
    parquet.write_table(table, tmp_path / "x.parquet")
    chat = data(model, tmp_path, chat=str(tmp_path / "x.parquet"), validation=records(tmp_path / "v.jsonl", 3))
    store = prepare(chat, 300).sources["data"].train
    assert len(store.lengths) == 4
    shown = conversations.pieces(store, 0, TOKENIZER)
    assert [text for text, mark in shown if mark] == ["2<|im_end|>", "4<|im_end|>"]
    assert "".join(text for text, _ in shown).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?"
    )


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"chat": "x.jsonl", "text": "x.txt"}, "data.text and data.chat are both given"),
        ({"chat": "x.jsonl", "tokenizer": "bytes"}, "data.chat needs the tokenizer of a model that converses"),
        ({"chat": "x.jsonl", "held_out": 0.0}, "data.held_out = 0 leaves no held-out text of data.chat"),
        ({"sources": {"a": {"text": "x", "chat": "y"}}}, "text and chat are both given"),
        ({"sources": {"a": {"text": "x"}}, "validation": "y"}, "give data.sources.NAME.validation"),
    ],
)
def test_keys_that_contradict_are_refused(keys, says):
    with pytest.raises(ValueError, match=says):
        DataConfig(**{"tokenizer": "x.json", **keys})


def test_files_that_hold_no_conversations_are_refused(model, tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(InputError, match="data.chat: .*x.txt is not one of .jsonl, .jsonl.gz, .jsonl.zst, .parquet"):
        prepare(data(model, tmp_path, chat=str(tmp_path / "x.txt")), 300)
    (tmp_path / "x.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(InputError, match="x.jsonl:1 has no messages, or prompt and completion, but 'text'"):
        prepare(data(model, tmp_path, chat=str(tmp_path / "x.jsonl")), 300)
    (tmp_path / "z.jsonl").write_text('{"messages": []\n')
    with pytest.raises(InputError, match=r"z.jsonl:1 is not JSON \(Expecting ',' delimiter: column 1\d\)"):
        prepare(data(model, tmp_path, chat=str(tmp_path / "z.jsonl")), 300)
    (model.parent / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="data.chat: there is no chat template in .*; set data.chat_template"):
        prepare(data(model, tmp_path, chat=records(tmp_path / "y.jsonl", 20)), 300)


@pytest.mark.parametrize("name", ["chat", "preferences"])
def test_a_misspelt_role_is_refused_at_its_line(name, model, tmp_path):
    good, bad = [message("user", f"{number}+1?") for number in range(30)], message("usr", "1+1?")
    file = tmp_path / f"{name}.jsonl"
    answers = {"completion": "2"} if name == "chat" else {"chosen": "2", "rejected": "3"}
    lines = [json.dumps({"prompt": [turn], **answers}) for turn in (*good, bad)]
    file.write_text("\n\n".join(lines))
    with pytest.raises(
        InputError, match=r"jsonl:61: messages.0.role: the template knows no 'usr'; did you mean 'user'"
    ):
        prepare(data(model, tmp_path, **{name: str(file)}), 300)


def test_a_message_that_the_template_drops_is_refused():
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role + m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    turns = [*TWO_TURNS[:2], message("tool", "7"), TWO_TURNS[2]]
    with pytest.raises(InputError, match="messages.2: the model's chat template does not show a message of the role"):
        learned({"messages": turns}, template)


def test_developer_is_system_where_the_template_knows_no_developer():
    record = {"messages": [message("developer", "Be brief."), *TWO_TURNS[1:]]}
    template = ChatTemplate(CHATML, TOKENIZER, {}, "the template")
    assert template.render(record["messages"], reply=False) == template.render(TWO_TURNS, reply=False)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_that_leaves_a_side_no_text_names_one_that_does(share, model, tmp_path):
    chat = records(tmp_path / "few.jsonl", 4)
    with pytest.raises(InputError, match="give more text or set data.held_out = 0") as refusal:
        prepare(data(model, tmp_path, chat=chat, held_out=share), 300)
    better = float(re.search(r"set data.held_out = (0[.][0-9]+) or", str(refusal.value))[1])
    assert prepare(data(model, tmp_path, chat=chat, held_out=better), 300).sources["data"].held_out.targets
