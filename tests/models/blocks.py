"""Blocks that random models are built of: modules from (batch, sequence, `SIZE`) to the same shape.

Each does one thing that autocast, Dynamo, AOTAutograd or the lowering treats in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support import DEVICE

SIZE = 8
HEADS = 2

BLOCKS: dict[str, type[nn.Module]] = {}
BREAKS: set[str] = set()

Made = tuple[int, ...] | Tensor | Callable[[], nn.Module]
Forward = Callable[[Any, Tensor], Tensor]


def block(*, breaks: bool = False, **parts: Made) -> Callable[[Forward], Forward]:
    """Make the function the `forward` of a block with these parts: parameters, by their shapes,
    buffers, and modules, by what makes them. (A class for each: Dynamo keeps code by the code of
    `forward`.)"""

    def register(forward: Forward) -> Forward:
        def __init__(self: Any) -> None:
            nn.Module.__init__(self)
            for name, made in parts.items():
                if isinstance(made, Tensor):
                    self.register_buffer(name, made.clone())
                elif isinstance(made, tuple):
                    setattr(self, name, nn.Parameter(torch.randn(made) / math.sqrt(SIZE)))
                else:
                    setattr(self, name, made())

        name = forward.__name__
        BLOCKS[name] = type(name, (nn.Module,), {"__init__": __init__, "forward": forward})
        if breaks:
            BREAKS.add(name)
        return forward

    return register


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


# Matrix products, and the ops that autocast runs in lower precision.


@block(proj=linear)
def one_linear(self: Any, x: Tensor) -> Tensor:
    return self.proj(x)


@block(w=(SIZE, SIZE))
def matmul(self: Any, x: Tensor) -> Tensor:
    return (x @ self.w).sin()


@block(w=(SIZE, SIZE))
def transposed_twice(self: Any, x: Tensor) -> Tensor:
    return (x @ self.w.t()).relu() @ self.w


@block(up=lambda: nn.Linear(SIZE, 16), down=lambda: nn.Linear(16, SIZE))
def mlp(self: Any, x: Tensor) -> Tensor:
    return self.down(F.gelu(self.up(x)))


@block(up=lambda: nn.Linear(SIZE, 16, bias=False), down=linear)
def swiglu(self: Any, x: Tensor) -> Tensor:
    a, b = self.up(x).chunk(2, dim=-1)
    return self.down(F.silu(a) * b)


@block(w=(3, SIZE, SIZE))
def experts_by_bmm(self: Any, x: Tensor) -> Tensor:
    flat = x.reshape(1, -1, SIZE).expand(3, -1, -1)
    return torch.bmm(flat, self.w).mean(0).view(x.shape)


@block(w=(SIZE, SIZE), b=(SIZE,))
def addmm(self: Any, x: Tensor) -> Tensor:
    return torch.addmm(self.b, x.reshape(-1, SIZE), self.w).view_as(x)


@block(w=(SIZE, 2, 4), v=(2, 4, SIZE))
def einsum(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("bthk,hkd->btd", torch.einsum("btd,dhk->bthk", x, self.w).tanh(), self.v)


@block(w=(SIZE, SIZE), v=(SIZE, SIZE))
def multi_dot(self: Any, x: Tensor) -> Tensor:
    return torch.linalg.multi_dot([x.reshape(-1, SIZE), self.w, self.v]).view_as(x)


@block(w=(2, 4, SIZE))
def tensordot(self: Any, x: Tensor) -> Tensor:
    return torch.tensordot(x.unflatten(-1, (2, 4)), self.w, dims=2)


@block(conv=lambda: nn.Conv1d(SIZE, SIZE, 3, padding=1))
def conv1d(self: Any, x: Tensor) -> Tensor:
    return self.conv(x.transpose(1, 2)).transpose(1, 2)


@block(conv=lambda: nn.Conv1d(SIZE, SIZE, 3, padding=1, padding_mode="reflect", groups=2))
def conv1d_reflect(self: Any, x: Tensor) -> Tensor:
    return self.conv(x.transpose(1, 2)).transpose(1, 2)


@block(conv=lambda: nn.Conv2d(1, 1, 3, padding="same", bias=False))
def conv2d(self: Any, x: Tensor) -> Tensor:
    return self.conv(x.unsqueeze(1)).squeeze(1)


@block(conv=lambda: nn.ConvTranspose1d(SIZE, SIZE, 3, padding=1))
def conv_transpose(self: Any, x: Tensor) -> Tensor:
    return self.conv(x.transpose(1, 2)).transpose(1, 2).contiguous()


@block(bilinear=lambda: nn.Bilinear(SIZE, SIZE, SIZE, bias=False))
def bilinear(self: Any, x: Tensor) -> Tensor:
    return self.bilinear(x, x.sin())


@block(weight=(SIZE,))
def prelu(self: Any, x: Tensor) -> Tensor:
    return F.prelu(x.transpose(1, 2), self.weight).transpose(1, 2)


# Float32 ops, promotions, and their mixtures.


@block(norm=lambda: nn.LayerNorm(SIZE), proj=linear)
def layer_norm(self: Any, x: Tensor) -> Tensor:
    return self.proj(self.norm(x))


@block(weight=(SIZE,), proj=linear)
def rms_norm(self: Any, x: Tensor) -> Tensor:
    return self.proj(F.rms_norm(x, (SIZE,), self.weight, 1e-5))


@block(weight=(SIZE,), proj=linear)
def handmade_rms_norm(self: Any, x: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.proj(self.weight * wide.to(x.dtype))


@block(norm=lambda: nn.GroupNorm(2, SIZE))
def group_norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(x.transpose(1, 2)).transpose(1, 2)


@block(norm=lambda: nn.BatchNorm1d(SIZE), proj=linear)
def batch_norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.proj(x).flatten(0, 1)).view(x.shape)


@block(proj=linear)
def softmax(self: Any, x: Tensor) -> Tensor:
    return self.proj(x).softmax(-1) * x


@block(proj=linear)
def sums_and_powers(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return (y.exp().clamp(max=4) + y.pow(2).sum(-1, keepdim=True).sqrt()).log1p()


@block(proj=linear)
def cumulative(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return y.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).view(-1, 1)


@block(proj=linear)
def promoted(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return torch.cat([torch.addcmul(x, y, y), torch.stack([x, y], 0).amax(0)], -1)[..., ::2]


@block(proj=linear)
def distances(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return (
        torch.cdist(x.float(), y.float()).mean(-1, keepdim=True)
        * F.cosine_similarity(x, y, dim=-1).unsqueeze(-1)
        + x
    )


@block(proj=linear)
def casts_by_hand(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x.to(torch.bfloat16)).float()
    return self.proj(y.half()).type_as(x)


@block(w=(SIZE, SIZE))
def weight_also_uncast(self: Any, x: Tensor) -> Tensor:
    return x @ self.w + self.w.square().sum()


@block(w=(SIZE, SIZE), v=(SIZE, SIZE))
def weight_computed(self: Any, x: Tensor) -> Tensor:
    return x @ (self.w + 0.1 * self.v @ self.w)


@block(w=(2 * SIZE, SIZE))
def views_of_a_weight(self: Any, x: Tensor) -> Tensor:
    first, second = self.w.chunk(2)
    return F.linear(F.linear(x, first), second) + F.linear(x, self.w[SIZE // 2 : SIZE // 2 + SIZE])


@block(proj=linear)
def losses_inside(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    scale = F.mse_loss(y, x) + F.smooth_l1_loss(y, x) + F.l1_loss(y, x.detach())
    return y * scale + F.cross_entropy(
        y.flatten(0, 1), torch.zeros_like(y[..., 0]).long().flatten()
    )


# Attention and recurrences.


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, SIZE // HEADS)).transpose(-3, -2)


@block(qkv=lambda: nn.Linear(SIZE, 3 * SIZE), out=linear)
def attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
    return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


@block(qkv=lambda: nn.Linear(SIZE, 3 * SIZE), out=linear)
def causal_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.out(y.transpose(-3, -2).flatten(-2))


@block(qkv=lambda: nn.Linear(SIZE, 3 * SIZE), out=linear)
def handmade_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
    scores = (q @ k.transpose(-2, -1)) / 2
    length = x.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return self.out(
        (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v).transpose(-3, -2).flatten(-2)
    )


@block(q=linear, k=linear)
def rotary(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * torch.tensor(
            [1.0, 0.1, 0.01, 0.001], device=x.device
        )
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q, k = self.q(x), self.k(x)

    def turned(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return t * cos + torch.cat((-b, a), -1) * sin

    return turned(q) * turned(k)


@block(mha=lambda: nn.MultiheadAttention(SIZE, HEADS, batch_first=True))
def multihead(self: Any, x: Tensor) -> Tensor:
    return self.mha(x, x, x, need_weights=False)[0]


@block(layer=lambda: nn.TransformerEncoderLayer(SIZE, HEADS, 16, dropout=0.0, batch_first=True))
def encoder_layer(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)


@block(layer=lambda: nn.TransformerDecoderLayer(SIZE, HEADS, 16, dropout=0.0, batch_first=True))
def decoder_layer(self: Any, x: Tensor) -> Tensor:
    return self.layer(x, x.sin())


@block(cell=lambda: nn.GRUCell(SIZE, SIZE))
def gru_cell(self: Any, x: Tensor) -> Tensor:
    h, steps = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        h = self.cell(step, h)
        steps.append(h)
    return torch.stack(steps, 1)


@block(cell=lambda: nn.LSTMCell(SIZE, SIZE))
def lstm_cell(self: Any, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1)[:3]:
        state = self.cell(step, state)
    assert state is not None
    return x + state[0].unsqueeze(1)


@block(gru=lambda: nn.GRU(SIZE, SIZE, batch_first=True), breaks=True)
def gru(self: Any, x: Tensor) -> Tensor:
    return self.gru(x)[0]


@block(w=(SIZE, SIZE), u=(SIZE, SIZE))
def handmade_recurrence(self: Any, x: Tensor) -> Tensor:
    h, steps = torch.zeros(x.shape[0], SIZE, device=x.device), []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ self.w + h @ self.u)
        steps.append(h)
    return torch.stack(steps, 1)


@block(query=linear, key=linear, value=linear, rate=lambda: nn.Linear(SIZE, 1))
def delta_rule(self: Any, x: Tensor) -> Tensor:
    key, rate = F.normalize(self.key(x).float(), dim=-1), self.rate(x).sigmoid()
    query, value = self.query(x), self.value(x)
    state, read = x.new_zeros(len(x), SIZE, SIZE), []
    for t in range(x.shape[1]):
        error = value[:, t] - torch.einsum("bde,bd->be", state, key[:, t])
        state = state + torch.einsum("bd,be->bde", key[:, t], rate[:, t] * error)
        read.append(torch.einsum("bde,bd->be", state, query[:, t]))
    return torch.stack(read, 1)


@block(forget=linear, proj=linear)
def associative(self: Any, x: Tensor) -> Tensor:
    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    pair = (self.forget(x).sigmoid().float(), self.proj(x).float())
    return associative_scan(combine, pair, dim=1, combine_mode="generic")[1].contiguous()


# Values that are looked up, written to, masked, or random.


@block(table=lambda: nn.Embedding(16, SIZE), proj=linear)
def embedding(self: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device) % 16
    return self.proj(self.table(places)) + x


@block(bag=lambda: nn.EmbeddingBag(16, SIZE, mode="mean"), proj=linear)
def embedding_bag(self: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1] * 2, device=x.device).view(-1, 2) % 16
    return x + self.bag(places)


@block(table=(16, SIZE))
def tied(self: Any, x: Tensor) -> Tensor:
    logits = F.linear(x, self.table)
    return F.embedding(logits.argmax(-1), self.table) + logits.softmax(-1) @ self.table


@block(proj=linear)
def written_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    y = y.mul(2)
    y[..., 0] = x[..., 0]
    y.add_(x).clamp_(-3, 3)
    return y


@block(proj=linear)
def scattered(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    index = torch.arange(SIZE, device=x.device).flip(0).expand(y.shape)
    return torch.zeros_like(y).scatter_add(-1, index, y) + y.gather(-1, index)


@block(proj=linear)
def index_put(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    out = torch.zeros_like(x)
    out[:, 0] = y[:, 0].float()
    return torch.where(x > 0, out.to(y.dtype), y)


@block(proj=linear, bag=lambda: nn.EmbeddingBag(SIZE, SIZE, mode="sum"))
def weighted_bag(self: Any, x: Tensor) -> Tensor:
    weights = self.proj(x).reshape(-1, SIZE).float().softmax(-1)
    places = torch.arange(SIZE, device=x.device).expand(weights.shape)
    return self.bag(places, per_sample_weights=weights).view_as(x)


@block(proj=linear, codes=(16, SIZE))
def vector_quantized(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x).float()
    nearest = torch.cdist(y.reshape(-1, SIZE), self.codes).argmin(-1)
    codes = self.codes[nearest].view_as(y)
    return y + (codes - y).detach() + (codes - y.detach()) ** 2 / 8


@block(gate=lambda: nn.Linear(SIZE, 2), up=linear, down=linear)
def dense_experts(self: Any, x: Tensor) -> Tensor:
    weight, chosen = self.gate(x).softmax(-1).topk(1)
    each = torch.stack([self.up(x), self.down(x)], -2)
    picked = each.gather(-2, chosen.unsqueeze(-1).expand(*x.shape[:-1], 1, SIZE)).squeeze(-2)
    return weight * picked


@block(gate=lambda: nn.Linear(SIZE, 2), up=linear, down=linear, breaks=True)
def sparse_experts(self: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, SIZE)
    chosen = self.gate(flat).argmax(-1)
    out = torch.zeros_like(flat)
    for i, expert in enumerate((self.up, self.down)):
        (where,) = (chosen == i).nonzero(as_tuple=True)
        out.index_add_(0, where, expert(flat[where]).to(out.dtype))
    return out.view_as(x)


@block(proj=lambda: parametrizations.spectral_norm(linear()))
def spectral_norm(self: Any, x: Tensor) -> Tensor:
    return self.proj(x)


@block(proj=linear, calls=torch.zeros(()), mean=torch.zeros(SIZE))
def counted(self: Any, x: Tensor) -> Tensor:
    self.calls.add_(1)
    self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
    return self.proj(x - self.mean) * self.calls.clamp(max=2)


@block(proj=linear, drop=lambda: nn.Dropout(0.25))
def dropout_in_float32(self: Any, x: Tensor) -> Tensor:
    return self.proj(self.drop(x.float()))


@block(proj=linear)
def noise(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return y * (1 + torch.randn_like(y) / 8) + torch.randn_like(y) / 8


@block(up=linear, down=linear)
def stochastic_depth(self: Any, x: Tensor) -> Tensor:
    for layer in (self.up, self.down):
        kept = torch.zeros(len(x), 1, 1, device=x.device).uniform_() < 0.5
        x = x + layer(x) * kept * 2
    return x


@block(mean=linear, spread=linear)
def two_samples(self: Any, x: Tensor) -> Tensor:
    mean, spread = self.mean(x), (self.spread(x) / 2).exp()
    first, second = (mean + spread * torch.randn_like(spread) for _ in range(2))
    return first * second.sigmoid()


@block(proj=linear, codes=(SIZE, SIZE))
def gumbel(self: Any, x: Tensor) -> Tensor:
    logits = self.proj(x)
    soft, hard = F.gumbel_softmax(logits), F.gumbel_softmax(logits, tau=0.5, hard=True)
    return (soft + hard) @ self.codes


@block(proj=linear, unseen=(SIZE,))
def masked_tokens(self: Any, x: Tensor) -> Tensor:
    order = torch.rand(x.shape[:2], device=x.device).argsort(1)
    hidden = (order >= (x.shape[1] + 1) // 2).unsqueeze(-1)
    return self.proj(torch.where(hidden, self.unseen, x))


@block(proj=linear)
def dropped_features(self: Any, x: Tensor) -> Tensor:
    y = F.dropout1d(self.proj(x), 0.5)
    return F.alpha_dropout(F.dropout(y, 0.3), 0.5, training=True)


@block(attention=lambda: nn.MultiheadAttention(SIZE, HEADS, dropout=0.3, batch_first=True))
def attention_with_dropout(self: Any, x: Tensor) -> Tensor:
    return self.attention(x, x, x, need_weights=False)[0]


@block(proj=linear)
def complex_numbers(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x).float()
    z = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * z.conj()).flatten(-2)


@block(proj=linear)
def fourier(self: Any, x: Tensor) -> Tensor:
    y = torch.fft.rfft(self.proj(x).float(), dim=-1)
    return torch.fft.irfft(y, n=SIZE, dim=-1)


@block(proj=linear)
def interpolated(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x).transpose(1, 2)
    return F.avg_pool1d(F.interpolate(y, scale_factor=2.0), 2).transpose(1, 2)


@block(theta=(2, 3))
def grid_sampled(self: Any, x: Tensor) -> Tensor:
    grid = F.affine_grid(self.theta.expand(x.shape[0], 2, 3), [x.shape[0], 1, *x.shape[1:]])
    return F.grid_sample(x.unsqueeze(1).float(), grid.float(), align_corners=False).squeeze(1)


@block(w=(SIZE, SIZE))
def in_double(self: Any, x: Tensor) -> Tensor:
    return (x.double() @ self.w.double()).to(x.dtype) + x @ self.w


# Parametrized weights, and modules that pack theirs.


def weight_normed() -> nn.Module:
    return parametrizations.weight_norm(linear())


@block(proj=weight_normed)
def weight_norm(self: Any, x: Tensor) -> Tensor:
    return self.proj(x)


@block(proj=linear, a=(SIZE, 2), b=(2, SIZE))
def lora(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.proj.weight.detach(), self.proj.bias) + (x @ self.a) @ self.b


@block(scale=(), proj=linear)
def scalar_parameter(self: Any, x: Tensor) -> Tensor:
    return self.proj(x) * self.scale.sigmoid() + self.scale


# Functions of torch.func, higher-order ops, autograd functions and custom ops.


@block(w=(SIZE, SIZE))
def vmapped(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row @ self.w)(x)


@block(w=(3, SIZE, SIZE))
def ensemble(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda w: (x @ w).tanh())(self.w).mean(0)


@block(w=(SIZE, SIZE))
def inner_gradient(self: Any, x: Tensor) -> Tensor:
    def energy(row: Tensor) -> Tensor:
        return (row @ self.w).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(x)


@block(w=(SIZE, SIZE))
def tangents(self: Any, x: Tensor) -> Tensor:
    y, dy = torch.func.jvp(lambda t: (t @ self.w).sin(), (x,), (torch.ones_like(x),))
    return y + dy


@block(net=lambda: nn.Sequential(linear(), nn.Tanh(), linear()))
def functional_call(self: Any, x: Tensor) -> Tensor:
    parameters = {name: p * 0.9 for name, p in self.net.named_parameters()}
    return torch.func.functional_call(self.net, parameters, (x,))


@block(a=linear, b=linear)
def condition(self: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: self.a(t).sin(), lambda t: self.b(t).cos(), (x,))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().clamp(max=9)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 2 * x * (x.square() < 9)


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=DEVICE)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type=DEVICE)
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        flat = x.flatten(0, -2)
        return (grad @ w.t().to(grad.dtype)).to(x.dtype), (
            flat.t().to(grad.dtype) @ grad.flatten(0, -2)
        ).to(w.dtype)


@block(proj=linear)
def autograd_function(self: Any, x: Tensor) -> Tensor:
    return Squared.apply(self.proj(x))


@block(w=(SIZE, SIZE))
def custom_fwd(self: Any, x: Tensor) -> Tensor:
    return Product.apply(x, self.w)


@torch.library.custom_op("smart_autocast_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w * 0.5


@scaled.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x * w)


def _saved(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return (grad * w * 0.5).to(x.dtype), (grad * x).sum((0, 1)).to(w.dtype) * 0.5


scaled.register_autograd(_gradients, setup_context=_saved)


@torch.library.custom_op("smart_autocast_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x * 0.5


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, grad: grad * 0.5)
torch.library.register_autocast("smart_autocast_tests::halved", DEVICE, torch.bfloat16)


@block(w=(SIZE,), proj=linear)
def custom_op(self: Any, x: Tensor) -> Tensor:
    return scaled(self.proj(x), self.w)


@block(proj=linear)
def custom_op_with_rule(self: Any, x: Tensor) -> Tensor:
    return halved(x) + halved(self.proj(x).float())


@block(w=(SIZE, SIZE))
def scanned(self: Any, x: Tensor) -> Tensor:
    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = (row + h @ self.w).float().tanh()
        return h, h.clone()

    start = torch.zeros(x.shape[0], SIZE, device=x.device)
    return scan(step, start, x.float(), dim=1)[1].transpose(0, 1)


@block(w=(SIZE, SIZE))
def looped(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        _, y = while_loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, (y @ self.w).float().tanh()),
            (torch.zeros((), dtype=torch.int64, device=x.device), x.float()),
        )
    return y + x


@block(a=linear, b=linear)
def solved(self: Any, x: Tensor) -> Tensor:
    m = self.a(x).float()
    gram = m.transpose(-1, -2) @ m
    eye = torch.eye(SIZE, device=x.device)
    return torch.linalg.solve(gram.float() + eye, self.b(x).float().transpose(-1, -2)).transpose(
        -1, -2
    )


@block(proj=linear)
def folded(self: Any, x: Tensor) -> Tensor:
    y = F.unfold(self.proj(x).unsqueeze(1), (1, 2), stride=(1, 2))
    return F.fold(y, x.shape[1:], (1, 2), stride=(1, 2)).squeeze(1)


@block(proj=linear)
def pooled(self: Any, x: Tensor) -> Tensor:
    y, where = F.max_pool1d(self.proj(x), 2, return_indices=True)
    return F.max_unpool1d(y, where, 2) + F.adaptive_avg_pool1d(x, 2).repeat_interleave(4, -1)


@block(proj=linear)
def more_losses(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    a = F.binary_cross_entropy_with_logits(y, x.sigmoid().detach())
    b = F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean")
    alike = torch.ones(x.shape[1], device=x.device)
    c = F.huber_loss(y, x) + F.cosine_embedding_loss(y[0], x[0], alike)
    return y * (a + b + c)


@block(inner=lambda: nn.Sequential(linear(), nn.GELU(), linear()))
def checkpoints_nested(self: Any, x: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return checkpoint(self.inner[0], t, use_reentrant=False).sin()

    return checkpoint(lambda t: self.inner[2](inner(t)), x, use_reentrant=False)


@block(proj=linear)
def decorated(self: Any, x: Tensor) -> Tensor:
    @torch.autocast(DEVICE, dtype=torch.bfloat16)
    def inner(t: Tensor) -> Tensor:
        return self.proj(t)

    return inner(x).float()


@block(proj=linear)
def gradients_on(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.sin()
        with torch.enable_grad():
            z = self.proj(x + y)
    return z


@block(proj=linear)
def state_set_by_hand(self: Any, x: Tensor) -> Tensor:
    before = torch.is_autocast_enabled(DEVICE)
    with torch.autocast(DEVICE, enabled=before):
        y = self.proj(x)
    return y.float()


@block(proj=linear)
def aliases(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    z = y.view(-1)
    z.mul_(0.5)
    return y.detach() + z.view_as(y)


@block(proj=linear)
def hooked(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return y.sin()


@block(proj=linear)
def stop_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = self.proj(x)
    return self.proj(x) - target.sigmoid()


@block(proj=linear)
def straight_through(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return y + (y.round() - y).detach()


@block(first=linear, second=linear, breaks=True)
def graph_break(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    torch._dynamo.graph_break()
    return self.second(y.relu())


@block(proj=linear, breaks=True)
def reads_a_number(self: Any, x: Tensor) -> Tensor:
    y = self.proj(x)
    return y * 2 if y.float().sum().item() > 0 else y.sin()


@block(proj=linear)
def asks_the_state(self: Any, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(DEVICE):
        x = x.to(torch.get_autocast_dtype(DEVICE))
    return self.proj(x.to(self.proj.weight.dtype) if not torch.is_autocast_enabled(DEVICE) else x)


@block(first=linear, second=linear)
def regions_inside(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = self.first(x)
    with torch.autocast(DEVICE, enabled=False):
        z = self.second(y.float()).sin()
    with torch.autocast(DEVICE, dtype=torch.float16):
        return self.first(z).float()
