"""`jaxlm generate --chat`: conversations with a model whose answers are written for it."""

import io
import json
import shutil
from pathlib import Path

import pytest
from engine_fixtures import WrittenEngine

from jaxlm import api
from jaxlm.cli import main
from jaxlm.inference.grammar import Grammar, Grammars
from jaxlm.inference.requests import Sampling

PUBLISHED = Path(__file__).parents[1] / "families" / "stories260K"
END_OF_TURN, END_OF_TEXT = 1, 2  # <s> and </s>
# A turn ends with <s>, which config.json does not name among the ends of a text.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(PUBLISHED, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def answering(model, monkeypatch):
    """Return a function that says what is answered next, and the prompts that were answered, as text."""
    answers, asked = [], []
    tokenizer = api.load(model).tokenizer

    def following(request):
        text = "".join("|" if token == END_OF_TURN else tokenizer.name_of(token) for token in request.prompt)
        asked.append((text.replace("▁", " "), request.stream, request.max_tokens))
        return answers.pop(0)

    def answer(text, *ends):
        answers.append([*tokenizer.encode(text), *ends])

    engine = WrittenEngine(following, tokenizer.stop_token_ids)
    monkeypatch.setattr(api.LoadedModel, "engine", lambda self, tokens: engine)
    return answer, asked


def said(capsys, model, *arguments, status=0):
    assert main(["generate", str(model), "--chat", *map(str, arguments)]) == status
    return capsys.readouterr()


def typed(monkeypatch, *lines):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))


@pytest.mark.parametrize("begun", ["", "<think>"])
def test_what_is_thought_before_a_form_is_free(model, tmp_path, begun):
    """The template or the model begins the thought; then comes the form, and nothing else."""
    folder = shutil.copytree(model, tmp_path / "model")
    marks = "{% if false %}<think></think>{% endif %}"
    (folder / "chat_template.jinja").write_text(marks + TEMPLATE.replace("assistant: ", f"assistant: {begun}"))
    thinking = api.load(folder)
    form = Grammar("json_schema", '{"enum": ["so"]}')
    (request,) = thinking.requests([[{"role": "user", "content": "Hi"}]], 9, 1, Sampling(), (), form)
    (bare,) = thinking.requests(["Hi"], 9, 1, Sampling(), (), form)
    assert bare.grammar == form
    grammars = Grammars(thinking.tokenizer, thinking.config.vocab_size)
    compiled, words = grammars.compile(request.grammar), [*map(thinking.tokenizer.bytes_of, range(512))]

    def fits(text):
        matcher, left = grammars.matcher(compiled), text.encode()
        while left:
            allowed = [id for id in range(3, 512) if matcher.allowed_W[id // 32] >> id % 32 & 1]
            tokens = [id for id in allowed if left.startswith(words[id])]
            if not tokens:
                return False
            matcher.accept(token := max(tokens, key=lambda id: len(words[id])))
            left = left[len(words[token]) :]
        return matcher.has_ended

    opening = "" if begun else "<think>"
    assert fits(f'{opening}It "is" {{so}}.</think>\n\n"so"')
    assert fits('"so"') == (not begun)
    assert not fits(f'{opening}It is.</think>\n\n"no"') and not fits(f'{opening}It is.</think>"so" it')


def test_each_line_is_answered_after_those_before_it(model, answering, monkeypatch, capsys):
    """The end of a turn that the template writes ends an answer, and so does that of a text."""
    answer, asked = answering
    answer("One day.", END_OF_TURN, 5)
    answer("Two.", END_OF_TEXT, 5)
    answer("Anew.", END_OF_TURN)
    typed(monkeypatch, "Hi", "And <s> then?", "/reset", "Hi")
    out, error = said(capsys, model, "--system", "Be brief.", "--max-tokens", 20)
    assert (out, error) == ("One day.\nTwo.\nAnew.\n", "")
    first = " system: Be brief.| user: Hi| assistant: "
    assert [text for text, _, _ in asked] == [
        first,
        first + "One day.| user: And <s> then?| assistant: ",
        first,
    ]
    assert [stream for _, stream, _ in asked] == [0, 1, 3]  # a message again has other random numbers


def test_the_name_of_a_control_token_in_stop_ends_an_answer(model, answering, capsys):
    answer, _ = answering
    answer("One", 1, 5)
    assert said(capsys, model, "--prompt", "Hi", "--stop", "<s>", "--max-tokens", 9).out == "One\n"


def test_commands_are_no_messages(model, answering, monkeypatch, capsys):
    answer, asked = answering
    for text in ("One.", "Two.", "Path.", "Slash."):
        answer(text, END_OF_TURN)
    lines = ["Hi", "/help", "/system", "/rest", "/what is it", "/system Be odd.", "/system", "Hi", "/tmp/a is", " /no"]
    typed(monkeypatch, *lines, "/exit", "never read")
    out, error = said(capsys, model)
    assert out == "One.\nTwo.\nPath.\nSlash.\n"
    assert [text.partition("user: ")[2].partition("|")[0] for text, _, _ in asked] == ["Hi", "Hi", "Hi", "Hi"]
    assert asked[1][0] == " system: Be odd.| user: Hi| assistant: "
    assert "user: /tmp/a is|" in asked[2][0] and "user:  /no|" in asked[3][0]
    helped, rest = error.splitlines()[:4], error.splitlines()[4:]
    assert [line.split()[0] for line in helped] == ["/help", "/reset", "/system", "/exit"]
    assert rest == [
        "there is no system message; /system TEXT sets one",
        "jaxlm: there is no command /rest; did you mean /reset? (a space before it makes it a message)",
        "jaxlm: there is no command /what; /help lists them (a space before it makes it a message)",
        "Be odd.",
    ]


def test_an_answer_that_is_ended_stays_and_what_is_refused_does_not(model, answering, monkeypatch, capsys):
    answer, asked = answering
    answer("Once upon", KeyboardInterrupt())
    answer("", KeyboardInterrupt())
    answer("Yes.", END_OF_TURN)
    answer("Cut")
    typed(monkeypatch, "Tell", "lost", "x" * 600, "Go on", "Long")
    out, error = said(capsys, model, "--max-tokens", 3)
    assert out == "Once upon\n\nYes.\nCut\n"
    assert error.splitlines() == [
        "jaxlm: with this message the conversation has 634 tokens, and model.context_length = 512 leaves no room for "
        "an answer of --max-tokens 3; /reset begins another, and a shorter message may fit",
        "jaxlm: the answer is cut off; --max-tokens N lets it be longer",
    ]
    assert asked[2][0] == " user: Tell| assistant: Once upon| user: Go on| assistant: "


def test_a_terminal_has_a_conversation_until_its_end(model, answering, monkeypatch, capsys):
    """Ctrl-C leaves a line, or ends an answer, and Ctrl-D the conversation."""
    answer, asked = answering
    answer("One.", KeyboardInterrupt())
    answer("Two.", END_OF_TURN)
    keys = iter([KeyboardInterrupt(), "Hi", "Again", EOFError()])

    def line(_sign):
        key = next(keys)
        if isinstance(key, BaseException):
            raise key
        return key

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    out, _ = said(capsys, model)
    assert out == "\nOne.\nTwo.\n\n"
    assert asked[1][0] == " user: Hi| assistant: One.| user: Again| assistant: "
    assert [limit for _, _, limit in asked] == [497, 476]  # what the context leaves


def test_messages_that_are_given_are_answered_once(model, answering, tmp_path, capsys):
    answer, asked = answering
    answer("Hello.", END_OF_TURN)
    assert said(capsys, model, "--prompt", "Hi").out == "Hello.\n"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    messages.append({"role": "user", "content": "Go"})
    (tmp_path / "some.jsonl").write_text(json.dumps({"messages": messages}) + '\n{"prompt": "Hi"}\n')
    answer("One.", END_OF_TURN)
    answer("Two.", END_OF_TURN)
    system = {"role": "system", "content": "S"}
    rows = json.loads(said(capsys, model, "--prompts", tmp_path / "some.jsonl", "--system", "S", "--json").out)
    assert [row["messages"] for row in rows["completions"]] == [[system, *messages], [system, messages[0]]]
    assert [row["text"] for row in rows["completions"]] == ["One.", "Two."]
    assert {row["finish_reason"] for row in rows["completions"]} == {"stop"}
    assert asked[1][0] == " system: S| user: Hi| assistant: Yes?| user: Go| assistant: "


def test_a_program_answers_conversations_beside_texts(model, answering):
    answer, asked = answering
    answer("Once.", END_OF_TURN, END_OF_TEXT)
    answer("Yes.", END_OF_TURN, 5)
    loaded = api.load(model)
    continued, answered = loaded.generate(["Hi", [{"role": "user", "content": "Hi"}]])
    assert continued.token_ids[-1] == END_OF_TURN and continued.text == " Once."
    assert answered.text == "Yes." and answered.finish_reason == "stop"
    assert asked[0][0] == "| Hi"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--token-ids", "1"], "--token-ids are no message: leave out --chat, or give --prompt or --prompts"),
        (["--json"], "--json is of prompts that are given"),
        (["--num-samples", "2"], "--num-samples is of prompts that are given"),
        (["--prompts", "FOLDER/ids.jsonl"], 'ids.jsonl:1 is no record such as {"messages": [{"role": "user"'),
        (["--prompts", "FOLDER/odd.jsonl"], 'odd.jsonl:2 is no record such as {"messages": [{"role": "user"'),
        (["--prompts", "FOLDER/system.jsonl", "--system", "S"], "conversation 1 has a system message of its own"),
        (
            ["--prompts", "FOLDER/role.jsonl"],
            "role.jsonl:2: messages.0.role: the template knows no 'usr'; did you mean",
        ),
        (["--prompts", "FOLDER/tool.jsonl"], "cannot show these messages: no tools"),
        (["--prompt", "x" * 600], "a prompt of 615 tokens exceeds model.context_length = 512; shorten it"),
    ],
)
def test_what_cannot_be_answered_is_one_line(model, tmp_path, capsys, asked, message):
    def record(name, *rows):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    user = {"role": "user", "content": "Hi"}
    record("ids", {"prompt": [1, 2]})
    record("odd", {"messages": [user]}, {"messages": []})
    record("system", {"messages": [{"role": "system", "content": "T"}, user]})
    record("role", {"messages": [user]}, {"messages": [user | {"role": "usr"}]})
    record("tool", {"messages": [user, {"role": "tool", "content": "7"}]})
    out, error = said(capsys, model, *(part.replace("FOLDER", str(tmp_path)) for part in asked), status=2)
    assert message in error and error.count("\n") == 1 and not out


def test_variables_of_the_template_are_those_that_it_reads(model, answering, capsys):
    answer, asked = answering
    (model / "chat_template.jinja").write_text(TEMPLATE + "{% if short %}shortly: {% endif %}")
    answer("One day.", END_OF_TURN)
    said(capsys, model, "--prompt", "Hi", "--chat-template-kwargs", '{"short": true}')
    [(text, _, _)] = asked
    _, error = said(capsys, model, "--prompt", "Hi", "--chat-template-kwargs", '{"brief": true}', status=2)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert text == " user: Hi| assistant: shortly: "
    assert "reads no 'brief'; what it reads is short" in error and error.count("\n") == 1


def test_a_model_without_a_chat_template_is_one_line(capsys):
    error = said(capsys, PUBLISHED, status=2).err
    assert error == (
        f"jaxlm: {PUBLISHED} has no chat template (chat_template.jinja, or one in tokenizer_config.json); give the one "
        "that it was trained with by --chat-template, a file or chatml, gemma, llama3, mistral, qwen3, or leave out "
        "--chat\n"
    )
    assert main(["generate", str(PUBLISHED), "--system", "S", "--prompt", "Hi"]) == 2
    assert capsys.readouterr().err == "jaxlm: --system is of a conversation: add --chat\n"
