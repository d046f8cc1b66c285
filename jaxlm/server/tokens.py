"""/tokenize, /detokenize and /tokenizer_info: texts as the model's token ids, and back."""

from typing import Annotated, Any

from anyio import to_thread
from pydantic import Field
from typing_extensions import TypedDict

from jaxlm.server.messages import ConversationBody, MessageBody, ToolBody, encoded, template_of
from jaxlm.server.refusals import Refusal
from jaxlm.server.request_body import RequestBody
from jaxlm.server.served import Caller, ServedModel


class TokenizeBody(ConversationBody):
    """A request for the token ids of a text, or of a conversation."""

    model: str | None = None
    """The model's name, as /v1/models gives it."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[MessageBody], Field(min_length=1)] | None = None
    """A conversation, as the chat template shows it."""
    tools: list[ToolBody] | None = None
    """Functions that the chat template shows."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the chat template reads, such as `enable_thinking`."""
    add_special_tokens: bool | None = None
    """Begin with the ids that begin a document: true for a text, and false for a conversation, whose template begins
    as it does. If false, the name of a control token alone is its id, as clients look it up; in a longer text it stays
    text."""
    return_token_strs: bool | None = None
    """Give the tokens as the vocabulary spells them too."""


class TokenizeAnswer(TypedDict):
    """Token ids, their number, the most that a text may have, and the tokens as the vocabulary spells them."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeBody(RequestBody):
    """A request for the text of token ids."""

    model: str | None = None
    """The model's name, as /v1/models gives it."""
    tokens: list[Annotated[int, Field(ge=0)]]
    """Token ids."""


class DetokenizeAnswer(TypedDict):
    """A text, with the names of control tokens."""

    prompt: str


async def tokenize(served: ServedModel, caller: Caller, body: TokenizeBody) -> TokenizeAnswer:
    """Answer with the token ids of a text."""
    if (body.prompt is None) == (body.messages is None):
        raise Refusal("give one of prompt and messages", param="prompt")
    for name in ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message"):
        if body.messages is None and getattr(body, name) is not None:
            raise Refusal(f"{name} is of messages, which are not given; leave it out", param=name)

    def ids() -> list[int]:
        if body.messages is not None:
            begin = served.tokenizer.begin if body.add_special_tokens else ()
            template = template_of(served, body.chat_template_kwargs)
            return [*begin, *encoded(template, body.messages, body.tools or [], **body.ending)]
        begins = body.add_special_tokens is not False
        text = body.prompt or ""
        if not begins and text in served.tokenizer.controls:
            return [served.tokenizer.controls[text]]
        return served.tokenizer.encode_prompt(text) if begins else served.tokenizer.encode(text)

    tokens = await to_thread.run_sync(ids)
    names = [served.tokenizer.name_of(token) for token in tokens] if body.return_token_strs else None
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.longest, "token_strs": names}


async def detokenize(served: ServedModel, caller: Caller, body: DetokenizeBody) -> DetokenizeAnswer:
    """Answer with the text of token ids."""
    size = served.service.engine.model.vocab_size
    if (strange := next((token for token in body.tokens if token >= size), None)) is not None:
        raise Refusal(f"token id {strange} is outside the vocabulary, 0 to {size - 1}", param="tokens")
    return {"prompt": await to_thread.run_sync(served.tokenizer.spelled_out, body.tokens)}


class TokenizerInfo(TypedDict):
    """A tokenizer as clients that count tokens ask for it: its control tokens by name, and the chat template."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


def tokenizer_info(served: ServedModel) -> TokenizerInfo:
    """Return what a client may know of the tokenizer."""
    tokenizer, template = served.tokenizer, served.chat_template
    end = next(iter(sorted(tokenizer.stop_token_ids)), None) if tokenizer.separator is None else tokenizer.separator
    return {
        "tokenizer_class": "tokenizers.Tokenizer",
        "bos_token": tokenizer.name_of(tokenizer.begin[0]) if tokenizer.begin else None,
        "eos_token": None if end is None else tokenizer.name_of(end),
        "chat_template": template and template.source,
    }
