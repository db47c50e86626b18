"""`torch.export`: programs whose graph is another one."""

from __future__ import annotations

import copy

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature


def with_graph(
    program: ExportedProgram, graph_module: fx.GraphModule, signature: ExportGraphSignature
) -> ExportedProgram:
    """`program` with another graph, verified; parameters and constants are shared.

    The class is public, what its constructor needs of another program is not all (2.11 to 2.15).
    """
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program._module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
