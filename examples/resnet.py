"""ResNet with bottleneck blocks (arXiv 1512.03385); the 3x3 convolution carries the stride."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAPER: Final[dict[str, Any]] = {"layers": (3, 8, 36, 3), "width": 64, "classes": 1000, "image": 224}
"""ResNet152, 60.2 million parameters."""

EXPANSION: Final = 4
"""How many times wider a bottleneck's output is than its 3x3 convolution."""


class ConvNorm(nn.Module):
    """A convolution without bias and its batch norm; the spatial size shrinks by `stride` alone."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions on a residual branch; the shortcut is projected where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.reduce = ConvNorm(inputs, width, 1)
        self.spatial = ConvNorm(width, width, 3, stride)
        self.restore = ConvNorm(width, outputs, 1)
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.spatial(F.relu(self.reduce(x))))
        return F.relu(self.restore(branch) + self.shortcut(x))


class Stem(nn.Module):
    """Image to features of a quarter of its height and width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = ConvNorm(3, width, 7, stride=2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.pool(F.relu(self.conv(image)))
        return out


class ResNet(nn.Module):
    """Images `(batch, 3, height, width)` to logits `(batch, classes)`.

    The bottlenecks of all four groups stand in one list, `blocks`: a stage may begin at any of them.
    """

    def __init__(self, layers: Sequence[int], width: int, classes: int, image: int) -> None:
        super().__init__()
        self.classes = classes
        self.image = image
        self.stem = Stem(width)
        self.blocks = nn.ModuleList()
        inputs = width
        for group, count in enumerate(layers):
            group_width = width * 2**group
            for index in range(count):
                stride = 2 if group > 0 and index == 0 else 1
                self.blocks.append(Bottleneck(inputs, group_width, stride))
                inputs = EXPANSION * group_width
        self.head = nn.Linear(inputs, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def build(*, layers: Sequence[int] = (1, 1, 1, 1), width: int = 16, classes: int = 10, image: int = 64) -> ResNet:
    """A ResNet of `sum(layers)` bottlenecks, `layers[g]` of them `width * 2**g` wide. `image` only sizes the batch."""
    return ResNet(layers, width, classes, image)


def example_batch(model: ResNet, *, batch: int = 4, seed: int = 0) -> tuple[tuple[Tensor], Tensor]:
    """Noise and random labels: `((x,), target)`, `(batch, 3, image, image)` float32, `(batch,)` int64, on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    images = torch.randn(batch, 3, model.image, model.image, generator=generator, device="cpu", dtype=torch.float32)
    return (images,), torch.randint(model.classes, (batch,), generator=generator, device="cpu")


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy, in nats an image, of logits `(batch, classes)` against labels `(batch,)`."""
    return F.cross_entropy(output, target)
