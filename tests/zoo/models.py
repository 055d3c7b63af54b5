"""60 listed public models, small and with random weights, and records for each. Nothing is downloaded.

A builder imports its library when it is called. It sets sizes alone, so dropout and norms are the library's defaults;
`from_config` would give the same models as these constructors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_lightning.models import fixed

CLASSES, VOCABULARY, TOKENS, PAD = 3, 96, 12, 1
Records = tuple[Any, Tensor]  # x: a tensor, a tuple (arguments) or a dictionary (keywords); y: labels


@dataclass(frozen=True)
class Entry:
    """A model of `source`. `records(n, generator)` makes n records; `kind` says how labels and outputs are read.

    Kinds: "class" (labels [B]), "tokens" ([B, T], -100 is ignored) and "pixels" ([B, ...] for outputs [B, K, ...]).
    `output`, `loss`, `task` and `fix` are those of `ClientModule`.
    """

    name: str
    source: str
    build: Callable[[], nn.Module]
    records: Callable[[int, torch.Generator], Records]
    kind: str = "class"
    num_classes: int | None = CLASSES
    output: Callable[[Any], Tensor] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    masked: bool = False
    task: str | None = None
    fix: bool = False

    def private(self) -> nn.Module:
        """Return the model, with what `fix` replaces."""
        return fixed(self.build()) if self.fix else self.build()


ZOO: dict[str, Entry] = {}


def add(name: str, source: str, build: Callable[[], nn.Module], records: Any, **more: Any) -> None:
    ZOO[name] = Entry(name, source, build, records, **more)


# -- records


def labels_of(score: Tensor, classes: int = CLASSES) -> Tensor:
    """Return labels `[n]` that depend on the records by a score `[n]`."""
    return (score.argsort().argsort() * classes // max(1, len(score))).clamp(max=classes - 1)


def images(side: int, channels: int = 3, dims: int = 2) -> Callable[[int, torch.Generator], Records]:
    def make(n: int, generator: torch.Generator) -> Records:
        x = torch.randn(n, channels, *[side] * dims, generator=generator)
        return x, labels_of(x.flatten(1).mean(dim=1))

    return make


def pixel_values(side: int) -> Callable[[int, torch.Generator], Records]:
    def make(n: int, generator: torch.Generator) -> Records:
        x, y = images(side)(n, generator)
        return {"pixel_values": x}, y

    return make


def scans(side: int, dims: int) -> Callable[[int, torch.Generator], Records]:
    """Return records with a label of 0 or 1 for each pixel or voxel."""

    def make(n: int, generator: torch.Generator) -> Records:
        x = torch.randn(n, 1, *[side] * dims, generator=generator)
        return x, (x[:, 0] > 0.5).long()

    return make


def words(kind: str, tokens: int, vocabulary: int) -> Callable[[int, torch.Generator], Records]:
    """Return records of texts of different lengths, padded on the right, with their attention mask.

    Labels are a class of each text ("sequence"), of each token ("tokens"), or the next token ("language"); that of
    padding is ignored.
    """

    def make(n: int, generator: torch.Generator) -> Records:
        ids = torch.randint(PAD + 1, vocabulary, (n, tokens), generator=generator)
        lengths = torch.randint(3, tokens + 1, (n,), generator=generator)
        mask = (torch.arange(tokens) < lengths[:, None]).long()
        ids = ids * mask + PAD * (1 - mask)
        x = {"input_ids": ids, "attention_mask": mask}
        if kind == "sequence":
            return x, labels_of(ids[:, 0].float())
        if kind == "tokens":
            return x, torch.where(mask > 0, ids % CLASSES, -100)
        known = mask.roll(-1, dims=1) * mask
        known[:, -1] = 0
        return x, torch.where(known > 0, ids.roll(-1, dims=1), -100)

    return make


texts, tagged_texts, continued_texts = (words(kind, TOKENS, VOCABULARY) for kind in ("sequence", "tokens", "language"))


def sound(samples: int) -> Callable[[int, torch.Generator], Records]:
    """Return waves of different lengths, padded with zeros, with their attention mask."""

    def make(n: int, generator: torch.Generator) -> Records:
        wave = torch.randn(n, samples, generator=generator)
        lengths = torch.randint(samples // 2, samples + 1, (n,), generator=generator)
        mask = (torch.arange(samples) < lengths[:, None]).long()
        return {"input_values": wave * mask, "attention_mask": mask}, labels_of(wave.mean(dim=1))

    return make


def series(length: int, channels: int, key: str = "") -> Callable[[int, torch.Generator], Records]:
    def make(n: int, generator: torch.Generator) -> Records:
        x = torch.randn(n, length, channels, generator=generator)
        return ({key: x} if key else x), labels_of(x.flatten(1).mean(dim=1))

    return make


def rows(n: int, generator: torch.Generator) -> Records:
    """Return five numbers for each record."""
    x = torch.randn(n, 5, generator=generator)
    return x, labels_of(x[:, 0])


def mixed_rows(n: int, generator: torch.Generator) -> Records:
    """Return five numbers and two categories (of 3 and 4) for each record."""
    numbers, y = rows(n, generator)
    categories = torch.stack([torch.randint(k, (n,), generator=generator) for k in (3, 4)], dim=1)
    return (numbers, categories), y


def mixed_rows_categories_first(n: int, generator: torch.Generator) -> Records:
    (numbers, categories), y = mixed_rows(n, generator)
    return (categories, numbers), y


# -- libraries


def of_library(module: str, name: str, *args: Any, **options: Any) -> Any:
    """Call a class or a function of a library, which is imported now."""
    return getattr(import_module(module), name)(*args, **options)


def huggingface(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a builder of a model of transformers from its config."""
    options = {"num_labels": CLASSES, **options}
    return lambda: of_library("transformers", model, of_library("transformers", config, **options))


def adapted(base: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a builder of a model of transformers with an adapter of peft."""
    return lambda: of_library("peft", "get_peft_model", base(), of_library("peft", config, **options))


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: of_library("timm", "create_model", name, num_classes=CLASSES, **options)


def monai(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: of_library("monai.networks.nets", name, **options)


TRANSFORMERS, PEFT, TIMM, MONAI = "transformers 5.24.0", "peft 0.21.2", "timm 1.0.31", "monai 1.6.1"

ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "bos_token_id": 2, "eos_token_id": 3}
VISION = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
}

bert = huggingface("BertForSequenceClassification", "BertConfig", **ENCODER)
roberta = huggingface("RobertaForSequenceClassification", "RobertaConfig", **ENCODER)
distilbert = huggingface("DistilBertForSequenceClassification", "DistilBertConfig", **DISTILBERT)
gpt2 = huggingface("GPT2ForSequenceClassification", "GPT2Config", **GPT2)
llama = huggingface("LlamaForSequenceClassification", "LlamaConfig", **DECODER)


def clip() -> nn.Module:
    """CLIP with both towers, whose outputs compare each image with each text of a batch."""
    text, vision = {**ENCODER, "projection_dim": 16, "eos_token_id": 2}, {**VISION, "projection_dim": 16}
    config = of_library("transformers", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)
    return of_library("transformers", "CLIPModel", config)


def captioned(n: int, generator: torch.Generator) -> Records:
    x, y = texts(n, generator)
    return {**x, "pixel_values": torch.randn(n, 3, 16, 16, generator=generator)}, y


def each_with_its_own(output: Tensor, y: Tensor) -> Tensor:
    """Return the contrastive loss of each image: its own text is the right one of a batch."""
    return F.cross_entropy(output, torch.arange(len(output)), reduction="none")


def encoder(name: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    return huggingface(f"{name}For{kind}", f"{name}Config", **{**ENCODER, **options})


def decoder(name: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    return huggingface(f"{name}For{kind}", f"{name}Config", **{**DECODER, **options})


SEQUENCE, TAGS, LANGUAGE = "SequenceClassification", "TokenClassification", "CausalLM"
TAGGED = {"kind": "tokens", "masked": True}
NEXT = {"kind": "tokens", "num_classes": VOCABULARY, "masked": True, "task": "language_modeling"}  # shifted already

# transformers: 23

add("bert", TRANSFORMERS, bert, texts, masked=True)
add("distilbert", TRANSFORMERS, distilbert, texts, masked=True)
add("roberta-tags", TRANSFORMERS, encoder("Roberta", TAGS), tagged_texts, **TAGGED)
add("electra", TRANSFORMERS, encoder("Electra", SEQUENCE, embedding_size=16), texts, masked=True)
add("albert", TRANSFORMERS, encoder("Albert", SEQUENCE, embedding_size=16), texts, masked=True)
deberta = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
add("deberta-v2", TRANSFORMERS, encoder("DebertaV2", SEQUENCE, **deberta), texts, masked=True)
special = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
add("modernbert", TRANSFORMERS, encoder("ModernBert", SEQUENCE, **special), texts, masked=True)
add("gpt2-next-token", TRANSFORMERS, huggingface("GPT2LMHeadModel", "GPT2Config", **GPT2), continued_texts, **NEXT)
add("llama", TRANSFORMERS, llama, texts, masked=True)
add("qwen2-next-token", TRANSFORMERS, decoder("Qwen2", LANGUAGE), continued_texts, **NEXT)
add("mistral", TRANSFORMERS, decoder("Mistral", SEQUENCE, sliding_window=8), texts, masked=True)
experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
add("mixtral", TRANSFORMERS, decoder("Mixtral", SEQUENCE, **experts), texts, masked=True)
t5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
t5_tags = huggingface("T5ForTokenClassification", "T5Config", pad_token_id=PAD, **t5)
add("t5-encoder-tags", TRANSFORMERS, t5_tags, tagged_texts, **TAGGED)
add("vit", TRANSFORMERS, huggingface("ViTForImageClassification", "ViTConfig", **VISION), pixel_values(16))
add("deit", TRANSFORMERS, huggingface("DeiTForImageClassification", "DeiTConfig", **VISION), pixel_values(16))
swin = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
add("swin", TRANSFORMERS, huggingface("SwinForImageClassification", "SwinConfig", **swin), pixel_values(16))
convnext = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
convnext_hf = huggingface("ConvNextForImageClassification", "ConvNextConfig", **convnext)
add("convnext", TRANSFORMERS, convnext_hf, pixel_values(32))
clip_vision = huggingface("CLIPForImageClassification", "CLIPConfig", vision_config=VISION)
add("clip-vision", TRANSFORMERS, clip_vision, pixel_values(16))
whisper = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
    "max_source_positions": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "classifier_proj_size": 16,
}


def mel(n: int, generator: torch.Generator) -> Records:
    x = torch.randn(n, 8, 32, generator=generator)
    return {"input_features": x}, labels_of(x.flatten(1).mean(dim=1))


add("whisper-encoder", TRANSFORMERS, huggingface("WhisperForAudioClassification", "WhisperConfig", **whisper), mel)
wav2vec2 = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
}
wav2vec2_hf = huggingface("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **wav2vec2)
add("wav2vec2", TRANSFORMERS, wav2vec2_hf, sound(400), masked=True)
patchtst = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "num_targets": CLASSES,
    "d_model": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 32,
}
patchtst_hf = huggingface("PatchTSTForClassification", "PatchTSTConfig", **patchtst)
add("patchtst", TRANSFORMERS, patchtst_hf, series(32, 3, "past_values"), output=lambda out: out.prediction_logits)
segformer = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 2, 2],
    "decoder_hidden_size": 16,
}


def segmented(n: int, generator: torch.Generator) -> Records:
    x = torch.randn(n, 3, 32, 32, generator=generator)
    return {"pixel_values": x}, (x[:, 0, ::4, ::4] > 0).long()


segformer_hf = huggingface("SegformerForSemanticSegmentation", "SegformerConfig", **{**segformer, "num_labels": 2})
add("segformer", TRANSFORMERS, segformer_hf, segmented, kind="pixels", num_classes=2)
contrast = {"output": lambda out: out.logits_per_image, "loss": each_with_its_own, "masked": True}
add("clip-contrastive", TRANSFORMERS, clip, captioned, **contrast)

# peft: 6

task = {"task_type": "SEQ_CLS"}
add("lora-bert", PEFT, adapted(bert, "LoraConfig", r=4, **task), texts, masked=True)
add("lora-gpt2", PEFT, adapted(gpt2, "LoraConfig", r=4, fan_in_fan_out=True, **task), texts, masked=True)
add("lora-llama", PEFT, adapted(llama, "LoraConfig", r=4, lora_dropout=0.1, **task), texts, masked=True)
scaled = {"target_modules": ["k_lin", "v_lin", "lin2"], "feedforward_modules": ["lin2"]}
add("ia3-distilbert", PEFT, adapted(distilbert, "IA3Config", **scaled, **task), texts, masked=True)
add("prompt-bert", PEFT, adapted(bert, "PromptTuningConfig", num_virtual_tokens=4, **task), texts, masked=True)
add("dora-roberta", PEFT, adapted(roberta, "LoraConfig", r=4, use_dora=True, **task), texts, masked=True)

# timm: 11


def resnet_group_norm() -> nn.Module:
    return timm("resnet10t", norm_layer=partial(import_module("timm.layers").GroupNorm, num_groups=4), **narrow)()


def mixer(**parts: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    return of_library("timm.models.mlp_mixer", "MlpMixer", num_classes=CLASSES, **sizes, **parts)


def resmlp() -> nn.Module:
    library = import_module("timm.models.mlp_mixer")
    return mixer(mlp_ratio=4, block_layer=library.ResBlock, norm_layer=library.Affine)


def bit() -> nn.Module:
    sizes = {"layers": (1, 1), "channels": (32, 64), "stem_chs": 16, "num_classes": CLASSES}
    norm = partial(import_module("timm.layers").GroupNormAct, num_groups=4)
    return of_library("timm.models.resnetv2", "ResNetV2", stem_type="fixed", norm_layer=norm, **sizes)


def poolformer() -> nn.Module:
    library = import_module("timm.models.metaformer")
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32), "num_classes": CLASSES, "downsample_norm": None}
    parts = {"token_mixers": library.Pooling, "norm_layers": library.GroupNorm1, "layer_scale_init_values": 1e-5}
    return library.MetaFormer(mlp_act=nn.GELU, use_mlp_head=False, res_scale_init_values=None, **parts, **sizes)


def frozen_batch_norm() -> nn.Module:
    """A ResNet whose BatchNorm keeps its public statistics."""
    net = timm("resnet10t", **narrow)()
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
    return net


narrow = {"channels": (16, 16, 32, 32)}
small_vit = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
add("resnet-groupnorm", TIMM, resnet_group_norm, images(32))
add("resnet-frozen-batchnorm", TIMM, frozen_batch_norm, images(32))
add("efficientnet", TIMM, timm("efficientnet_b0"), images(32))
add("mobilenetv3", TIMM, timm("mobilenetv3_small_050"), images(32))
add("convnext-timm", TIMM, timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)), images(32))
add("mlp-mixer", TIMM, mixer, images(32))
add("resmlp", TIMM, resmlp, images(32))
add("vit-timm", TIMM, timm("vit_tiny_patch16_224", drop_path_rate=0.1, **small_vit), images(32))
add("bit-resnetv2", TIMM, bit, images(32))
add("poolformer", TIMM, poolformer, images(32))
add("cait", TIMM, timm("cait_xxs24_224", **small_vit), images(32))

# MONAI: 10

PIXELS = {"kind": "pixels", "num_classes": 2}
ONE_TO_TWO = {"in_channels": 1, "out_channels": 2}
add("unet-3d", MONAI, monai("UNet", spatial_dims=3, channels=(4, 8), strides=(2,), **ONE_TO_TWO), scans(8, 3), **PIXELS)
dynunet = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 8]}
add("dynunet", MONAI, monai("DynUNet", spatial_dims=2, **dynunet, **ONE_TO_TWO), scans(16, 2), **PIXELS)
add("swin-unetr", MONAI, monai("SwinUNETR", spatial_dims=2, feature_size=12, **ONE_TO_TWO), scans(64, 2), **PIXELS)
add("segresnet", MONAI, monai("SegResNet", spatial_dims=2, blocks_down=(1, 1), blocks_up=(1,)), scans(16, 2), **PIXELS)
densenet = {"spatial_dims": 3, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)}
densenet_3d = monai("DenseNet", in_channels=1, out_channels=CLASSES, norm=("group", {"num_groups": 2}), **densenet)
add("densenet-3d-groupnorm", MONAI, densenet_3d, images(16, 1, 3))
unetr = {"img_size": 32, "feature_size": 4, "hidden_size": 16, "mlp_dim": 32, "num_heads": 2, "spatial_dims": 2}
add("unetr", MONAI, monai("UNETR", **unetr, **ONE_TO_TWO), scans(32, 2), **PIXELS)
attention = {"spatial_dims": 2, "channels": (4, 8), "strides": (2,)}
add("attention-unet", MONAI, monai("AttentionUnet", **attention, **ONE_TO_TWO), scans(16, 2), **PIXELS)
add("vnet", MONAI, monai("VNet", spatial_dims=2, dropout_dim=2, **ONE_TO_TWO), scans(16, 2), **PIXELS)
features = (4, 4, 8, 8, 8, 4)
add("basic-unet", MONAI, monai("BasicUNet", spatial_dims=2, features=features, **ONE_TO_TWO), scans(32, 2), **PIXELS)
vit = {"img_size": 16, "patch_size": 8, "hidden_size": 16, "mlp_dim": 32, "num_layers": 2, "num_heads": 2}
vit_3d = monai("ViT", in_channels=1, classification=True, num_classes=CLASSES, **vit)
add("vit-3d", MONAI, vit_3d, images(16, 1, 3), output=lambda pair: pair[0])

# torchvision, Lightning, tables and series: 10


def torchvision_convnext() -> nn.Module:
    block = import_module("torchvision.models.convnext").CNBlockConfig
    settings = [block(8, 16, 1), block(16, None, 1)]
    return of_library("torchvision.models", "ConvNeXt", settings, stochastic_depth_prob=0.1, num_classes=CLASSES)


def torchvision_swin() -> nn.Module:
    sizes = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    depth = {"stochastic_depth_prob": 0.1}
    return of_library("torchvision.models", "SwinTransformer", num_classes=CLASSES, **sizes, **depth)


def squeezenet() -> nn.Module:
    return of_library("torchvision.models", "squeezenet1_1", num_classes=CLASSES)


TORCHVISION = "torchvision 0.28.0"
add("convnext-torchvision", TORCHVISION, torchvision_convnext, images(16))
add("swin-torchvision", TORCHVISION, torchvision_swin, images(16))
add("squeezenet", TORCHVISION, squeezenet, images(32))


def lightning_transformer() -> nn.Module:
    return of_library("lightning.pytorch.demos", "Transformer", vocab_size=VOCABULARY, ninp=16, nhid=32)


def translations(n: int, generator: torch.Generator) -> Records:
    source, target = (torch.randint(VOCABULARY, (n, 8), generator=generator) for _ in range(2))
    return (source, target), target.roll(-1, dims=1)


unfolded = {"output": lambda out: out.view(-1, 8, VOCABULARY)}  # it returns [B * 8, vocabulary]
lightning_demo = {"kind": "tokens", "num_classes": VOCABULARY, **unfolded}
add("lightning-transformer", "lightning 2.6.6", lightning_transformer, translations, **lightning_demo)


def ft_transformer() -> nn.Module:
    kind = import_module("rtdl_revisiting_models").FTTransformer
    options = {**kind.get_default_kwargs(n_blocks=1), "d_block": 16, "attention_n_heads": 2, "d_out": CLASSES}
    return kind(n_cont_features=5, cat_cardinalities=[3, 4], **options)


def tabular_resnet() -> nn.Module:
    sizes = {"d_in": 5, "d_out": CLASSES, "n_blocks": 2, "d_block": 16, "d_hidden_multiplier": 2.0}
    return of_library("rtdl_revisiting_models", "ResNet", dropout1=0.1, dropout2=0.0, d_hidden=None, **sizes)


def tabm() -> nn.Module:
    sizes = {"n_num_features": 5, "cat_cardinalities": [3, 4], "d_out": CLASSES, "n_blocks": 2, "d_block": 16, "k": 4}
    return import_module("tabm").TabM.make(**sizes)


def tab_transformer() -> nn.Module:
    sizes = {"categories": (3, 4), "num_continuous": 5, "dim": 16, "depth": 2, "heads": 2, "dim_out": CLASSES}
    return of_library("tab_transformer_pytorch", "TabTransformer", mlp_act=nn.ReLU(), **sizes)


def tcn() -> nn.Module:
    options = {"kernel_size": 3, "input_shape": "NLC", "output_projection": CLASSES}
    return of_library("pytorch_tcn", "TCN", 3, [8, 8], **options)


def compact_transformer() -> nn.Module:
    sizes = {"img_size": 16, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0}
    return of_library("vit_pytorch.cct", "CCT", num_classes=CLASSES, **sizes)


RTDL = "rtdl_revisiting_models 0.0.2"
add("ft-transformer", RTDL, ft_transformer, mixed_rows)
add("tabular-resnet", RTDL, tabular_resnet, rows)
add("tabm", "tabm 0.0.3", tabm, mixed_rows, output=lambda out: out.mean(dim=1))
add("tab-transformer", "tab_transformer_pytorch 0.6.1", tab_transformer, mixed_rows_categories_first)
add("tcn", "pytorch_tcn 1.2.3", tcn, series(24, 3), output=lambda out: out[:, -1])
add("cct", "vit_pytorch 1.26.11", compact_transformer, images(16))
