"""`torch.export`: programs whose graph is another one."""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry
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
        module_call_graph=_module_calls(program),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _module_calls(program: ExportedProgram) -> list[ModuleCallEntry]:
    """The calls of modules that `preserve_module_call_signature` asked for. Export does not find
    out what goes into those inside of a region, and leaves their signatures without inputs, which
    `torch.export.unflatten` cannot read."""
    entries = []
    for entry in program._module_call_graph:
        signature = entry.signature
        if entry.fqn and signature and signature.in_spec.num_leaves and not signature.inputs:
            entry = ModuleCallEntry(entry.fqn)  # `copy.deepcopy` warns of its specs (2.13)
        entries.append(entry)
    return entries


def erase_tracepoints(graph_module: fx.GraphModule) -> None:
    """Erase the marks of `preserve_module_call_signature`, which compute nothing; export itself
    erases those outside of regions."""
    for module in graph_module.modules():
        graph = module.graph if isinstance(module, fx.GraphModule) else fx.Graph()
        for node in graph.find_nodes(
            op="call_function", target=torch.ops.higher_order._export_tracepoint
        ):
            for user in list(node.users):
                assert user.target is operator.getitem, "it gives its arguments, as a tuple"
                user.replace_all_uses_with(node.args[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)


def same_calling_convention(graph: fx.Graph, as_of: fx.Graph) -> None:
    """Let a graph be called as another one; export's graphs take and return nests of values."""
    graph.set_codegen(as_of._codegen)
