"""Which GPUs the CUDA library has kernels for, by the architectures that it was built for.

A GPU runs machine code that is for its own major capability, and not for a later minor one; PTX,
which the driver compiles, for any capability up to its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Capability = tuple[int, int]

EMBEDDED: frozenset[Capability] = frozenset({(7, 2), (8, 7), (10, 1)})
"""GPUs that run no machine code but their own, and whose own no other runs
(`torch.cuda.DEVICE_REQUIREMENT` in PyTorch 2.11)."""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device of this process."""

    index: int
    name: str
    capability: Capability

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.name}, {_dotted(self.capability)})"


@dataclass(frozen=True)
class Architecture:
    """One that the library was built for, such as 9.0+PTX."""

    capability: Capability
    feature: str
    """``"a"``: for this capability alone; ``"f"``: for this and later ones of its major number."""
    ptx: bool

    @classmethod
    def parse(cls, name: str) -> Architecture:
        """Of CMake's spelling, as in `build_info`: 80-real, 90, 90a-real, 100f."""
        match = re.fullmatch(r"(\d+)(\d)([af]?)(-real)?", name)
        if match is None:
            raise ValueError(f"expected an architecture such as 80-real or 90, got {name!r}")
        return cls((int(match[1]), int(match[2])), match[3], match[4] is None)

    def __str__(self) -> str:
        return f"{_dotted(self.capability)}{self.feature}{'+PTX' if self.ptx else ''}"

    def runs_on(self, capability: Capability) -> bool:
        if self.feature == "a" or capability == self.capability:
            return capability == self.capability
        if self.feature == "" and self.ptx and capability > self.capability:
            return True
        apart = not EMBEDDED.isdisjoint({capability, self.capability})
        later = capability > self.capability and capability[0] == self.capability[0]
        return later and not apart


def visible_gpus() -> list[Gpu]:
    """The devices of this process; this initialises CUDA."""
    return [
        Gpu(i, torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    ]


def problem_with(built_for: str, gpus: Sequence[Gpu]) -> str | None:
    """Why a CUDA library cannot be the one of this process, and the remedy; None where it can.

    Args:
        built_for: its architectures, as in `build_info`: "80-real 90".
        gpus: the process's devices. It has to run on all of them.
    """
    architectures = [Architecture.parse(name) for name in built_for.split()]
    left_out = [gpu for gpu in gpus if not any(a.runs_on(gpu.capability) for a in architectures)]
    if not left_out:
        return None
    needed = ";".join(map(_dotted, sorted({gpu.capability for gpu in gpus})))
    return (
        f"the CUDA library is built for {';'.join(map(str, architectures))} and does not run on "
        f"{', '.join(map(str, left_out))}; build it with TORCH_CUDA_ARCH_LIST='{needed}', or hide "
        "such GPUs from this process (CUDA_VISIBLE_DEVICES)"
    )


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
