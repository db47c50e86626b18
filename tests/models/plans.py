"""Plans of random models and of their trainings, and how to make a plan that fails smaller."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.support import DEVICE

from .blocks import BLOCKS, BREAKS
from .surroundings import (
    AROUND,
    Around,
    ByObject,
    Caught,
    Checkpointed,
    Decorated,
    Disabled,
    Expanded,
    InBfloat16,
    InFloat16,
    InFullPrecision,
    InMode,
    InPieces,
    OnDevice,
    Reentrantly,
    SelectivelyCheckpointed,
    Stashed,
    Twice,
    Uncached,
    WithGradientPenalty,
    WithPullback,
    WithSavedTensorHooks,
    WithTangent,
)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}
COMPILED = ("model", "in place", "each block", "some blocks", "loss", "forward", "step")
READS_STATE = {  # or the dtype of what autocast computes, which Dynamo knows without the option
    "regions_inside",
    "decorated",
    "state_set_by_hand",
    "asks_the_state",
    "custom_fwd",
    "index_put",
}
# Dynamo makes graphs of their own.
CUT_OFF = {Caught, Disabled, InMode, OnDevice, WithSavedTensorHooks}
OWN_REGIONS = {
    ByObject,
    Caught,
    Decorated,
    Disabled,
    InBfloat16,
    InFloat16,
    InFullPrecision,
    Uncached,
}
# Dynamo refuses a checkpoint that writes to buffers or holds a `cond`. PyTorch refuses saved-tensor
# hooks around `torch.func.grad`, and torch 2.11 all later ones as well, once it has.
CHECKPOINTS = {Checkpointed, SelectivelyCheckpointed, Reentrantly}
NOT_CHECKPOINTED = {"batch_norm", "condition", "counted", "spectral_norm"}
# AOTAutograd draws nothing where nothing reads it (DESIGN.md).
DRAWS = {
    "attention_with_dropout",
    "dropout_in_float32",
    "dropped_features",
    "gumbel",
    "masked_tokens",
    "noise",
    "stochastic_depth",
    "two_samples",
}
TRANSFORMED = {"inner_gradient", WithGradientPenalty, WithPullback, WithTangent}

Block = tuple[str, tuple[type[Around], ...]]
"""What is built, and what stands around it, from the outside in."""

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Plan:
    """A model and its training.

    Attributes:
        blocks: what the model is built of, and what stands around each.
        steps: `("train", sizes of the micro-batches, where backward runs, one context for all)`,
            `("evaluate", sizes, grad mode)`, or a change of weights and a number that picks them.
        residual: whether a block's result is added to what it was given.
        dtype, cache_enabled: of the region.
        ambient: the region is around the calls, not in the model.
        compiled: which part of the training is.
        scaled: by a `GradScaler`.
        backward: the option `backward_pass_autocast`.
        option: the region is the option `autocast`.
        skips: which earlier result each block is given; empty: the last.
        captures: Dynamo traces over numbers and sizes that depend on data.
        hooks: on parameters, on a module, or such as change weights while backward runs.
        noncontiguous: inputs are transposed.
        steady: so many calls have one number, where a block has one that changes.
        memory_budget: how much of what the backward reads the forward may save.
    """

    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    residual: bool = True
    dtype: torch.dtype = torch.bfloat16
    ambient: bool = True
    cache_enabled: bool = True
    compiled: str = "model"
    dynamic: bool | None = None
    optimizer: str = "SGD"
    scaled: bool = False
    input_dtype: torch.dtype = torch.float32
    input_grad: bool = False
    weight_cache: str = "scope"
    inner: str = "aot_eager"
    backward: str = "auto"
    option: bool = False
    skips: tuple[int, ...] = ()
    captures: bool = False
    compiled_autograd: bool = False
    ddp: bool = False
    hooks: str = "none"
    noncontiguous: bool = False
    steady: int = 1
    memory_budget: float = 1.0

    def in_parts(self) -> bool:
        """Whether more than one graph may read what a block is given."""
        return (
            self.hooks == "module"
            or self.compiled in ("each block", "some blocks")
            or any(CUT_OFF & {*around} or name in BREAKS for name, around in self.blocks)
        )

    def region(self) -> dict[str, Any]:
        return {"device_type": DEVICE, "dtype": self.dtype, "cache_enabled": self.cache_enabled}

    def arguments(self) -> dict[str, Any]:
        """Of `torch.compile`."""
        options: dict[str, Any] = {"inner": self.inner, "weight_cache": self.weight_cache}
        if self.option:
            options["autocast"] = self.region()
        options["backward_pass_autocast"] = self.backward
        options["on_backward_autocast_mismatch"] = "do_nothing"
        return {"backend": "smart_autocast", "dynamic": self.dynamic, "options": options}

    def __str__(self) -> str:
        blocks = ", ".join(
            "".join(f"{a.__name__}(" for a in around) + name + ")" * len(around)
            for name, around in self.blocks
        )
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.default is not dataclasses.MISSING and getattr(self, f.name) != f.default
        }
        return f"[{blocks}] {changed} {list(self.steps)}"


def random_plan(seed: int) -> Plan:
    pick = random.Random(seed)
    blocks: list[Block] = []
    for _ in range(pick.randint(1, 4)):
        name = pick.choice([*BLOCKS])
        around = pick.choices(
            [*AROUND], [*AROUND.values()], k=pick.choices((0, 1, 2), (5, 4, 2))[0]
        )
        never = CHECKPOINTS if name in NOT_CHECKPOINTED else set()
        if TRANSFORMED & {name, *around}:
            never = CHECKPOINTS | {WithSavedTensorHooks}
        never = never | {Twice, InPieces, Expanded} if name in BREAKS else never
        never = never | {Caught} if name in DRAWS else never
        blocks.append((name, tuple(a for a in around if a not in never)))
    if pick.random() < 0.1:  # all with the code of one, where each is compiled
        blocks = [blocks[0]] * pick.randint(2, 4)
    sizes = [(pick.randint(1, 4), pick.randint(2, 6)) for _ in range(pick.choice([1, 1, 2, 3]))]
    steps: list[Step] = []
    for _ in range(pick.randint(1, 4)):
        kind = pick.choices(
            ["train", "evaluate", "freeze", "write", "load", "low", "assign", "average"],
            (24, 9, 3, 3, 3, 1, 1, 2),
        )[0]
        if kind == "train":
            micro = pick.choice([1, 1, 1, 2, 3])
            where = pick.choices(
                ["inside", "outside", "in a region", "other dtype", "twice", "grad"],
                (8, 8, 4, 1, 1, 1),
            )[0]
            shared = pick.random() < 0.5  # one context for all micro-batches, or one for each
            steps.append((kind, [pick.choice(sizes) for _ in range(micro)], where, shared))
        elif kind == "evaluate":
            mode = pick.choice(["no_grad", "inference", "grad"])
            steps.append((kind, [pick.choice(sizes) for _ in range(pick.choice([1, 2]))], mode))
        else:
            steps.append((kind, pick.randrange(8)))
    if not any(kind in ("train", "evaluate") for kind, *_ in steps):
        steps.append(("train", [sizes[0]], "outside", False))
    dtype = pick.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    return put_right(
        Plan(
            tuple(blocks),
            tuple(steps),
            residual=pick.random() < 0.7,
            dtype=dtype,
            ambient=pick.random() < 0.6,
            cache_enabled=pick.random() < 0.85,
            compiled=pick.choices(COMPILED, weights=(6, 2, 2, 2, 3, 1, 2))[0],
            dynamic=pick.choice([None, None, None, False, True]),
            optimizer=pick.choice([*OPTIMIZERS]),
            scaled=dtype is torch.float16 and pick.random() < 0.5,
            input_dtype=pick.choices([torch.float32, torch.bfloat16, torch.float64], (40, 6, 1))[0],
            input_grad=pick.random() < 0.3,
            weight_cache=pick.choices(["scope", "version", "off"], (6, 3, 1))[0],
            backward=pick.choices(["auto", "same_as_forward", "off"], (6, 1, 1))[0],
            option=pick.random() < 0.15,
            skips=tuple(pick.randrange(8) for _ in blocks) if pick.random() < 0.2 else (),
            captures=pick.random() < 0.15,
            compiled_autograd=pick.random() < 0.1,
            ddp=pick.random() < 0.1,
            hooks=pick.choices(["none", "post accumulate", "parameter", "module"], (8, 1, 1, 1))[0],
            noncontiguous=pick.random() < 0.15,
            steady=pick.choice([1, 2, 3]),
            memory_budget=pick.choices([1.0, 0.5, 0.05, 0.0], (12, 1, 1, 1))[0],
        )
    )


def put_right(plan: Plan) -> Plan:
    """Take off what cannot be had together, or has no oracle."""
    changed: dict[str, Any] = {}
    names = {name for name, _ in plan.blocks}
    around = {a for _, around in plan.blocks for a in around}
    whole = plan.compiled in ("model", "in place", "forward") and plan.ambient
    whole = whole and not around & OWN_REGIONS and not names & READS_STATE
    # Outside of regions, where Dynamo traces with the option, these may not mix dtypes.
    unmixed = {n for n in names if n.startswith("conv")} | {"ensemble"} & names
    mixes = plan.input_dtype is not torch.float32 and unmixed
    if not whole or names & BREAKS or mixes or not plan.cache_enabled:
        changed |= {"option": False}
    if not whole or names & BREAKS or plan.compiled_autograd:
        changed |= {"backward": "auto"}
    if plan.compiled != "step":
        changed |= {"compiled_autograd": False}
    # AOTAutograd gives zeros to the parameters of what only leaves something; and a checkpoint of
    # what does is left to Python, where the option does not apply.
    if Stashed in around:
        changed |= {"skips": (), "option": False}
    if names & DRAWS:
        changed |= {"skips": ()}
    # AOTAutograd multiplies in another way in there, or copies gradients first (DESIGN.md).
    if "condition" in names or (InFullPrecision in around and plan.in_parts()):
        changed |= {"noncontiguous": False}
    changed |= {"blocks": tuple(map(_not_differentiated_twice, plan.blocks))}
    kinds = {kind for kind, *_ in plan.steps}
    if plan.compiled != "model" or "freeze" in kinds or "low" in kinds or "assign" in kinds:
        changed |= {"ddp": False}
    wheres = {step[2] for step in plan.steps if step[0] == "train"}
    if "twice" in wheres or "grad" in wheres or len(plan.steps) > 2:
        changed |= {"ddp": False}
    return dataclasses.replace(plan, **changed)


def _not_differentiated_twice(block: Block) -> Block:
    """A layer norm of what is in a lower precision has other last bits then (DESIGN.md)."""
    name, around = block
    if name == "layer_norm":
        around = tuple(a for a in around if a not in (WithGradientPenalty, WithPullback))
    return name, around


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less, or one thing as it is by default."""
    for i in range(len(plan.blocks)):
        if len(plan.blocks) > 1:
            yield dataclasses.replace(plan, blocks=plan.blocks[:i] + plan.blocks[i + 1 :])
    for i in range(len(plan.steps)):
        if len(plan.steps) > 1:
            yield dataclasses.replace(plan, steps=plan.steps[:i] + plan.steps[i + 1 :])
    for f in dataclasses.fields(plan):
        if f.default is not dataclasses.MISSING and getattr(plan, f.name) != f.default:
            yield dataclasses.replace(plan, **{f.name: f.default})
    for i, (name, around) in enumerate(plan.blocks):
        others: list[Block] = [(name, around[:k] + around[k + 1 :]) for k in range(len(around))]
        others += [("one_linear", around)] if name != "one_linear" else []
        for other in others:
            yield dataclasses.replace(plan, blocks=(*plan.blocks[:i], other, *plan.blocks[i + 1 :]))
    for i, (kind, *arguments) in enumerate(plan.steps):
        if kind in ("train", "evaluate"):
            sizes, *more = arguments
            for fewer in ([sizes[0]], [sizes[0]] * len(sizes), [(2, 3)] * len(sizes)):
                if fewer != sizes:
                    step = (kind, fewer, *more)
                    yield dataclasses.replace(
                        plan, steps=(*plan.steps[:i], step, *plan.steps[i + 1 :])
                    )
            if kind == "train" and more != ["outside", False]:
                step = (kind, sizes, "outside", False)
                yield dataclasses.replace(plan, steps=(*plan.steps[:i], step, *plan.steps[i + 1 :]))


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """A smallest plan that still fails."""
    for candidate in smaller(plan):
        if fails(candidate):
            return shrunk(candidate, fails)
    return plan
