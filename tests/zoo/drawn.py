"""Models of the zoo that a seed has drawn from the lists of names of their libraries (`draw.py`).

Those of timm and torchvision have their own sizes, and images of 64 x 64. Those of transformers have two layers of
BERT-tiny's width 128, and 32 tokens or images of 32 x 32. A BatchNorm is replaced as `fix` does for a user.
"""

from importlib import import_module
from typing import Any

from torch import nn
from zoo.models import (
    CLASSES,
    PAD,
    TIMM,
    TORCHVISION,
    TRANSFORMERS,
    ZOO,
    Entry,
    images,
    of_library,
    pixel_values,
    words,
)

DRAWN: list[tuple[str, str, dict[str, Any]]] = [
    ("timm", "mobilenetv2_050", {}),
    ("timm", "convnext_zepto_rms", {}),
    ("timm", "efficientvit_m0", {"img_size": 64}),
    ("timm", "levit_conv_128s", {"img_size": 64}),
    ("timm", "regnetx_002", {}),
    ("timm", "pvt_v2_b0", {}),
    ("timm", "pit_ti_distilled_224", {"img_size": 64}),
    ("timm", "test_maxvit", {"img_size": 64}),
    ("timm", "starnet_s100", {}),
    ("timm", "fasternet_t1", {}),
    ("timm", "crossvit_tiny_240", {}),
    ("timm", "rexnetr_150", {}),
    ("timm", "repvit_m0_9", {"img_size": 64}),
    ("timm", "mobileone_s0", {"img_size": 64}),
    ("torchvision", "mnasnet0_75", {}),
    ("torchvision", "efficientnet_b1", {}),
    ("torchvision", "mobilenet_v3_small", {}),
    ("torchvision", "squeezenet1_1", {}),
    ("sequence", "eurobert EuroBertForSequenceClassification", {}),
    ("sequence", "gptj GPTJForSequenceClassification", {}),
    ("sequence", "deberta-v2 DebertaV2ForSequenceClassification", {}),
    ("sequence", "xlm-roberta-xl XLMRobertaXLForSequenceClassification", {}),
    ("sequence", "convbert ConvBertForSequenceClassification", {}),
    ("sequence", "olmo OlmoForSequenceClassification", {}),
    ("sequence", "biogpt BioGptForSequenceClassification", {}),
    ("tokens", "phi3 Phi3ForTokenClassification", {}),
    ("tokens", "nomic_bert NomicBertForTokenClassification", {}),
    ("tokens", "albert AlbertForTokenClassification", {}),
    ("language", "deepseek_v3 DeepseekV3ForCausalLM", {}),
    ("language", "flex_olmo FlexOlmoForCausalLM", {}),
    ("language", "granite GraniteForCausalLM", {}),
    ("language", "starcoder2 Starcoder2ForCausalLM", {}),
    ("vision", "vit_msn ViTMSNForImageClassification", {}),
    ("vision", "data2vec-vision Data2VecVisionForImageClassification", {}),
    ("vision", "ijepa IJepaForImageClassification", {}),
    ("vision", "dinov2 Dinov2ForImageClassification", {}),
]
TOKENS, VOCABULARY = 32, 1000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "num_labels": CLASSES,
    "image_size": 32,
    "patch_size": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "sequence": {"masked": True},
    "tokens": {"kind": "tokens", "masked": True},
    "language": {"kind": "tokens", "num_classes": VOCABULARY, "masked": True, "task": "language_modeling"},
}


def of_transformers(name: str) -> nn.Module:
    """Return a model of transformers by the name of its configuration and its class, with those sizes that it knows."""
    config_name, model_name = name.split()
    kind = import_module("transformers").CONFIG_MAPPING[config_name]
    known = kind()
    config = kind(**{key: size for key, size in SIZES.items() if hasattr(known, key)})
    return of_library("transformers", model_name, config)


def entry_of(kind: str, name: str, options: dict[str, Any]) -> Entry:
    """Return the entry of a drawn model."""
    if kind == "timm":
        build = lambda: of_library("timm", "create_model", name, num_classes=CLASSES, **options)  # noqa: E731
        return Entry(name, TIMM, build, images(64), fix=True)
    if kind == "torchvision":
        build = lambda: of_library("torchvision.models", "get_model", name, num_classes=CLASSES)  # noqa: E731
        return Entry(name, TORCHVISION, build, images(64), fix=True)
    records = pixel_values(32) if kind == "vision" else words(kind, TOKENS, VOCABULARY)
    return Entry(name.split()[1], TRANSFORMERS, lambda: of_transformers(name), records, fix=True, **KINDS.get(kind, {}))


def add_all() -> None:
    """Add the drawn models to the zoo."""
    for one in DRAWN:
        entry = entry_of(*one)
        ZOO.setdefault(entry.name, entry)


add_all()
