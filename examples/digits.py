"""A small ResNet that reads handwritten digits: ordinary Lightning, nothing of ours.

lightning-pipe fit --config configs/digits.yaml
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Residual(nn.Module):
    """Two convolutions and a skip around them; the skip is a 1x1 convolution where sizes change."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        same = channels_in == channels_out and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(LightningModule):
    """Classifies 8x8 grey images."""

    def __init__(self, width: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(
            Residual(width, width),
            Residual(width, width),
            Residual(width, 2 * width, stride=2),
            Residual(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:  # (batch, 1, 8, 8) -> (batch, 10)
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


class Digits(LightningDataModule):
    """The 1797 digits that come with scikit-learn."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        fixed = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(data, [0.8, 0.2], generator=fixed)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)
