"""Train a small vision transformer on real handwritten digits in four ways, and compare them.

    python examples/train_digits.py

The data are the 1,797 images that scikit-learn ships. Every row of the table trains the same model
from the same seed on the same batches:

    fp32            eager, without autocast
    autocast        eager, under torch.autocast
    stock           torch.compile(model), called under torch.autocast
    smart_autocast  torch.compile(model, backend="smart_autocast"), called under torch.autocast

The table, with the machine it was made on, goes to OUT/results.json, the loss curves to
OUT/loss.png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cast_counter import CastCounter  # beside this file
from torch import Tensor, nn
from tqdm import tqdm

# --- Data ---


@dataclass(frozen=True)
class Digits:
    """Images: (N, 1, 8, 8), float32 in [0, 1]. Labels: (N,), int64 in 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(device: str, limit: int | None = None) -> Digits:
    """Scikit-learn's digits with a fifth held out: always the same images, as many of each digit.

    `limit` keeps only the first so many training images.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    images, labels = images.to(device), torch.tensor(labels, device=device)
    return Digits(images[train][:limit], labels[train][:limit], images[test], labels[test])


def batches(digits: Digits, size: int, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in random order. A last, smaller batch is dropped: one shape means one compile."""
    permutation = torch.randperm(len(digits.train_labels), generator=order)
    for chosen in permutation.to(digits.train_labels.device).split(size):
        if len(chosen) == size:
            yield digits.train_images[chosen], digits.train_labels[chosen]


# --- Model: nothing in it knows of autocast ---


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """An image is 16 patches of 2x2 pixels; what is classified is the mean over the patches."""

    def __init__(self, dim: int = 64, depth: int = 3, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:  # (batch, 1, 8, 8) -> (batch, classes)
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


# --- Training ---


@dataclass(frozen=True)
class Row:
    """One line of the table: how the model is run."""

    label: str
    autocast: bool = True
    backend: str | None = None  # None: eager

    def compile(self, model: nn.Module, inner: str) -> nn.Module:
        """`inner` makes code of the graph: the same for both compiled rows."""
        if self.backend is None:
            return model
        if self.backend == "stock":
            return torch.compile(model, backend=inner, dynamic=False)
        return torch.compile(model, backend=self.backend, options={"inner": inner}, dynamic=False)


ROWS = {
    "fp32": Row("fp32 eager", autocast=False),
    "autocast": Row("eager autocast"),
    "stock": Row("torch.compile + autocast", backend="stock"),
    "smart_autocast": Row("smart_autocast", backend="smart_autocast"),
}


@dataclass(frozen=True)
class Settings:
    """What all rows share."""

    epochs: int
    batch_size: int
    train_images: int | None  # None: all
    device: str
    dtype: str
    inner: str
    threads: int
    seed: int

    def autocast(self, row: Row) -> torch.autocast:
        return torch.autocast(self.device, getattr(torch, self.dtype), enabled=row.autocast)


@dataclass(frozen=True)
class Result:
    """One line of the table: what came out."""

    label: str
    accuracy: float  # on the held-out images, 0 to 1
    seconds_per_step: float  # the median, without the first step
    casts_per_step: int  # in forward and backward; the optimiser's step apart
    first_step_seconds: float  # compiles forward and backward
    losses: list[float]  # one per step


def train(row: Row, settings: Settings) -> Result:
    """Train one model from scratch, the way that `row` says."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    order = torch.Generator().manual_seed(settings.seed)
    digits = load_digits(settings.device, settings.train_images)
    model = VisionTransformer().to(settings.device)
    compiled = row.compile(model, settings.inner)

    steps = settings.epochs * (len(digits.train_labels) // settings.batch_size)
    if steps < 2:
        raise ValueError(
            f"expected --epochs and --batch-size that make at least 2 training steps; got {steps} "
            f"from {len(digits.train_labels)} images; take more epochs or smaller batches"
        )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    # Gradients underflow in float16 without a scaled loss; bfloat16 has the range of float32.
    scaled = row.autocast and settings.dtype == "float16"
    scaler = torch.amp.GradScaler(settings.device, init_scale=1024, enabled=scaled)

    losses: list[float] = []
    seconds: list[float] = []
    progress = tqdm(total=steps * settings.batch_size, desc=f"{row.label:>24}", unit=" samples")
    for _ in range(settings.epochs):
        for images, labels in batches(digits, settings.batch_size, order):
            start = time.perf_counter()
            with settings.autocast(row):
                loss = F.cross_entropy(compiled(images), labels)
            scaler.scale(loss).backward()  # outside autocast, as PyTorch recommends
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())  # waits for the GPU: the clock is read when work is done
            seconds.append(time.perf_counter() - start)
            progress.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
            progress.update(settings.batch_size)
    progress.close()

    return Result(
        label=row.label,
        accuracy=accuracy(compiled, digits, settings.autocast(row)),
        seconds_per_step=statistics.median(seconds[1:]),
        casts_per_step=casts_per_step(row, settings, digits),
        first_step_seconds=seconds[0],
        losses=losses,
    )


def accuracy(model: nn.Module, digits: Digits, autocast: AbstractContextManager[Any]) -> float:
    """The share of held-out images that `model` gets right."""
    model.eval()
    with torch.no_grad(), autocast:
        predicted = model(digits.test_images).argmax(dim=1)
    return (predicted == digits.test_labels).float().mean().item()


def casts_per_step(row: Row, settings: Settings, digits: Digits) -> int:
    """The casts of one forward and backward, of the graph that `aot_eager` runs op by op."""
    model = VisionTransformer().to(settings.device)
    compiled = row.compile(model, inner="aot_eager")
    images, labels = next(batches(digits, settings.batch_size, torch.Generator()))

    def forward_backward() -> None:
        with settings.autocast(row):
            loss = F.cross_entropy(compiled(images), labels)
        loss.backward()
        model.zero_grad()

    forward_backward()  # compiles
    with CastCounter() as counter:
        forward_backward()
    return counter.casts


def train_in_new_process(row: Row, settings: Settings) -> Result:
    """`train`, in a fresh process with an empty compile cache: every first step is a cold compile,
    and no row finds kernels that the row before it has built."""
    with tempfile.TemporaryDirectory(prefix="train_digits_") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # the new process inherits it
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
            return process.submit(train, row, settings).result()


# --- What the user sees ---


def table(results: list[Result]) -> str:
    lines = [f"{'':24}  held-out accuracy  ms per step  casts per step  first step, s"]
    lines += [
        f"{result.label:24}  {result.accuracy:17.2%}  {1e3 * result.seconds_per_step:11.2f}"
        f"  {result.casts_per_step:14}  {result.first_step_seconds:13.2f}"
        for result in results
    ]
    lines.append(
        "\nStep: median; the first one compiles, with empty caches. Casts: changes of dtype that "
        "are ops of\ntheir own in one forward and backward, counted with inner compiler aot_eager: "
        "Inductor fuses\nthem into its kernels."
    )
    return "\n".join(lines)


def machine(device: str) -> dict[str, str | int | None]:
    """What the times depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def plot_losses(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for result, style in zip(results, ["-", "--", "-.", ":"], strict=False):
        last = (result.losses[max(0, step - 19) : step + 1] for step in range(len(result.losses)))
        axes.plot([statistics.mean(some) for some in last], style, label=result.label)
    axes.set(xlabel="step", ylabel="training loss, mean of the last 20 steps", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--train-images", type=int, help="use only the first so many")
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--inner", default="inductor", help="compiler of the two compiled rows")
    # A model this small gains nothing from more, and would suffer from whatever else is running.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not gpu:
        parser.error("--device cuda: this torch finds no CUDA device; use --device cpu")
    return arguments


def main() -> None:
    arguments = vars(parse_arguments())
    rows, out = arguments.pop("rows"), arguments.pop("out")
    settings = Settings(**arguments)
    facts = machine(settings.device)
    print(", ".join(f"{name} {fact}" for name, fact in facts.items() if fact is not None))

    results = [train_in_new_process(ROWS[row], settings) for row in rows]

    out.mkdir(parents=True, exist_ok=True)
    plot_losses(results, out / "loss.png")
    report = {
        "machine": facts,
        "settings": asdict(settings),
        "rows": {row: asdict(result) for row, result in zip(rows, results, strict=True)},
    }
    (out / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{table(results)}\n\nWritten: {out / 'loss.png'}, {out / 'results.json'}")


if __name__ == "__main__":
    main()
