"""The model that every contender trains: a GPT of equal blocks between an embedding and a head."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, and on how much.

    Attributes:
        width: Of the hidden states.
        blocks: Transformer blocks.
        vocabulary: Tokens that there are; a large one makes the head heavy.
        sequence: Tokens of a row.
        batch: Rows of a step.
        microbatches: Pieces of a step, where there are pieces.
    """

    width: int = 512
    blocks: int = 8
    vocabulary: int = 8192
    sequence: int = 64
    batch: int = 16
    microbatches: int = 8


SIZES = {
    "gpt": Size(),
    "gpt, 32 micro-batches": Size(batch=64, microbatches=32),
    "heavy-head": Size(vocabulary=32768),
    "small": Size(width=64, blocks=4, vocabulary=128, sequence=16),
}


class Embed(nn.Module):
    """Tokens and positions to hidden states."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.tokens(tokens) + self.positions(places)
        return hidden


class Block(nn.Module):
    """Causal attention and a feed-forward net, each beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = max(size.width // 64, 1)
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Hidden states to logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.out = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def layers_of(size: Size) -> list[nn.Module]:
    """Embedding, blocks and head, the same weights in every process."""
    torch.manual_seed(0)
    return [Embed(size), *(Block(size) for _ in range(size.blocks)), Head(size)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(size: Size, step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same in every process: (batch, sequence) tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """What every contender steps with."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


class LitGPT(pl.LightningModule):
    """The same as a LightningModule, as a user would write it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers_of(size))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = loss_of(self.net(tokens), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)
