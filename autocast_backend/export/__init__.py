"""Exported programs without dtypes.

program = torch.export.export(model, inputs)     # autocast regions: wrap_with_autocast
lowered = autocast_backend.export.lower(program) # none left: smart casts
torch.export.save(lowered, "lowered.pt2")
autocast_backend.export.module(lowered)          # runs for any floating-point dtype
"""

from __future__ import annotations

from .program import lower, lower_with_report
from .unguarded import module

__all__ = ["lower", "lower_with_report", "module"]
