"""Small language models in the styles in which people write them, without a word of this
project."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# those of own_gpt, whose rows they read
WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS = 32, 4, 64, 12, 4


# As in nanoGPT: everything packed in c_attn, modules in a ModuleDict, learned positions, tied
# embedding and head.


class PackedAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = heads, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class NanoBlock(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = PackedAttention(heads)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        blocks = nn.ModuleList(NanoBlock(heads) for _ in range(LAYERS))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": blocks,
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


# As in minGPT: separate key, query and value, a masked softmax written out, a Sequential of blocks.


class MaskedAttention(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer(
            "mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        )
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        k, q, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).contiguous().flatten(2))


class MinBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = MaskedAttention()
        self.mlp = nn.ModuleDict(
            {
                "fc": nn.Linear(WIDTH, 4 * WIDTH),
                "proj": nn.Linear(4 * WIDTH, WIDTH),
                "act": nn.ReLU(),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp["proj"](self.mlp["act"](self.mlp["fc"](self.ln2(x))))


class MinGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(MinBlock() for _ in range(LAYERS)))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        return self.head(self.ln_f(self.blocks(self.tok_emb(idx) + self.pos_emb(positions))))


class RawPositions(MinGPT):
    """Learned positions as a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_emb = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))  # type: ignore[assignment]

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(
            self.ln_f(self.blocks(self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1]]))
        )  # type: ignore[index]


# As in lit-gpt: query, key and value of each key group next to each other, rotary positions, RMS
# norms, gated MLPs.


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, ..., length, width)."""
    half = x.shape[-1] // 2
    angle = torch.outer(
        torch.arange(x.shape[-2], dtype=x.dtype),
        100.0 ** -(torch.arange(half, dtype=x.dtype) / half),
    )
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


class GroupedAttention(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.head_size, self.n_query_groups, self.q_per_kv = WIDTH // HEADS, groups, HEADS // groups
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * groups) * self.head_size)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = (
            self.attn(x)
            .view(batch, length, self.n_query_groups, self.q_per_kv + 2, self.head_size)
            .permute(0, 2, 3, 1, 4)
        )
        q, k, v = qkv.split((self.q_per_kv, 1, 1), dim=2)
        q, k, v = (
            rotated(q).flatten(1, 2),
            rotated(k).expand_as(q).flatten(1, 2),
            v.expand_as(q).flatten(1, 2),
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class GatedMLP(nn.Module):
    """Gate and up in separate layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
        self.proj = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class FusedMLP(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = (
            nn.Linear(WIDTH, 128, bias=False),
            nn.Linear(64, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LitBlock(nn.Module):
    def __init__(self, groups: int, mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn, self.mlp = GroupedAttention(groups), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm_1(x)) + x
        return self.mlp(self.norm_2(x)) + x


class LitGPT(nn.Module):
    def __init__(self, groups: int = 2, mlp: Callable[[], nn.Module] = GatedMLP) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        blocks = nn.ModuleList(LitBlock(groups, mlp) for _ in range(LAYERS))
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": blocks, "ln_f": nn.RMSNorm(WIDTH)}
        )

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


# As in x-transformers: attention and feed-forward are layers of one list, one key head for all
# queries, norms of queries and keys.


class OneKeyHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, width = HEADS, WIDTH // HEADS
        self.to_q, self.to_kv = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 2 * width, bias=False),
        )
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        scores = torch.einsum("bhid,bjd->bhij", q, k) * k.shape[-1] ** -0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, torch.finfo(scores.dtype).min).softmax(-1)
        return self.to_out(torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Residual(make()) for _ in range(LAYERS // 2) for make in (OneKeyHead, FeedForward)
        )
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)


class Scaled(nn.Module):
    """An embedding of positions that is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.scale = nn.Embedding(LENGTH, WIDTH), WIDTH**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.emb(torch.arange(x.shape[1], device=x.device)) * self.scale


class XTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(VOCABULARY, WIDTH), Scaled()
        self.attn_layers, self.to_logits = Decoder(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_logits(self.attn_layers(self.token_emb(x) + self.pos_emb(x)))


class LooseLayers(XTransformer):
    """Blocks that are lists of modules, and logits from the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_layers.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), OneKeyHead(), FeedForward()]) for _ in range(LAYERS)
        )
        del self.to_logits

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token_emb(x) + self.pos_emb(x)
        for norm, attention, feed_forward in self.attn_layers.layers:  # type: ignore[misc]
            hidden = hidden + attention(norm(hidden))
            hidden = hidden + feed_forward(norm(hidden))
        return self.attn_layers.final_norm(hidden) @ self.token_emb.weight.t()


# What cannot be split over two ranks, or not by a plan.


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2's in Transformers."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) * 0.02),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


def with_conv1d() -> NanoGPT:
    model = NanoGPT()
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        block.attn.c_attn, block.attn.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
    return model


class PackedOneKey(nn.Module):
    """Queries of all heads and their one key and value in one layer, as in StarCoder."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = (
            nn.Linear(WIDTH, WIDTH + 2 * WIDTH // HEADS),
            nn.Linear(WIDTH, WIDTH),
        )
        self.num_heads, self.head_width = HEADS, WIDTH // HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(
            (self.num_heads * self.head_width, self.head_width, self.head_width), dim=-1
        )
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (part[:, None].expand(-1, self.num_heads, -1, -1) for part in (k, v))
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class FixedSlopes(MaskedAttention):
    """A bias with an entry for each head of the whole model (ALiBi), in a buffer."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).view(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        k, q, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        distance = torch.arange(length).view(1, -1) - torch.arange(length).view(-1, 1)
        scores = q @ k.transpose(-2, -1) + self.slopes[: q.shape[1]] * distance
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class NormBetween(nn.Module):
    """An MLP with a norm over the whole row between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


def with_attention(make: Callable[[], nn.Module]) -> NanoGPT:
    model = NanoGPT()
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        block.attn = make()
    return model


def with_mlp(make: Callable[[], nn.Module]) -> NanoGPT:
    model = NanoGPT()
    for block in model.transformer["h"]:  # type: ignore[union-attr]
        block.mlp = make()
    return model
