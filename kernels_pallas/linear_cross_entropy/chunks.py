"""The chunk size: the number of tokens whose logits are in memory at a time."""

# Logits in memory at a time: 1 GiB in float32, 2048 tokens at 128256 labels. Each chunk reads and writes the float32
# sum of the unembedding's gradient, 8 bytes for 6 · C FLOPs: with fewer tokens it would wait for memory.
LOGITS = 2**28

# Fewer logits than these are best all saved for the backward pass: 64 MiB in float32.
WORTHWHILE = 2**24


_TILE = 128  # rows of a tile of a product

# Rows that are a multiple of this length are read and written 16 bytes at a time, in any dtype, and multiplied without
# being copied first. GPT-2's 50257 labels allow neither.
_ALIGNED = 64


def padded(vocabulary: int) -> int:
    """Return the padded vocabulary size. Padding has zero weights and does not contribute to the loss."""
    return -(-vocabulary // _ALIGNED) * _ALIGNED


def chunk(tokens: int, vocabulary: int) -> tuple[int, int]:
    """Return (chunks, tokens in each): the fewest chunks, of equal size and whole tiles. The last may need padding."""
    most = max(LOGITS // vocabulary, 1)
    if tokens <= most:
        return 1, max(tokens, 1)
    tile = _TILE if most >= _TILE else 1
    chunks = -(-tokens // (most // tile * tile))
    return chunks, -(-tokens // (chunks * tile)) * tile
