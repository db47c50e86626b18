"""The console script ``smart-autocast``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from ._native import KernelTierError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="smart-autocast", description="Mixed precision as a property of the graph."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="what is installed, which kernels run, and why")
    parser.parse_args(arguments)
    try:
        facts = info()
    except KernelTierError as error:
        print(f"smart-autocast: {error}", file=sys.stderr)
        return 1
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
    return 0


def info() -> dict[str, str]:
    """The facts that ``smart-autocast info`` prints, in its order.

    Raises:
        KernelTierError: as ``import autocast_backend.ops`` does.
    """
    import torch

    from .ops import KERNEL_TIER as tier

    built = tier.build_info
    return {
        "smart_autocast": _version("smart_autocast"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} (CUDA: {torch.version.cuda or 'none'})",
        "triton": _version("triton"),
        "backend": _backend_entry_point(),
        "kernel tier": f"{tier.name}: {tier.reason}",
        "native library": str(tier.library or "none"),
        "built with": ", ".join(f"{what} {version}" for what, version in built.items()) or "none",
        "CPU capability": tier.cpu_capability or torch.backends.cpu.get_cpu_capability(),
        "CUDA library": f"{tier.cuda_library or 'none'}: {tier.cuda_reason}",
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backend_entry_point() -> str:
    found = metadata.entry_points(group="torch_dynamo_backends", name="smart_autocast")
    return ", ".join(sorted({entry.value for entry in found})) or (
        "not registered: install the package so that torch.compile finds it by name"
    )


if __name__ == "__main__":
    sys.exit(main())
