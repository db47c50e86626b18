"""An inference loop under autocast: what casting each weight once gives, token by token.

A GPT-2-shaped model with float32 weights computes one token at a time (batch 1, no key-value
cache: the weights are what is read). `one context` opens one autocast context around a whole loop,
`context per token` one around each token. The limit is the same model in bfloat16, compiled, where
there is nothing to cast.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.answer import Answer, table
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import Row, Sampler, compare, cuda_sampler, host_sampler, interleave, row_of
from benchmarks.models import GPT

FORMS = ("one context", "context per token")
CACHED = ("ours, scope", "ours, version")


def model_of(quick: bool) -> tuple[GPT, int]:
    """A GPT-2-small-shaped model, or one of a twentieth of it; and its number of words."""
    torch.manual_seed(0)
    words = 4096 if quick else 50257
    layers, width, heads = (4, 256, 4) if quick else (12, 768, 12)
    return GPT(layers, width=width, heads=heads, words=words), words


def candidates(model: nn.Module, *, graphs: bool) -> dict[str, tuple[nn.Module, bool]]:
    """The models by name, and whether they run under autocast; `graphs`: those that are compiled,
    as CUDA graphs."""
    mode = "reduce-overhead" if graphs else None
    low = copy.deepcopy(model).to(torch.bfloat16)
    ours = {
        f"ours, {kept}": torch.compile(
            copy.deepcopy(model),
            backend="smart_autocast",
            options={"weight_cache": kept, "inductor": {"triton.cudagraphs": graphs}},
        )
        for kept in ("scope", "version", "off")
    }
    return {
        "stock": (torch.compile(copy.deepcopy(model), mode=mode), True),
        "control": (torch.compile(copy.deepcopy(model), mode=mode), True),
        "eager": (model, True),
        "limit": (torch.compile(low, mode=mode), False),
        **{name: (compiled, True) for name, compiled in ours.items()},
    }


def loop(
    model: nn.Module, token: Tensor, *, autocast: bool, form: str, tokens: int
) -> Callable[[], None]:
    """A function that computes `tokens` tokens."""

    def context() -> contextlib.AbstractContextManager[object]:
        return torch.autocast(token.device.type, dtype=torch.bfloat16, enabled=autocast)

    def run() -> None:
        whole = context() if form == FORMS[0] else contextlib.nullcontext()
        with torch.no_grad(), whole:
            for _ in range(tokens):
                torch.compiler.cudagraph_mark_step_begin()
                with contextlib.nullcontext() if form == FORMS[0] else context():
                    model(token)

    return run


def measure(
    form: str, *, quick: bool, device: str, graphs: bool, rounds: int, tokens: int, seed: int
) -> tuple[list[Row], int]:
    """Seconds per token of each candidate, against stock; and the number of parameters."""
    model, words = model_of(quick)
    model = model.to(device).eval()
    token = torch.randint(words, (1, 1), device=device)
    sampler: Callable[[Callable[[], None]], Sampler] = (
        cuda_sampler if device == "cuda" else host_sampler
    )
    samplers: dict[str, Sampler] = {}
    for name, (candidate, autocast) in candidates(model, graphs=graphs).items():
        whole = sampler(loop(candidate, token, autocast=autocast, form=form, tokens=tokens))
        samplers[name] = lambda whole=whole: whole() / tokens  # type: ignore[misc]
    samples = interleave(samplers, rounds=rounds, warmup=2, seed=seed)
    return compare(samples, baseline="stock"), sum(p.numel() for p in model.parameters())


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks decode", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parse.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parse.add_argument("--graphs", action="store_true", help="CUDA graphs: mode=reduce-overhead")
    parse.add_argument("--rounds", type=positive_int, help="default: 7, or 5 with --quick")
    parse.add_argument("--tokens", type=positive_int, default=16, help="in one loop")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--out", type=Path, help="folder for decode.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure both forms, judge them and keep the answer."""
    parse = parser()
    flags = parsed(parse, arguments)
    if flags.graphs and flags.device != "cuda":
        parse.error("--graphs: expected --device cuda with it, got --device cpu")
    answer = Answer.to("decode-graphs" if flags.graphs else "decode", flags)
    for form in FORMS:
        torch.compiler.reset()
        rows, parameters = measure(
            form,
            quick=flags.quick,
            device=flags.device,
            graphs=flags.graphs,
            rounds=flags.rounds or (5 if flags.quick else 7),
            tokens=flags.tokens,
            seed=flags.seed,
        )
        answer.add(form, rows, parameters=parameters)
        print(
            f"\n{form}, {parameters / 1e6:.0f} M parameters\n{table(rows, unit='ms')}", flush=True
        )
        judge(form, rows, answer)
        answer.save(flags.out, complete=False)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0


def judge(form: str, rows: list[Row], answer: Answer) -> None:
    """Compare the rows with the targets."""
    limit, stock = (row_of(rows, name).p50 for name in ("limit", "stock"))
    for name in CACHED:
        mine = row_of(rows, name)
        assert mine.ratio is not None  # rows of a comparison with a baseline have one
        if form == FORMS[0]:
            answer.judge(
                f"{form}, {name}: by the limit",
                goal="<= 1.10",
                measured=f"{mine.p50 / limit:.2f}",
                met=mine.p50 <= 1.10 * limit,
            )
            answer.judge(
                f"{form}, {name}: speed by stock's",
                goal=">= 1.35",
                measured=f"{1 / mine.ratio:.2f} (limit: {stock / limit:.2f})",
                met=1 / mine.ratio >= 1.35,
            )
        else:
            control = row_of(rows, "control").ratio
            assert control is not None
            noise = abs(control - 1)
            answer.judge(
                f"{form}, {name}: time by stock's",
                goal=f"<= {1 + noise:.3f} (noise)",
                measured=f"{mine.ratio:.3f}",
                met=mine.ratio <= 1 + noise,
            )
