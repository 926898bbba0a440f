"""A mask that is always made, for transformers' encoders on clients with different numbers of rows."""

from __future__ import annotations

from typing import Any


def register() -> str:
    """Register the mask by the public interface of transformers, and return the name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def always_masked(*args: Any, **options: Any) -> Any:
        return sdpa_mask(*args, **{**options, "allow_is_bidirectional_skip": False, "allow_is_causal_skip": False})

    AttentionMaskInterface.register("always_masked", always_masked)
    AttentionInterface.register("always_masked", sdpa_attention_forward)
    return "always_masked"
