"""In which order Inductor runs its kernels."""

from __future__ import annotations

import functools
from typing import Any

from .flags import inductor_right


@functools.cache
def register() -> None:
    """Keep what a kernel has to wait for where its loops are written anew, to be those of another
    one: a write to what it reads (PyTorch #185509, fixed after torch 2.13), and reads of what it
    writes (#177631, fixed by 2.13). So gradients of upsampling and pooling were zeros, as they
    were read before they were added up."""
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    Node: Any = SchedulerNode
    original = Node.recompute_size_and_body

    @functools.wraps(original)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        ordering = [dep for dep in self.read_writes.reads if isinstance(dep, StarDep | WeakDep)]
        original(self, *args, **kwargs)
        if inductor_right.on:
            read_writes = self.read_writes.with_read(type(self.read_writes.reads)(ordering))
            self.set_read_writes(read_writes.rename(self.mutation_renames))

    Node.recompute_size_and_body = recompute_size_and_body
