"""Chat templates that come with jaxlm, by name, for base models. The formats are those of published models:

ChatML (OpenAI), Llama 3 Instruct, Gemma 3, Mistral 7B Instruct v0.3 and Qwen3.
"""

from importlib import resources

from jaxlm.data.tokenizers import Tokenizer

# The token that each writes behind an answer; None where that is eos_token.
_END_OF_TURN = {
    **{"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "mistral": None},
    "qwen3": "<|im_end|>",
}
NAMES = tuple(_END_OF_TURN)


def source(name: str, tokenizer: Tokenizer, end_of_text: str | None) -> str:
    """Return the Jinja source of a template for a tokenizer.

    Marks that the tokenizer has no control token for are text. So that an answer ends with a control token all the
    same, `end_of_text`, if there is one, then takes the place of the mark behind it.
    """
    file = resources.files("jaxlm.data") / "chat_templates" / f"{name}.jinja"
    template, end = file.read_text(encoding="utf-8").rstrip("\n"), _END_OF_TURN[name]
    if end is None or end in tokenizer.controls or end_of_text is None:
        return template
    return template.replace(end, end_of_text)
