"""Networks for images: timm, torchvision, transformers, vit-pytorch, segmentation-models-pytorch, MONAI."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from zoo.case import Case, Project, classifier, images

NORMED: dict[str, Any] = {"says": {"buffers": "local"}, "counts": (8, 4, 12), "size": 4}  # BatchNorm: whose statistics


def timm(name: str, **options: Any) -> Any:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=3, **options)


def torchvision(name: str, **options: Any) -> Any:
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=3, **options)


def resnet() -> Any:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=3, width_per_group=8)


def swin() -> Any:
    from torchvision.models.swin_transformer import SwinTransformer

    sizes = {"patch_size": [4, 4], "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": [2, 2]}
    return SwinTransformer(num_classes=3, stochastic_depth_prob=0.0, **sizes)


def vit() -> Project:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    net = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes, **still))
    return Project(net, lambda net, batch: net(pixel_values=batch[0], labels=batch[1]).loss)


def simple_vit() -> Any:
    from vit_pytorch import SimpleViT

    return SimpleViT(image_size=16, patch_size=8, num_classes=3, dim=16, depth=2, heads=2, mlp_dim=32)


def unet() -> Any:
    import segmentation_models_pytorch as smp

    return smp.Unet("tu-test_resnet", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=1)


def dice(net: Any, batch: Any) -> torch.Tensor:
    import segmentation_models_pytorch as smp

    return smp.losses.DiceLoss("binary")(net(batch[0]), batch[1])


def volumes() -> Any:
    from monai.networks.nets import UNet

    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,))


def segmented(net: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


CASES = [
    Case("ViT", "transformers", vit, images(16, classes=2)),
    Case("SimpleViT", "vit_pytorch/vit-pytorch", classifier(simple_vit), images(16)),
    Case(
        "ViT",
        "timm",
        classifier(lambda: timm("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2)),
        images(32),
    ),
    Case(
        "ConvNeXt",
        "timm",
        classifier(lambda: timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))),
        images(32),
    ),
    Case("EfficientNet", "timm", classifier(lambda: timm("test_efficientnet")), images(32), **NORMED),
    Case("ResNet", "torchvision", classifier(resnet), images(32), **NORMED),
    Case(
        "MobileNet V2",
        "torchvision",
        classifier(lambda: torchvision("mobilenet_v2", width_mult=0.25, dropout=0.0), lr=0.01),
        images(64),
        **NORMED,
    ),
    Case("Swin Transformer", "torchvision", classifier(swin), images(32)),
    Case(
        "U-Net of a ResNet, Dice loss",
        "segmentation_models_pytorch/segmentation-models-pytorch",
        lambda: Project(unet(), dice),
        lambda n: (torch.randn(n, 3, 32, 32), torch.randint(2, (n, 1, 32, 32))),
        **NORMED,
    ),
    Case(
        "U-Net of volumes",
        "monai",
        lambda: Project(volumes(), segmented),
        lambda n: (torch.randn(n, 1, 8, 8, 8), torch.randint(2, (n, 8, 8, 8))),
    ),
]
