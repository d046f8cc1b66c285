"""How many logits are held."""

# Logits held at a time: 1 GiB in float32. At 128256 labels that is 2048 tokens. Each chunk reads and writes the float32
# sum of the unembedding's gradient, 8 bytes for 6 · C FLOPs: fewer tokens would wait for memory.
LOGITS = 2**28

# Fewer than these are best all held for the backward pass: 64 MiB in float32.
WORTHWHILE = 2**24


_TILE = 128  # rows of a tile of a product

# Rows of a whole number of these are read and written 16 bytes at a time, in any dtype, and multiplied without being
# copied first: GPT-2's 50257 labels are neither.
_ALIGNED = 64


def padded(vocabulary: int) -> int:
    """Labels of which logits are made, those besides from zeros: they count for nothing."""
    return -(-vocabulary // _ALIGNED) * _ALIGNED


def chunk(tokens: int, vocabulary: int) -> tuple[int, int]:
    """(chunks, tokens in each): as few as there can be, all alike and of whole tiles. The last may need padding."""
    most = max(LOGITS // vocabulary, 1)
    if tokens <= most:
        return 1, max(tokens, 1)
    tile = _TILE if most >= _TILE else 1
    chunks = -(-tokens // (most // tile * tile))
    return chunks, -(-tokens // (chunks * tile)) * tile
