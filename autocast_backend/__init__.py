"""smart_autocast: autocast regions as explicit, dtype-agnostic smart casts in torch.compile."""
