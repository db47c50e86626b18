"""Models to compile: an MLP, a small vision transformer and a GPT-2-like language model.

Each comes in two forms: `ambient` (autocast around the call) and `in_graph` (an autocast region
inside the model's own forward, which Dynamo captures into the graph).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FORMS = ("ambient", "in_graph")


class Block(nn.Module):
    """A pre-norm transformer block, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ViT(nn.Module):
    """Images (batch, 3, 32, 32) to class logits (batch, 10), in patches of 8 by 8."""

    def __init__(self, layers: int, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class GPT(nn.Module):
    """Tokens (batch, length) to next-token logits (batch, length, words), with tied embeddings."""

    def __init__(
        self, layers: int, width: int = 128, heads: int = 4, length: int = 64, words: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Autocasting(nn.Module):
    """Opens an autocast region inside its own forward: the `in_graph` form of a model."""

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.device, self.dtype = model, device, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=self.dtype):
            return self.model(x)


def mlp(layers: int) -> tuple[nn.Module, Tensor]:
    """`layers` times Linear, GELU and LayerNorm of width 256, on a batch of 32."""
    stack: list[nn.Module] = []
    for _ in range(layers):
        stack += [nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)]
    return nn.Sequential(*stack), torch.randn(32, 256)


def vit(layers: int) -> tuple[nn.Module, Tensor]:
    """A `ViT` and a batch of 8 images."""
    return ViT(layers), torch.randn(8, 3, 32, 32)


def gpt(layers: int) -> tuple[nn.Module, Tensor]:
    """A `GPT` and a batch of 4 sequences."""
    return GPT(layers), torch.randint(1024, (4, 64))


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "vit": vit, "gpt": gpt}


def build(
    name: str, form: str, *, layers: int, device: str, dtype: torch.dtype
) -> tuple[nn.Module, Tensor]:
    """The model `name` in one of `FORMS`, with an input for it, both on `device`; seeded."""
    torch.manual_seed(0)
    model, x = MODELS[name](layers)
    if form == "in_graph":
        model = Autocasting(model, device, dtype)
    return model.to(device), x.to(device)
