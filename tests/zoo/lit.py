"""LightningModules for parity tests: plain Lightning, without any import of lightning_pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from tests.zoo.modules import MODELS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Dicts(Dataset):
    """Rows of a dict of tensors."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.data.items()}


class Lit(pl.LightningModule):
    """A module and a loss, trained with AdamW and a cosine schedule."""

    def __init__(
        self, net: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        # the bias of an attention key has gradient zero but for rounding: a large eps keeps Adam
        # from turning that noise into full steps
        optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def _data(rows: int, shape: tuple[int, ...], classes: int = 0) -> dict[str, Tensor]:
    x = torch.randn(rows, *shape)
    y = torch.randint(0, classes, (rows,)) if classes else torch.randn(rows, *shape)
    return {"x": x, "y": y}


def _tokens(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    return {"x": torch.randint(1, vocabulary, (rows, length))}


def _language_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"]).flatten(0, 1), batch["x"].flatten())


def _huggingface_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return net(input_ids=batch["x"], labels=batch["x"]).loss


def _no_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return net


def _gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=16, n_layer=4, n_head=2, vocab_size=48, n_positions=16, use_cache=False
        )
    )


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=48,
            use_cache=False,
        )
    )


def _t5() -> nn.Module:
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            vocab_size=48,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


_NETS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], dict[str, Tensor]]]] = {
    "mlp": (
        lambda: _no_dropout(MODELS["mlp"]().module),
        lambda net, b: F.mse_loss(net(b["x"]), b["y"]),
        lambda rows: _data(rows, (16,)),
    ),
    "tied_transformer": (
        lambda: _no_dropout(MODELS["tied_embedding"]().module),
        _language_loss,
        lambda rows: _tokens(rows, 12, 64),
    ),
    "unet": (
        lambda: MODELS["unet"]().module,
        lambda net, b: F.mse_loss(net(b["x"]), b["y"]),
        lambda rows: _data(rows, (3, 8, 8)),
    ),
    "resnet": (
        lambda: MODELS["resnet"]().module,
        lambda net, b: F.cross_entropy(net(b["x"]), b["y"]),
        lambda rows: _data(rows, (3, 8, 8), 5),
    ),
    "gpt2": (lambda: _no_dropout(_gpt2()), _huggingface_loss, lambda rows: _tokens(rows, 8, 48)),
    "llama": (_llama, _huggingface_loss, lambda rows: _tokens(rows, 8, 48)),
    "t5": (lambda: _no_dropout(_t5()), _huggingface_loss, lambda rows: _tokens(rows, 8, 48)),
}
NAMES = tuple(_NETS)


def build(name: str, dtype: torch.dtype = torch.float64) -> Lit:
    """Build a module, equal in every process."""
    torch.manual_seed(7)
    make, loss, _ = _NETS[name]
    return Lit(make(), loss).to(dtype)


def loader(name: str, rows: int, batch_size: int, dtype: torch.dtype = torch.float64) -> DataLoader:
    """Build a loader, equal in every process."""
    torch.manual_seed(8)
    data = _NETS[name][2](rows)
    data = {k: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()}
    return DataLoader(Dicts(data), batch_size=batch_size)
