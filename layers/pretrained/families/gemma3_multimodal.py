"""The language model within Gemma 3's multimodal models; it is saved as one of its own."""

import dataclasses

from layers.pretrained.families import decoder, gemma3
from layers.pretrained.families.gemma2 import norms

_PREFIX = "language_model.model."

FAMILY = dataclasses.replace(
    gemma3.FAMILY,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    section="text_config",
    rows=(
        *decoder.vocabulary(_PREFIX, "language_model.lm_head.weight"),
        *decoder.attention(_PREFIX),
        *decoder.qk_norms(_PREFIX),
        *norms(_PREFIX),
        *decoder.gated_mlp(_PREFIX),
    ),
    unused=("vision_tower.", "multi_modal_projector."),
)
