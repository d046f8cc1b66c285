"""Text to batches: sources, tokenizers, token shards on disk, packing, the loader."""
