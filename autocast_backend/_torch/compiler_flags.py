"""What Inductor tells the C++ compiler."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

_APART = "-fno-tree-slp-vectorize"


@functools.cache
def register() -> None:
    """Have GCC leave straight-line code of kernels that transpose as it is. GCC 12.2 at -O3 makes
    a wrong function of `transpose_mxn` for bfloat16 and float16 with AVX-512, of which a kernel
    with three transposed tensors has one (`x @ weight.t()`, three times with gradients): nearly all
    numbers are wrong, stock's too.

    For all of the process, so that kernels from Inductor's cache and stock's are right as well.
    """
    from torch._inductor import codecache, cpp_builder

    Cache: Any = codecache.CppCodeCache
    original = Cache.load_async.__func__

    def load_async(
        cls: Any,
        /,
        main_code: str,
        device_type: str = "cpu",
        submit_fn: Any = None,
        extra_flags: Sequence[str] = (),
        optimized_code: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if "transpose_mxn<" in main_code + (optimized_code or "") and cpp_builder.is_gcc():
            extra_flags = (*extra_flags, _APART)
        return original(
            cls, main_code, device_type, submit_fn, extra_flags, optimized_code, **kwargs
        )

    Cache.load_async = classmethod(load_async)

    table: Any = codecache
    precompile = table._precompile_header

    def _precompile_header(header: str, line: str, **command: Any) -> Any:
        """That of other kernels: headers are compiled without these flags, and would be twice."""
        flags = command.get("extra_flags", ())
        if _APART in flags:
            line = line.replace(_APART, "")
            command["extra_flags"] = tuple(f for f in flags if f != _APART)
        return precompile(header, line, **command)

    table._precompile_header = _precompile_header
