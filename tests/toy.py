"""A small model and its data for tests that name classes by path, as a YAML file does."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Toy(LightningModule):
    """Six linear layers that learn the sum of their input."""

    def __init__(self, width: int = 8, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self.head(self.layers(inputs)), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class ToyData(LightningDataModule):
    """32 rows in batches of 8, in a fixed order."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
