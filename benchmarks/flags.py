"""What the flags of all questions have in common: their numbers, and whether there is a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch


def positive_int(text: str) -> int:
    """The type of a flag that counts something, of which there is one at the least."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return number


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a question that measures on `--device`; exits with 2 where they cannot be."""
    flags = parser.parse_args(arguments)
    check_device(parser, flags.device)
    return flags


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Exits with 2, and the reason, where the device is "cuda" and there is none."""
    reason = no_cuda() if device == "cuda" else None
    if reason is not None:
        parser.error(f"argument --device: {reason}")


def no_cuda() -> str | None:
    """Why nothing can be measured on a GPU here, or None."""
    if torch.cuda.is_available():
        return None
    return (
        f"expected a CUDA device, got none: torch {torch.__version__}, built for CUDA "
        f"{torch.version.cuda}, sees no GPU; run this where there is an NVIDIA GPU and a "
        "torch built with CUDA"
    )
