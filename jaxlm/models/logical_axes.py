"""The logical axes of a layer's arrays: names that the sharding rules map to mesh axes."""

Axes = tuple[str | None, ...]

# The residual between blocks; the rows that a block computes with; heads of their queries, keys and values; keys and
# values as attention reads them, whose sequence has an axis of its own; hidden numbers; latents of the residual's
# tokens, a key that all heads share, and the state of a recurrence, a matrix for each head, without its sequences.
RESIDUAL: Axes = ("batch", "residual", "act_embed")
GATHERED: Axes = ("batch", "sequence", "act_embed")
HEADS: Axes = ("batch", "sequence", "act_heads", "act_head_dim")
KV_HEADS: Axes = ("batch", "sequence", "act_kv_heads", "act_head_dim")
KEYS: Axes = ("batch", "key_sequence", "act_kv_heads", "act_head_dim")
# Tokens of a group of devices that share out the experts, and hidden numbers of the rows of each of these devices; and
# hidden numbers of rows that were sent to the devices of their experts.
EXPERT_TOKENS: Axes = ("expert_batch", "sequence", "act_embed")
EXPERT_HIDDEN: Axes = ("expert_batch", "act_experts", "sequence", "act_feed_forward")
SENT_HIDDEN: Axes = ("batch", None, "sequence", "act_feed_forward")
HIDDEN: Axes = ("batch", "sequence", "act_feed_forward")
LATENT: Axes = ("batch", "residual", "act_latent")
SHARED_KEY: Axes = ("batch", "sequence", None, "act_head_dim")
HEAD_STATE: Axes = ("act_heads", "act_head_dim", None)
# The rows of an engine's step after which it draws tokens.
DRAWS: Axes = ("draws", "residual", "act_embed")
