"""Facts about the machine, written beside every number."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import autocast_backend
from autocast_backend._native import TIER_VARIABLE

_ROOT = Path(__file__).resolve().parent.parent


def cpu_model() -> str:
    """The CPU's name as the operating system gives it, e.g. `AMD EPYC 9554 64-Core Processor`; with
    its family where a virtual machine hides the number: `AMD EPYC family 25`."""
    cpuinfo = Path("/proc/cpuinfo")
    other = platform.processor() or platform.machine()
    if not cpuinfo.exists():
        return other
    found = dict(re.findall(r"^(model name|cpu family)\s*:\s*(.+)$", cpuinfo.read_text(), re.M))
    name = found.get("model name", other).strip()
    if re.search(r"\d", name) or "cpu family" not in found:
        return name
    return f"{name} family {found['cpu family'].strip()}"


def usable_cores() -> int:
    """Cores this process may run on; fewer than the machine has inside most containers."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Runnable processes over the last minute: how busy the machine is, others included."""
    return round(os.getloadavg()[0], 2)


def _output(*command: str) -> str | None:
    """First line of a command's output, or None where the command is missing or fails."""
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def git_revision() -> str | None:
    """Short commit id, with `+changes` where tracked files differ from it; None outside git."""
    revision = _output("git", "rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return revision + ("+changes" if changed else "")


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def gpu_facts() -> dict[str, object] | None:
    """Name, compute capability, memory, driver and CUDA version of GPU 0; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def machine_facts() -> dict[str, object]:
    """Everything a reader needs to judge or repeat a number, as JSON-ready values."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu_facts(),
        "os": platform.platform(),
        "compiler": _output(os.environ.get("CXX", "c++"), "--version"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "revision": git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": load_average(),
    }


def kernel_tier(device: str) -> str:
    """The tier of the kernels that ops of this package have on "cpu" or "cuda", and why that one.

    Raises:
        RuntimeError: it is not the one that SMART_AUTOCAST_KERNELS names: numbers would stand under
            a wrong name. Forced CUDA kernels that were not built are plain PyTorch's otherwise.
    """
    if device == "cuda":
        torch.cuda.init()  # Whether the tier runs on these GPUs is seen then.
    tier = autocast_backend.kernels().devices[device]
    wanted = os.environ.get(TIER_VARIABLE) or tier.name
    if tier.name != wanted:
        raise RuntimeError(
            f"benchmarks: expected {wanted} kernels on {device}, as {TIER_VARIABLE} has it, got "
            f"{tier}; build the libraries (`make cuda`), or unset {TIER_VARIABLE}"
        )
    return str(tier)


def machine_slug(device: str = "cpu") -> str:
    """Folder name for this machine's results: the GPU's name, or the CPU's with its instruction
    set, as PyTorch names it, and its cores.
    """
    if device == "cuda":
        return _slug(torch.cuda.get_device_name(0))
    capability = torch.backends.cpu.get_cpu_capability()
    return _slug(f"{cpu_model()} {capability} {usable_cores()} cores")


def _slug(name: str) -> str:
    noise = r"\((r|tm)\)|\b(cpu|processor|\d+-core)\b|@.*?hz"
    plain = re.sub(noise, " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
