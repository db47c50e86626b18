"""Real architectures: models of Hugging Face `transformers`, tiny and with random weights, and what
becomes of their graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autocast_backend.graphs import copy_graph
from autocast_backend.lowering.context import Context
from autocast_backend.lowering.lower import lower
from autocast_backend.reports.report import Bracketed, Report
from autocast_backend.state import AutocastState

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
"""What most configurations call their sizes."""
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
ENCODER_DECODER = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
BART = {
    **ENCODER_DECODER,
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    "max_position_embeddings": 64,
}
VISION = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}
SPEECH = {
    **SIZES,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}


def text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def image() -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}


def sound() -> dict[str, torch.Tensor]:
    wave = torch.randn(2, 800, generator=torch.Generator().manual_seed(0))
    return {"input_values": wave}


def spectrogram() -> dict[str, torch.Tensor]:
    features = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "labels": text()["labels"]}


def both() -> dict[str, torch.Tensor]:
    return {
        "input_ids": text()["input_ids"],
        "pixel_values": image()["pixel_values"],
        "return_loss": True,
    }


@dataclass(frozen=True)
class Architecture:
    """A model class of `transformers`, its configuration, and what it is called with."""

    kind: str
    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, Any]] = text

    def make(self) -> torch.nn.Module:
        """The model, with the same random weights every time."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        return getattr(transformers, self.model)(config)


ARCHITECTURES = (
    Architecture(
        "decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    Architecture("decoder", "LlamaForCausalLM", "LlamaConfig", DECODER),
    Architecture("decoder", "Gemma2ForCausalLM", "Gemma2Config", DECODER),
    Architecture("decoder", "Qwen3ForCausalLM", "Qwen3Config", DECODER),
    Architecture("decoder", "PhiForCausalLM", "PhiConfig", {**SIZES, "pad_token_id": 0}),
    Architecture("encoder", "BertForMaskedLM", "BertConfig", SIZES),
    Architecture(
        "encoder",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    Architecture(
        "encoder", "ModernBertForMaskedLM", "ModernBertConfig", {**SIZES, "pad_token_id": 0}
    ),
    Architecture(
        "encoder-decoder",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    Architecture("encoder-decoder", "BartForConditionalGeneration", "BartConfig", BART),
    Architecture("vision", "ViTForImageClassification", "ViTConfig", VISION, image),
    Architecture(
        "vision",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
        },
        image,
    ),
    Architecture(
        "vision",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 3},
        image,
    ),
    Architecture(
        "vision and text",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**SIZES, "projection_dim": 16},
            "vision_config": {**VISION, "projection_dim": 16},
            "projection_dim": 16,
        },
        both,
    ),
    Architecture("speech", "Wav2Vec2Model", "Wav2Vec2Config", SPEECH, sound),
    Architecture(
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BART,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        spectrogram,
    ),
    Architecture(
        "mixture of experts",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4},
    ),
    Architecture(
        "mixture of experts",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **DECODER,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    Architecture(
        "state space",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    Architecture(
        "state space",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
)


@dataclass
class Count:
    """What became of the calls of one model, all its graphs together."""

    graphs: int = 0
    lowered: int = 0
    untouched: int = 0
    bracketed: list[Bracketed] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.graphs += 1
        self.lowered += report.lowered
        self.untouched += report.untouched
        self.bracketed += report.bracketed

    @property
    def share(self) -> float:
        """Of the calls that need a cast, the part that is lowered."""
        return self.lowered / max(1, self.lowered + len(self.bracketed))


def count(architecture: Architecture, autocast: dict[str, Any]) -> Count:
    """Compile a model under autocast, in training, and count what becomes of its calls."""
    found = Count()

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        context = Context(ambient=AutocastState.current())
        lower(copy_graph(graph_module), context)
        found.add(context.report)
        return graph_module.forward

    torch._dynamo.reset()
    model = architecture.make().train()
    with torch.autocast(**autocast):
        torch.compile(model, backend=backend)(**architecture.inputs())
    return found
