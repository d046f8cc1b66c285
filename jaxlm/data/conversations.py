"""Conversations: records of messages, as token ids and which of them are learned."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.data.call_shapes import Message, with_arguments_as_tables
from jaxlm.data.chat_template import ChatTemplate
from jaxlm.data.store import LEARNED, TokenStore
from jaxlm.data.tokenizers import Tokenizer

ASSISTANT = "assistant"
_FORMS = "messages, or prompt and completion"


class NotAConversation(ValueError):
    """A record that holds no conversation; the message says why."""


class RefusedRecord(InputError):
    """A record that a template cannot show, as the message says. `document`: what its reader wrote of it."""

    def __init__(self, why: str, document: str):
        super().__init__(why)
        self.document = document


class Conversation(NamedTuple):
    """Messages, of which those of the assistant are learned from the message `learned_from` on; with the tools that it
    may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    learned_from: int = 0

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Conversation":
        """Return the conversation of a record.

        It has `messages`, each with `role` and `content`, or `prompt` and `completion`, each a text or such messages,
        of which the completion alone is learned. A message of the assistant with `weight` 0 is not learned. Raises
        NotAConversation for another record.
        """
        tools = record.get("tools") or None
        if tools is not None and not isinstance(tools, list):
            raise NotAConversation("has tools that are no list")
        if "messages" in record:
            conversation = cls(_messages(record["messages"], "messages"), tools)
        elif "prompt" in record and "completion" in record:
            before = said(record["prompt"], "user", "prompt")
            conversation = cls(before + said(record["completion"], ASSISTANT, "completion"), tools, len(before))
        else:
            raise NotAConversation(f"has no {_FORMS}, but {', '.join(map(repr, list(record)[:8])) or 'nothing'}")
        if not any(map(conversation.is_learned, range(len(conversation.messages)))):
            raise NotAConversation("has no message of the assistant to learn")
        return conversation

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps(self._asdict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """Return the conversation that `to_json` wrote."""
        return cls(**json.loads(text))

    def is_learned(self, number: int) -> bool:
        """Return whether a message is learned."""
        message = self.messages[number]
        return message["role"] == ASSISTANT and number >= self.learned_from and message.get("weight", 1) != 0


def said(value: Any, role: str, key: str) -> list[dict[str, Any]]:
    """Return messages: those given, or a text as one of a role. Raises NotAConversation for neither."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, key)


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise NotAConversation(f"has {key} that are no list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotAConversation(f"has {key} of which one has no role")
        if not isinstance(message.get("content"), str | list | None) or (
            message.get("content") is None and "tool_calls" not in message
        ):
            raise NotAConversation(f"has {key} of which one has no content")
        try:
            with_arguments_as_tables(message)  # as the template will
        except InputError as error:
            raise NotAConversation(f"has {key} of which one cannot be shown: {error}") from None
    return [{name: inner for name, inner in message.items() if inner is not None} for message in value]


class Preference(NamedTuple):
    """Two conversations that begin alike, of which the first ends with the better answer."""

    chosen: Conversation
    rejected: Conversation

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Preference":
        """Return the two of a record with `prompt`, `chosen` and `rejected`, each a text or messages; without `prompt`
        the two are whole conversations, whose equal messages are the prompt. Raises NotAConversation for another
        record."""
        if missing := [key for key in ("chosen", "rejected") if key not in record]:
            raise NotAConversation(f"has no {missing[0]}, but {', '.join(map(repr, list(record)[:8])) or 'nothing'}")
        before = said(record["prompt"], "user", "prompt") if "prompt" in record else []
        both = [said(record[key], ASSISTANT, key) for key in ("chosen", "rejected")]
        alike = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        alike = 0 if "prompt" in record else alike
        tools = record.get("tools") or None
        preference = cls(*(Conversation(before + messages, tools, len(before) + alike) for messages in both))
        for key, conversation in preference._asdict().items():
            if not any(map(conversation.is_learned, range(len(conversation.messages)))):
                raise NotAConversation(f"has no answer of the assistant in {key}")
        return preference

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps([conversation._asdict() for conversation in self], ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Preference":
        """Return what `to_json` wrote."""
        return cls(*(Conversation(**described) for described in json.loads(text)))


class Encoded(NamedTuple):
    """Token ids, uint32 [tokens], and whether each is learned, bool [tokens]."""

    tokens: np.ndarray
    learned: np.ndarray


def encode(conversation: Conversation, template: ChatTemplate) -> Encoded:
    """Return a conversation as a template shows it, of which the assistant's answers are learned.

    An answer is what the tokens of the conversation up to it have more than those of the conversation before it. It
    ends with its last control token, the end of its turn, where only blanks follow that. Raises InputError for a
    message that the template does not show, or shows otherwise once others follow: it would be learned as it is never
    seen.
    """

    def shown(count: int, reply: bool) -> list[int]:
        return template.encode(plain[:count], reply=reply, tools=tools)

    messages, tools = conversation.messages, conversation.tools
    plain = list(map(_without_weight, messages))
    tokens = shown(len(plain), False)
    template.check_shown(plain, reply=False, tools=tools, calls=False)  # a model may learn calls without names
    learned = np.zeros(len(tokens), bool)
    for number in filter(conversation.is_learned, range(len(messages))):
        before, after = shown(number, True), shown(number + 1, False)
        if after[: len(before)] != before or tokens[: len(after)] != after:
            excerpt = json.dumps(messages[number]["content"], ensure_ascii=False)[:80]
            begun = template.render(plain[:number], reply=True, tools=tools)
            whole = template.render(plain[: number + 1], reply=False, tools=tools)
            if whole.startswith(begun) and after[: len(before)] != before:
                raise InputError(
                    f"{template.name} ends with {json.dumps(begun[-16:], ensure_ascii=False)} where message "
                    f"{number + 1} begins, whose first letters become one token with it; give a data.chat_template "
                    f"whose text before an answer ends without a blank, or with a control token: {excerpt}"
                )
            raise InputError(
                f"{template.name} shows message {number + 1} otherwise once its answer or others follow, so that no "
                "tokens are its answer; give a data.chat_template whose text only grows, or conversations of one "
                f"answer: {excerpt}"
            )
        learned[len(before) : _end_of_turn(after, len(before), template)] = True
    return Encoded(np.array(tokens, np.uint32), learned)


def _without_weight(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "weight"}


def _end_of_turn(tokens: Sequence[int], start: int, template: ChatTemplate) -> int:
    """Return the end of an answer that starts there."""
    controls = set(template.tokenizer.controls.values())
    last = next((at for at in range(len(tokens) - 1, start - 1, -1) if tokens[at] in controls), None)
    if last is None or template.tokenizer.decode(tokens[last + 1 :]).strip():
        return len(tokens)
    return last + 1


def ends_answers(template: ChatTemplate) -> bool:
    """Return whether a template writes a control token behind an answer, which is learned with it; otherwise nothing
    that is learned ends what is drawn."""
    question, answer = {"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}
    try:
        tokens, learned = encode(Conversation([question, answer]), template)
    except InputError:  # it asks for other messages
        return True
    is_control = np.isin(tokens[learned], [*template.tokenizer.controls.values()])
    return bool(is_control[int(np.argmin(is_control)) :].any())  # those before the answer do not end it


def pieces(store: TokenStore, document: int, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return a stored conversation as texts, control tokens spelled out, and whether each is learned."""
    length = int(store.lengths[document])
    tokens, learned = store.read(document, 0, length), store.learned(document, 0, length)
    cuts = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), length]
    return [
        (tokenizer.spelled_out(tokens[start:end].tolist()), bool(learned[start]))
        for start, end in itertools.pairwise(cuts)
        if end > start
    ]


class ConversationEncoder:
    """Encodes conversations for a store: `Conversation.to_json` to token ids, those that are learned marked."""

    dtype = np.dtype(np.uint32)

    def __init__(self, template: ChatTemplate):
        self._template, self._tokenizer = template, template.tokenizer

    def encode(self, documents: Sequence[str]) -> tuple[list[np.ndarray], Counter[str]]:
        """Return marked token ids of the conversations of each document, and their sizes as `TokenStore` has them.
        Raises RefusedRecord for one that the template cannot show."""
        encoded: list[np.ndarray] = []
        sizes = Counter(learned_targets=0, predicted_bytes=0, dropped_bytes=0, unknown_tokens=0)
        for document in documents:
            for conversation in self._conversations(document):
                try:
                    tokens, learned = encode(conversation, self._template)
                except InputError as error:
                    raise RefusedRecord(str(error), document) from None
                encoded.append(np.where(learned, tokens | LEARNED, tokens))
                answers = tokens[1:][learned[1:]]
                sizes["learned_targets"] += len(answers)
                sizes["predicted_bytes"] += len(self._tokenizer.decode(answers.tolist()).encode())
                if self._tokenizer.unknown is not None:
                    sizes["unknown_tokens"] += int(np.count_nonzero(tokens == self._tokenizer.unknown))
        return encoded, sizes

    def _conversations(self, document: str) -> Sequence[Conversation]:
        return [Conversation.from_json(document)]


class PreferenceEncoder(ConversationEncoder):
    """Encodes preferences for a store: two documents for each, the chosen and the rejected conversation."""

    def encode(self, documents: Sequence[str]) -> tuple[list[np.ndarray], Counter[str]]:
        """Return marked token ids of both conversations of each document, and their sizes, as `ConversationEncoder`."""
        encoded, sizes = super().encode(documents)
        return encoded, sizes | Counter(pairs=len(documents))

    def _conversations(self, document: str) -> Sequence[Conversation]:
        return Preference.from_json(document)


class RecordKind(Enum):
    """The kinds of records that are not text in a field: the keys of [data] that name their files."""

    CHAT = "chat"
    PREFERENCES = "preferences"

    @property
    def reader(self) -> type[Conversation] | type[Preference]:
        """Return what reads a record."""
        return {RecordKind.CHAT: Conversation, RecordKind.PREFERENCES: Preference}[self]

    def encoder(self, template: ChatTemplate) -> ConversationEncoder:
        """Return what encodes what was read."""
        return {RecordKind.CHAT: ConversationEncoder, RecordKind.PREFERENCES: PreferenceEncoder}[self](template)
