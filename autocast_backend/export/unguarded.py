"""`module`: a program's module without the checks of floating-point dtypes."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ..graphs import recompile
from .checks import floating_point_checks, without_dtype


def module(exported_program: ExportedProgram) -> fx.GraphModule:
    """`exported_program.module()` without the checks of floating-point dtypes.

    `torch.export` fixes the dtypes it was given: "Tensor dtype mismatch!". A lowered program needs
    none of them - its smart casts ask the tensors they get. So where one floating-point dtype was
    expected, any is; integer, boolean and complex dtypes, devices, layouts and sizes are checked
    as before.

    Args:
        exported_program: a program that `lower` returned, or one loaded from its file. Another
            program is taken too, and then computes in whatever dtypes its ops make of the inputs.

    Returns:
        A module of its own: `module(program).to(torch.bfloat16)` leaves the program as it is. Its
        parameters share their memory with the program's until then.

    Raises:
        TypeError: not an exported program.
    """
    if not isinstance(exported_program, ExportedProgram):
        raise TypeError(
            "exported_program: expected a torch.export.ExportedProgram, as "
            f"autocast_backend.export.lower returns; got {type(exported_program).__name__}. Of a "
            "model, it is lower(torch.export.export(model, inputs))"
        )
    unguarded = exported_program.module()
    assert isinstance(unguarded, fx.GraphModule)
    for check in floating_point_checks(unguarded):
        with check.graph.inserting_before(check):
            check.graph.call_function(check_floating_point, (check.args[0],))
        without_dtype(check)
    recompile(unguarded)
    _own_parameters(unguarded)
    return unguarded


def check_floating_point(tensor: torch.Tensor) -> None:
    """What is left of a check for one floating-point dtype."""
    if not tensor.dtype.is_floating_point:
        raise RuntimeError(
            "Tensor dtype mismatch! Expected: a floating-point dtype, as in the inputs the program "
            f"was exported with, Got: {tensor.dtype}"
        )


def _own_parameters(unguarded: nn.Module) -> None:
    """Give the module parameters of its own: `Module.to` changes them in place."""
    own: dict[nn.Parameter, nn.Parameter] = {}
    for path, parameter in unguarded.named_parameters(remove_duplicate=False):
        if parameter not in own:
            own[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        owner, _, name = path.rpartition(".")
        setattr(unguarded.get_submodule(owner), name, own[parameter])
