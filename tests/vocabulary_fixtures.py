"""Writers of small vocabularies in the files that publishers have: SentencePiece, tiktoken, tekken, GPT-2's."""

import base64
import json
import struct
from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from jaxlm.data.tokenizers import train_bpe
from jaxlm.families.vocabularies.byte_level import spelled
from jaxlm.families.vocabularies.protobuf import field

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
CORPUS = [
    f"def {a}{b}(value):\n    return {b}{a} + value  # it's <{a}> don't 1234\n\n"
    for a in SYLLABLES
    for b in SYLLABLES[::5]
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CONTROLS = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
USER = [
    ("[REF]", 0.0, USER_DEFINED),
    ("▁▁", 0.0, USER_DEFINED),
    ("▁▁▁", 0.0, USER_DEFINED),
    ("\n\n", 0.0, USER_DEFINED),
]


def sentencepiece(
    pieces: Iterable[tuple[str, float, int]],
    training: Mapping[int, int] = {},
    normalizer: Mapping[int, int | bytes] = {},
) -> bytes:
    """Write a `tokenizer.model` of (text, score, kind) and of settings by their field numbers."""
    messages = [field(1, text.encode()) + field(2, float(score)) + field(3, kind) for text, score, kind in pieces]
    settings = (b"".join(field(*setting) for setting in table.items()) for table in (training, normalizer))
    return b"".join(field(1, message) for message in messages) + b"".join(map(field, (2, 3), settings))


def learned() -> tuple[list[str], list[tuple[str, float, int]]]:
    """Return letters and merged pieces with their scores, as SentencePiece learns a BPE."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=260, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    described = json.loads(backend.to_str())["model"]
    merges = dict.fromkeys("".join(pair) for pair in described["merges"])
    letters = sorted({letter for token in described["vocab"] for letter in token} | {"▁"})
    return letters, [(piece, -float(rank), NORMAL) for rank, piece in enumerate(merges)]


def bpe_file(user_defined: bool = False, **normalizer: int) -> bytes:
    """Write a SentencePiece BPE with byte fallback: as of Llama 2, or as of Gemma with user-defined pieces."""
    letters, merges = learned()
    middle = USER if user_defined else [("▁▁", -1e9, NORMAL), ("▁▁▁▁", -1e9, NORMAL), ("▁▁▁", -1e9, NORMAL)]
    ends = [(letter, -float(len(merges) + at), NORMAL) for at, letter in enumerate(letters)]
    merges = [piece for piece in merges if piece[0] not in {text for text, *_ in middle}]
    switches = {3: int(not user_defined), 4: 0, 5: 1}
    return sentencepiece([*CONTROLS, *BYTES, *middle, *merges, *ends], {3: 2, 35: 1}, switches)


def unigram_file(byte_fallback: bool = True, charsmap: bytes = b"") -> bytes:
    """Write a SentencePiece Unigram, which strips and joins blanks."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=120, show_progress=False))
    learned_pieces = json.loads(backend.to_str())["model"]["vocab"]
    pieces = [(piece, score, NORMAL) for piece, score in learned_pieces]
    fallback = BYTES if byte_fallback else []
    return sentencepiece(
        [*CONTROLS, *fallback, *pieces], {3: 1, 35: int(byte_fallback)}, {2: charsmap} if charsmap else {}
    )


def charsmap(table: Mapping[str, str]) -> bytes:
    """Compile a table of characters into a double array, as SentencePiece does (Darts-clone)."""
    texts, places = b"", {}
    for text in dict.fromkeys(table.values()):
        places[text], texts = len(texts), texts + text.encode() + b"\0"
    trie: dict = {}
    for key, text in table.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[None] = places[text]
    units, used, starts = [0] * 256, {0}, set()

    def place(node: dict, at: int) -> None:
        labels = [0 if byte is None else byte for byte in node]
        free = (
            o for o in range(1, 2**20) if at ^ o not in starts and not any(at ^ o ^ label in used for label in labels)
        )
        starts.add(at ^ (offset := next(free)))
        units.extend([0] * (max(at ^ offset ^ label for label in labels) // 256 * 256 + 256 - len(units)))
        units[at] |= offset << 10 | (256 if None in node else 0)
        used.update(at ^ offset ^ label for label in labels)
        for byte, child in node.items():
            if byte is None:
                units[at ^ offset] = 2**31 | child
            else:
                units[at ^ offset ^ byte] = byte
                place(child, at ^ offset ^ byte)

    place(trie, 0)
    packed = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(packed)) + packed + texts


def merges() -> list[tuple[bytes, bytes]]:
    """Return the pairs of byte strings that a byte-level BPE merges, the first first."""
    described = json.loads(train_bpe(CORPUS, 400).to_json())["model"]
    byte_of = {spelled(bytes([byte])): byte for byte in range(256)}
    return [tuple(bytes(byte_of[letter] for letter in part) for part in pair) for pair in described["merges"]]


def ranks() -> dict[bytes, int]:
    """Return byte strings with their ranks, one of which is a word that no merges make."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in merges()), b"quoted"]
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_file() -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks().items())


def tekken_file(reserved: int = 30, pattern: str = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+| ", **keys) -> bytes:
    tokens = ranks()
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in tokens.items()
    ]
    config = {
        **{"pattern": pattern, "num_vocab_tokens": len(tokens), "version": "v3"},
        **{"default_vocab_size": len(tokens) - 5 + reserved, "default_num_special_tokens": reserved},
    }
    return json.dumps({"config": config, "vocab": vocabulary, **keys}).encode()


def gpt2_files() -> tuple[bytes, bytes]:
    pairs = [(spelled(left), spelled(right)) for left, right in merges()]
    letters = [spelled(bytes([byte])) for byte in range(256)]
    tokens = [*letters, *("".join(pair) for pair in pairs), "<|endoftext|>"]
    lines = "\n".join(["#version: 0.2", *map(" ".join, pairs), ""])
    return json.dumps({token: i for i, token in enumerate(tokens)}).encode(), lines.encode()
