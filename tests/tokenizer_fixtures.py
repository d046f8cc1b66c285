"""Small tokenizers of the types that published models use."""

import string

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxlm.data.tokenizers import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Make a SentencePiece tokenizer as in Llama 2 and Gemma: blanks are ▁, with byte fallback."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁.,:'", *string.ascii_lowercase]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "m"), ("o", "n"), ("▁", "▁")]
    tokens += ["".join(pair) for pair in merges]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoder
    return Tokenizer(backend)


def llama2() -> Tokenizer:
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    return sentencepiece(decoders.Sequence(list(steps)))


def dropping(letters: str) -> Tokenizer:
    """Make a byte-pair encoding of these characters, their pairs and a separator. It silently drops all others."""
    tokens = [*letters, *(2 * letter for letter in letters), "</s>"]
    merges = [(letter, letter) for letter in letters]
    return Tokenizer(Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges)))


def wordpiece(text: str) -> Tokenizer:
    """Make a WordPiece tokenizer as in BERT from the characters of a text, without blanks; unknown words are [UNK]."""
    letters = sorted(set(text) - {" "})
    tokens = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "the", "mod", "##el"]
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return Tokenizer(backend)


def chatml(*merges: tuple[str, str]) -> Tokenizer:
    """Make a byte-level tokenizer with the control tokens of ChatML, one of which takes the blanks behind it."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.add_special_tokens([AddedToken("<|note|>", special=True, rstrip=True)])
    return Tokenizer(backend)
