"""The model of the benchmarks: a Llama of many layers and tiny widths, so that the host shows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class TinyLlama(pl.LightningModule):
    """A causal language model on random tokens.

    Args:
        num_layers: Decoder layers.
        width: Hidden size.
    """

    def __init__(self, num_layers: int = 32, width: int = 32) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def tokens(rows: int, length: int) -> torch.Tensor:
    """A batch of random tokens."""
    return torch.randint(0, 64, (rows, length))
