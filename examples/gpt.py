"""A byte-level GPT that reads Python's own manual: ordinary Lightning, nothing of ours.

Nothing here knows how many processes will train it. Run it with

    lightning-pipe fit --config configs/gpt.yaml
"""

import math
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BYTES = 256


class Block(nn.Module):
    """One transformer layer: x + attention(x), then x + mlp(x)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(LightningModule):
    """Predicts the next byte; the output layer shares its weight with the input embedding."""

    def __init__(
        self,
        width: int = 128,
        layers: int = 6,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # smaller where a residual stream receives it, as in GPT-2
                residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.06 / math.sqrt(2 * layers) if residual else 0.06)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, BYTES)
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def on_fit_start(self) -> None:
        entropy = self.trainer.datamodule.unigram_entropy
        self.print(f"entropy of single bytes: {entropy:.3f} nats; a loss below it has read context")

    def loss(self, batch: list[Tensor]) -> Tensor:
        (text,) = batch  # (batch, context + 1)
        logits = self(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        steps, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    @torch.no_grad()
    def generate(self, prompt: str, num_bytes: int = 300, temperature: float = 0.7) -> str:
        """Continues the prompt, byte by byte."""
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.hparams.context :])[0, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class Manual(LightningDataModule):
    """The help texts of the Python interpreter (about 460 kB), cut into windows."""

    def __init__(self, context: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        text = torch.tensor(list("\n\n".join(topics.values()).encode()))
        windows = text.unfold(0, self.context + 1, self.context)
        num_train = int(0.9 * len(windows))
        self.train = TensorDataset(windows[:num_train])
        self.val = TensorDataset(windows[num_train:])
        share = torch.bincount(text).float() / len(text)
        self.unigram_entropy = torch.special.entr(share).sum().item()  # nats per byte

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)
