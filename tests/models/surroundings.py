"""What can stand around a block of a random model: checkpoints, regions, transforms, hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Around(nn.Module):
    """A block and what stands around it.

    Args:
        apart: the block reads its input in one place. A gradient that several graphs add to is a
            sum of what each adds up by itself, and in eager mode of all in order.
    """

    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__()
        self.inner = inner
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x * 1 if self.apart else x)

    def around(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Checkpointed(Around):
    def around(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _products_saved() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


class SelectivelyCheckpointed(Around):
    def around(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=_products_saved)


class InFloat16(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.inner(x)


class InBfloat16(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


class Uncached(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return self.inner(x)


class InFullPrecision(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class Untracked(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.inner(x)
        return x + y


class Disabled(Around):
    @torch.compiler.disable
    def around(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Twice(Around):
    def around(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


class NestedRegion(Around):
    @torch.compiler.nested_compile_region
    def around(self, x: Tensor) -> Tensor:
        return self.inner(x)


class WithSavedTensorHooks(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            return self.inner(x)


class Mapped(Around):
    def around(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.inner(row.unsqueeze(0)).squeeze(0))(x)


class WithHooks(Around):
    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__(inner, apart)
        inner.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        inner.register_forward_hook(lambda module, args, output: output + args[0])


class Reentrantly(Around):
    def around(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class WithComputedWeights(Around):
    """As with averaged or adapted weights: what the block reads are no leaves."""

    def around(self, x: Tensor) -> Tensor:
        weights = {name: p * 0.9 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


class InPieces(Around):
    def around(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(piece) for piece in x.split(2)])


class WithGradientPenalty(Around):
    """A second result that is a gradient, of one `torch.func` transform."""

    def around(self, x: Tensor) -> Tensor:
        def energy(t: Tensor) -> Tensor:
            return self.inner(t).float().square().mean()

        return torch.func.grad(energy)(x) + x


class OnDevice(Around):
    """Inside of a `TorchFunctionMode`."""

    def around(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return self.inner(x) + torch.ones(())


class Recorded(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autograd.profiler.record_function("block"):
            return self.inner(x)


class Decorated(Around):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def around(self, x: Tensor) -> Tensor:
        return self.inner(x)


class LowWeights(Around):
    """The block's weights are kept in bfloat16, as in models that are loaded so."""

    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__(inner.bfloat16(), apart)


AROUND: dict[type[Around], int] = {  # how often
    Checkpointed: 4,
    SelectivelyCheckpointed: 2,
    Reentrantly: 1,
    InFloat16: 2,
    InBfloat16: 2,
    Uncached: 1,
    InFullPrecision: 2,
    Decorated: 1,
    Untracked: 1,
    Disabled: 2,
    Twice: 3,
    NestedRegion: 2,
    WithSavedTensorHooks: 1,
    Mapped: 1,
    WithComputedWeights: 1,
    InPieces: 1,
    WithGradientPenalty: 1,
    OnDevice: 1,
    Recorded: 1,
    WithHooks: 2,
    LowWeights: 1,
}
