"""The logical axes of a layer's arrays: names that the sharding rules map to mesh axes."""

Axes = tuple[str | None, ...]

# The residual between blocks, the rows that a block reads with the whole sequence on each device, heads and hidden
# numbers.
RESIDUAL: Axes = ("batch", "residual", "act_embed")
GATHERED: Axes = ("batch", "sequence", "act_embed")
HEADS: Axes = ("batch", "sequence", "act_heads", "act_head_dim")
KV_HEADS: Axes = ("batch", "sequence", "act_kv_heads", "act_head_dim")
HIDDEN: Axes = ("batch", "sequence", "act_feed_forward")
