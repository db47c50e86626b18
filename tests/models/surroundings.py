"""What can stand around a block of a random model: checkpoints, regions, transforms, hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support import DEVICE, HalvesProducts


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
        with torch.autocast(DEVICE, dtype=torch.float16):
            return self.inner(x)


class InBfloat16(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return self.inner(x)


class Uncached(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
            return self.inner(x)


class InFullPrecision(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
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
        with torch.device(DEVICE):
            return self.inner(x) + torch.ones(())


class Recorded(Around):
    def around(self, x: Tensor) -> Tensor:
        with torch.autograd.profiler.record_function("block"):
            return self.inner(x)


class Decorated(Around):
    @torch.autocast(DEVICE, dtype=torch.bfloat16)
    def around(self, x: Tensor) -> Tensor:
        return self.inner(x)


class LowWeights(Around):
    """The block's weights are kept in bfloat16, as in models that are loaded so."""

    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__(inner.bfloat16(), apart)


class WithNumber(Around):
    """A Python number that changes from call to call, as schedules have it."""

    number = 1.0

    def around(self, x: Tensor) -> Tensor:
        return self.inner(x * self.number) / (1 + self.number)


class Clipped(WithNumber):
    """`clamp` takes no tensor for its number here, so PyTorch makes a constant of it."""

    def around(self, x: Tensor) -> Tensor:
        return self.inner(x).clamp(-self.number, 1 + self.number) * self.number


class Interpolated(WithNumber):
    def around(self, x: Tensor) -> Tensor:
        return torch.lerp(self.inner(x).to(x.dtype), x, self.number) + max(self.number, 0.5)


class InMode(Around):
    def around(self, x: Tensor) -> Tensor:
        with HalvesProducts():
            return self.inner(x)


class WithTeacher(Around):
    """A frozen copy of the block, which follows it by writes in the graph."""

    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__(inner, apart)
        self.teacher = copy.deepcopy(inner).requires_grad_(False)

    def around(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                pairs = zip(self.teacher.parameters(), self.inner.parameters(), strict=True)
                for slow, fast in pairs:
                    slow.mul_(0.9).add_(fast.to(slow.dtype), alpha=0.1)
            y = self.teacher(x)
        return self.inner(x) + y


class _Squashed(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 0.5 + w.detach().tanh()


class Parametrized(Around):
    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__(inner, apart)
        for module in [*inner.modules()]:
            if type(module) is nn.Linear:
                parametrize.register_parametrization(module, "weight", _Squashed())


class ByObject(Around):
    """A context that is made once, and entered in each call."""

    def __init__(self, inner: nn.Module, apart: bool) -> None:
        super().__init__(inner, apart)
        self.context = torch.autocast(DEVICE, dtype=torch.bfloat16)

    def around(self, x: Tensor) -> Tensor:
        with self.context:
            return self.inner(x)


class WithTangent(Around):
    def around(self, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(self.inner, (x,), (x * 0.5,))
        return y + tangent


class WithPullback(Around):
    def around(self, x: Tensor) -> Tensor:
        y, pull = torch.func.vjp(self.inner, x)
        return y + pull(torch.ones_like(y))[0]


class Caught(Around):
    """An exception leaves a region."""

    def around(self, x: Tensor) -> Tensor:
        try:
            with torch.autocast(DEVICE, dtype=torch.float16):
                y = self.inner(x)
                if y.shape[0] != 2:
                    raise ValueError("another size")
                return y
        except ValueError:
            return self.inner(x) * 2


class Stashed(Around):
    """What the block gives is left in an attribute."""

    def around(self, x: Tensor) -> Tensor:
        self.left = {"y": self.inner(x), "x": x}
        return self.left["y"] + self.left["x"][:1]


class WrittenOver(Around):
    def around(self, x: Tensor) -> Tensor:
        y = self.inner(x).clone()
        y[:, 0].mul_(0.5)
        y += x
        return y.relu_()


class Expanded(Around):
    def around(self, x: Tensor) -> Tensor:
        return self.inner(x[:1].expand_as(x)) + self.inner(x.flip(1))


class WithPenalty(Around):
    """The block's own parameters are read beside it, without a cast."""

    def around(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        for p in self.inner.parameters():
            y = y + p.square().mean()
        return y


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
    WithNumber: 2,
    Clipped: 2,
    Interpolated: 1,
    InMode: 1,
    WithTeacher: 1,
    Parametrized: 1,
    ByObject: 1,
    WithTangent: 1,
    WithPullback: 1,
    Caught: 1,
    Stashed: 1,
    WrittenOver: 1,
    Expanded: 1,
    WithPenalty: 1,
}
