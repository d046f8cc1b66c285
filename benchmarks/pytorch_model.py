"""A decoder-only Transformer in plain PyTorch, built from a jaxlm model configuration."""

import torch
from torch import nn
from torch.nn import functional as F

from jaxlm.models.config import ModelConfig
from jaxlm.models.norm_config import LayerNormConfig

_ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


class TorchTransformer(nn.Module):
    """A language model: tokens [B, T] and targets [B, T] → mean cross-entropy in nats. All initial weights are small.

    Raises ValueError for options of `model` that it does not implement.
    """

    def __init__(self, model: ModelConfig):
        super().__init__()
        attention = model.attention
        unsupported = {
            "patterns of layers": model.pattern,
            "positions of kind none": model.position.kind == "none",
            "scaled, partial or reversed rotary positions": model.position.kind == "rope"
            and (model.position.scaling or model.position.fraction < 1 or model.position.reversed),
            "qk_norm, scale, soft_cap or window": (
                attention.qk_norm != "none" or attention.scale or attention.soft_cap or attention.window
            ),
            "plus_one": getattr(model.norm, "plus_one", False),
            "norms without a scale, or of embeddings": not model.norm.scale or model.embedding_norm,
            "norms after a layer, or parallel blocks": (
                model.norm_placement != "before" or model.residual != "sequential"
            ),
            "embedding_scale, residual_scale or logit_scale": (
                (model.embedding_scale, model.residual_scale, model.logit_scale) != (1.0, 1.0, 1.0)
            ),
            "logit_soft_cap": model.logit_soft_cap,
            f"activation but {', '.join(_ACTIVATIONS)}": model.feed_forward.activation not in _ACTIVATIONS,
        }
        if missing := [name for name, wanted in unsupported.items() if wanted]:
            raise ValueError(f"the PyTorch model has no {'; no '.join(missing)}")
        self.tokens = nn.Embedding(model.vocab_size, model.d_model)
        learned = model.position.kind == "learned"
        self.positions = nn.Embedding(model.context_length, model.d_model) if learned else None
        self.rope = None if learned else TorchRope(model.position.theta, model.attention.head_dim, model.context_length)
        self.blocks = nn.ModuleList(TorchBlock(model) for _ in range(model.num_layers))
        self.norm = _norm(model)
        self.unembedding = None if model.tied_embeddings else nn.Linear(model.d_model, model.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=model.initializer_std)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.rope)
        x = self.norm(x)
        logits = x @ self.tokens.weight.T if self.unembedding is None else self.unembedding(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchBlock(nn.Module):
    """A pre-norm block of attention and a feed-forward layer on [B, T, D]."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        attention, feed_forward, width = model.attention, model.feed_forward, model.d_model
        self.heads, self.head_dim = (
            (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads),
            attention.head_dim,
        )
        self.activate = _ACTIVATIONS[feed_forward.activation]
        self.norms = nn.ModuleList(_norm(model) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.heads) * self.head_dim, bias=attention.qkv_bias)
        self.out = nn.Linear(attention.num_heads * self.head_dim, width, bias=attention.output_bias)
        self.gate = nn.Linear(width, feed_forward.d_ff, bias=feed_forward.bias) if feed_forward.gated else None
        self.up = nn.Linear(width, feed_forward.d_ff, bias=feed_forward.bias)
        self.down = nn.Linear(feed_forward.d_ff, width, bias=feed_forward.bias)

    def forward(self, x: torch.Tensor, rope: "TorchRope | None") -> torch.Tensor:
        batch, length, _ = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key, value = split.split(self.heads, dim=1)
        if rope is not None:
            query, key = rope(query), rope(key)
        grouped = self.heads[0] != self.heads[1]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norms[1](x)
        up = self.up(normed)
        return x + self.down(self.activate(up) if self.gate is None else self.activate(self.gate(normed)) * up)


class TorchRope(nn.Module):
    """RoPE on [B, N, T, H], half-split as in `jaxlm.models.positions`, computed in float32."""

    def __init__(self, theta: float, head_dim: int, context: int):
        super().__init__()
        frequency = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.arange(context)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def _norm(model: ModelConfig) -> nn.Module:
    if isinstance(model.norm, LayerNormConfig):
        return nn.LayerNorm(model.d_model, eps=model.norm.epsilon, bias=model.norm.bias)
    return nn.RMSNorm(model.d_model, eps=model.norm.epsilon)
