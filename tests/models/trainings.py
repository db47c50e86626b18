"""Playing a plan: a model is trained as it says, and what comes out is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import DEVICE

from .blocks import BLOCKS, SIZE
from .plans import OPTIMIZERS, Block, Plan
from .surroundings import Around, WithNumber

Compile = Callable[[Any], Any]
"""What stands for `torch.compile`; for the oracle, what gives its argument back."""

Computed = list[tuple[str, Tensor | None]]
"""Names and values, in the order in which they were computed."""


def _built(block: Block, apart: bool) -> nn.Module:
    name, around = block
    module = BLOCKS[name]()
    for outer in reversed(around or (Around,)):
        module = outer(module, apart)
    return module


class Model(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        apart = bool(plan.skips) or plan.in_parts()
        self.blocks = nn.ModuleList(_built(block, apart) for block in plan.blocks)
        self.residual = plan.residual
        self.region = None if plan.ambient else plan.region()
        self.skips = plan.skips

    def forward(self, x: Tensor) -> Tensor:
        if self.region is None:
            return self.run(x)
        with torch.autocast(**self.region):
            return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        seen = [x]
        for i, part in enumerate(self.blocks):
            x = seen[-1]
            given = seen[self.skips[i] % len(seen)] if self.skips else x
            y = part(given)
            seen.append((x + y).clamp(-8, 8) if self.residual else y.clamp(-8, 8))
        return seen[-1]


def _loss(model: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), target)


class Training:
    """A training by a plan: `computed` has outputs, gradients, and at last parameters and buffers.

    `compile`: `torch.compile` with its arguments, or, for the oracle, what gives its argument back.
    """

    def __init__(self, plan: Plan, compile: Compile, *, oracle: bool) -> None:
        self.plan = plan
        self.oracle = oracle
        self.computed: Computed = []
        torch.manual_seed(0)
        self.model = model = Model(plan).to(DEVICE)
        self.parameters = [*model.parameters()]
        if plan.hooks == "post accumulate":
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(_written_at_once)
        elif plan.hooks == "parameter":
            for p in self.parameters[::2]:
                p.register_hook(lambda grad: grad if grad is None else grad * 0.5)
        elif plan.hooks == "module":
            model.blocks[0].register_full_backward_hook(
                lambda module, inputs, outputs: tuple(g if g is None else g * 0.5 for g in inputs)
            )
        self.optimizer = OPTIMIZERS[plan.optimizer](self.parameters)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, enabled=plan.scaled)
        self.generator = torch.Generator().manual_seed(1)
        self.batches = 0
        self.run: Any = model
        if plan.ddp:
            self.run = DistributedDataParallel(
                model, find_unused_parameters=True, bucket_cap_mb=0.0003
            )
        self.loss: Any = _loss
        self.step: Any = self.forward_backward
        if plan.compiled == "model":
            self.run = compile(self.run)
        elif plan.compiled == "in place":
            model.forward = compile(model.forward)
        elif plan.compiled in ("each block", "some blocks"):
            for i in range(0, len(model.blocks), 1 if plan.compiled == "each block" else 2):
                model.blocks[i] = compile(model.blocks[i])
        elif plan.compiled == "forward":
            run = self.run
            self.run = compile(lambda x: run(x))
        elif plan.compiled == "loss":
            self.loss = compile(_loss)
        elif plan.compiled == "step":
            self.step = compile(self.forward_backward)

    def context(self) -> Any:
        """The ambient region, which the backend may have been given as an option."""
        if self.plan.ambient and (self.oracle or not self.plan.option):
            return torch.autocast(**self.plan.region())
        return contextlib.nullcontext()

    def backward_context(self, where: str) -> Any:
        pinned = {"same_as_forward": "in a region", "off": "outside"}
        if self.oracle:
            where = pinned.get(self.plan.backward, where)
        if where in ("in a region", "other dtype"):
            other = self.plan.dtype if where == "in a region" else torch.float16
            return torch.autocast(DEVICE, dtype=other)
        return contextlib.nullcontext()

    def forward_backward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with self.context():
            y = self.run(x)
            value = F.mse_loss(y.float(), target)
        self.scaler.scale(value).backward()
        return y.detach(), value.detach()

    def batch(self, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        plan = self.plan
        self.batches += 1
        for module in self.model.modules():
            if isinstance(module, WithNumber):
                module.number = 1.0 / (1 + self.batches // plan.steady)
        x = torch.randn(*size, SIZE, generator=self.generator).to(DEVICE, plan.input_dtype)
        if plan.noncontiguous:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        target = torch.randn(*size, SIZE, generator=self.generator).to(DEVICE)
        return x.requires_grad_(plan.input_grad), target

    def backward(self, value: Tensor, where: str) -> None:
        if not value.requires_grad:
            return
        value = self.scaler.scale(value)
        if where == "grad":
            wanted = [p for p in self.parameters if p.requires_grad]
            grads = torch.autograd.grad(value, wanted, allow_unused=True)
            self.computed.extend(("grad", g) for g in grads)
            return
        if where == "twice":
            with self.backward_context("in a region"):
                value.backward(retain_graph=True)
            where = "outside"
        with self.backward_context(where):
            value.backward()
        self.forget_casts()

    def forget_casts(self) -> None:
        """Eager's cache does not see that hooks write to weights; ours does."""
        if self.plan.hooks == "post accumulate":
            torch.clear_autocast_cache()

    def train(self, sizes: list[tuple[int, int]], where: str, shared: bool) -> None:
        plan, computed = self.plan, self.computed
        self.model.train()
        inputs = []
        inside = where == "inside" and not plan.option
        with self.context() if shared and not plan.option else contextlib.nullcontext():
            for size in sizes:
                x, target = self.batch(size)
                inputs.append(x)
                if plan.compiled == "step":
                    computed.extend(zip(("output", "loss"), self.step(x, target), strict=True))
                    self.forget_casts()
                    continue
                with self.context():
                    if plan.compiled == "loss":
                        value = self.loss(self.model, x, target)
                    else:
                        y = self.run(x)
                        computed.append(("output", y.detach().clone()))
                        value = F.mse_loss(y.float(), target)
                    computed.append(("loss", value.detach().clone()))
                    if inside:
                        self.backward(value, where)
                if not inside:
                    self.backward(value, where)
        computed.extend(("input.grad", x.grad) for x in inputs)
        for name, p in self.model.named_parameters():
            computed.append((f"{name}.grad", None if p.grad is None else p.grad.clone()))
        if any(p.grad is not None for p in self.parameters):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def evaluate(self, sizes: list[tuple[int, int]], mode: str) -> None:
        self.model.eval()
        modes = {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "grad": contextlib.nullcontext,
        }
        with modes[mode](), self.context():
            for size in sizes:
                x = self.batch(size)[0].detach()
                if self.plan.compiled == "loss":
                    y = self.loss(self.model, x, torch.zeros_like(x))
                else:
                    y = self.run(x)
                self.computed.append((f"evaluated, {mode}", y.detach().clone()))

    def change(self, kind: str, number: int) -> None:
        """What happens to weights between steps."""
        if not self.parameters:
            return
        chosen = self.parameters[number % len(self.parameters)]
        part = self.model.blocks[number % len(self.model.blocks)]
        if kind == "freeze":
            chosen.requires_grad_(not chosen.requires_grad)
        elif kind == "write":
            with torch.no_grad():
                chosen.mul_(1.25)
        elif kind == "load":
            state = {name: t * 0.75 for name, t in self.model.state_dict().items()}
            self.model.load_state_dict(state)
        elif kind == "low":
            part.bfloat16()
        elif kind == "assign":
            state = {name: t * 0.75 for name, t in self.model.state_dict().items()}
            self.model.load_state_dict(state, assign=True)
        elif kind == "average":
            average = torch.optim.swa_utils.AveragedModel(self.model)
            average.update_parameters(self.model)
            x, _ = self.batch((2, 3))
            region = (
                torch.autocast(**self.plan.region())
                if self.plan.ambient
                else contextlib.nullcontext()
            )
            with torch.no_grad(), region:  # what is compiled is not copied
                self.computed.append(("average", average.module(x)))

    def play(self) -> Computed:
        for kind, *arguments in self.plan.steps:
            if kind == "train":
                self.train(*arguments)
            elif kind == "evaluate":
                self.evaluate(*arguments)
            else:
                self.change(kind, *arguments)
        for name, t in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.computed.append((name, t.detach().clone()))
        return self.computed


def _written_at_once(p: Tensor) -> None:
    if p.grad is not None:  # AOTAutograd calls hooks of weights that nothing depends on, too
        with torch.no_grad():
            p.add_(p.grad.to(p.dtype), alpha=-0.01)


def difference(actual: Computed, expected: Computed) -> str | None:
    """The first result that has another dtype, or other bits."""
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    for i, ((name, a), (_, e)) in enumerate(zip(actual, expected, strict=True)):
        if a is None or e is None:
            if a is not e and not _zeros(a, e):
                return f"{i}: {name}: {'None' if a is None else 'a tensor'}, and not in eager mode"
        elif a.dtype != e.dtype or a.shape != e.shape:
            return f"{i}: {name}: {a.dtype} {[*a.shape]} instead of {e.dtype} {[*e.shape]}"
        elif not torch.allclose(a, e, rtol=0, atol=0, equal_nan=True):
            return f"{i}: {name}: differs by {(a.double() - e.double()).abs().max():.3g}"
    return None


def _zeros(*either: Tensor | None) -> bool:
    """Where a gradient is None in eager mode, AOTAutograd may give zeros (docs/weights.md)."""
    return all(t is None or not t.count_nonzero() for t in either)
