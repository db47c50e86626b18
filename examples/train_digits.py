"""Train a small vision transformer on real handwritten digits in four ways, and compare them.

    python examples/train_digits.py

The data are the 1,797 images that scikit-learn ships. Every row of the table trains the same model
from the same seed on the same batches, in a process of its own; they take turns, epoch by epoch:

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
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


class Training:
    """One model, trained from scratch the way that `row` says, epoch by epoch."""

    def __init__(self, row: Row, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.row, self.settings = row, settings
        self.order = torch.Generator().manual_seed(settings.seed)
        self.digits = load_digits(settings.device, settings.train_images)
        self.model = VisionTransformer().to(settings.device)
        self.compiled = row.compile(self.model, settings.inner)

        steps = settings.epochs * (len(self.digits.train_labels) // settings.batch_size)
        if steps < 2:
            raise ValueError(
                f"expected --epochs and --batch-size that make at least 2 training steps; got "
                f"{steps} from {len(self.digits.train_labels)} images; take more epochs or smaller "
                "batches"
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=4e-3, total_steps=steps
        )
        # Gradients underflow in float16 without a scaled loss; bfloat16 has the range of float32.
        scaled = row.autocast and settings.dtype == "float16"
        self.scaler = torch.amp.GradScaler(settings.device, init_scale=1024, enabled=scaled)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def epoch(self) -> float:
        """Train one more epoch; the loss of its last step."""
        for images, labels in batches(self.digits, self.settings.batch_size, self.order):
            start = time.perf_counter()
            with self.settings.autocast(self.row):
                loss = F.cross_entropy(self.compiled(images), labels)
            self.scaler.scale(loss).backward()  # outside autocast, as PyTorch recommends
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(loss.item())  # waits for the GPU: the clock is read after the work
            self.seconds.append(time.perf_counter() - start)
        return self.losses[-1]

    def result(self) -> Result:
        return Result(
            label=self.row.label,
            accuracy=accuracy(self.compiled, self.digits, self.settings.autocast(self.row)),
            seconds_per_step=statistics.median(self.seconds[1:]),
            casts_per_step=casts_per_step(self.row, self.settings, self.digits),
            first_step_seconds=self.seconds[0],
            losses=self.losses,
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


# --- Four processes, in turns ---

_training: Training  # of this process


def _begin(row: Row, settings: Settings) -> None:
    global _training
    _training = Training(row, settings)


def _epoch() -> float:
    return _training.epoch()


def _result() -> Result:
    return _training.result()


def train(rows: Sequence[Row], settings: Settings) -> list[Result]:
    """Train each row in a fresh process with an empty compile cache: every first step is a cold
    compile, and no row finds kernels that another has built. The processes take turns, an epoch
    each, so that all rows see the same hours of the machine."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        processes = []
        for row in rows:
            cache = tempfile.TemporaryDirectory(prefix="train_digits_")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(cache)
            process = stack.enter_context(ProcessPoolExecutor(max_workers=1, mp_context=spawn))
            process.submit(_begin, row, settings).result()  # the new process inherits the variable
            processes.append(process)
        progress = tqdm(total=settings.epochs * len(rows), unit=" epochs")
        for _ in range(settings.epochs):
            for row, process in zip(rows, processes, strict=True):
                progress.set_description_str(f"{row.label:>24}")
                loss = process.submit(_epoch).result()
                progress.set_postfix_str(f"loss {loss:.4f}", refresh=False)
                progress.update()
        progress.close()
        return [process.submit(_result).result() for process in processes]


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

    results = train([ROWS[row] for row in rows], settings)

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
