"""The signature of an exported program's graph."""

from __future__ import annotations

import dataclasses

from torch import fx
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature


def with_outputs_of(
    module: fx.GraphModule, signature: ExportGraphSignature | None
) -> ExportGraphSignature | None:
    """`signature` with the outputs called what they are called in the graph: their order counts."""
    if signature is None:
        return None
    if not isinstance(signature, ExportGraphSignature):
        raise TypeError(
            "signature: expected an ExportGraphSignature, the graph_signature of the exported "
            f"program, or None; got {type(signature).__name__}"
        )
    (output,) = module.graph.find_nodes(op="output")
    specs = []
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        if isinstance(value, fx.Node) and not isinstance(spec.arg, ConstantArgument):
            arg = dataclasses.replace(spec.arg, name=value.name)
            spec = dataclasses.replace(spec, arg=arg)
        specs.append(spec)
    return ExportGraphSignature(list(signature.input_specs), specs)
