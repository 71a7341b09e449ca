"""Any Hugging Face causal language model under DeepSpeed: ZeRO 0 to 3, whole or by LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from determined_ds import DataLoader, DataParallelTrial
from determined_ds.errors import ConfigError, Problem
from model_defs.causal_lm.config import check_fit, find_model, read_config
from model_defs.causal_lm.data import load_packed_text
from model_defs.causal_lm.lora import ADAPTER_FOLDER, lora_section, parse_lora, save_adapter, with_lora
from model_defs.causal_lm.metrics import TokenLoss
from model_defs.causal_lm.model import (
    ATTENTION,
    build_model,
    check_isolation,
    decaying_and_not,
    enable_activation_checkpointing,
    next_token_loss,
    on_meta_device,
    positions_in_documents,
)

BOOLEANS = {"activation_checkpointing": False, "attend_across_documents": True}


class CausalLMTrial(DataParallelTrial):
    """A causal language model on packed text.

    Hyperparameters: ``model`` (a folder, or a name on the hub) or ``model_config`` (a configuration, for random
    weights), ``sequence_length``, ``lora`` (``r``, ``alpha``, ``dropout``, ``target_modules``; the last one
    beside it just as well), ``activation_checkpointing``, ``attend_across_documents``, ``attn_implementation``
    (``sdpa``, ``eager``, ``flash_attention_2``).
    """

    validation_metrics = ("validation_loss", "validation_perplexity")

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.token_loss = context.wrap_reducer(TokenLoss(), for_training=False)

    def prepare(self) -> None:
        hparams = self.context.get_hparams()
        _check_booleans(hparams)
        self.lora = parse_lora(lora_section(hparams))
        self.source = find_model(hparams)
        self.sequence_length = hparams.get("sequence_length", 128)
        self.data, tokenizer = load_packed_text(
            self.context.get_data_config(), self.sequence_length, self.source
        )
        vocab_size = self.data.vocab_size
        self.config = read_config(self.source, hparams.get("model_config"), vocab_size=vocab_size)
        check_fit(
            self.config, vocab_size=vocab_size, sequence_length=self.sequence_length, tokenizer=tokenizer
        )
        self.isolated = not hparams.get("attend_across_documents", True)
        self.attention = _attention(hparams.get("attn_implementation"))

    def build_model(self) -> torch.nn.Module:
        # Without an engine to come, a checkpoint's weights are: neither those to start from nor partitions.
        to_train = getattr(self.context, "distributed", None) is not None
        seed = self.context.get_trial_seed()
        model = build_model(
            self.config,
            self.source if to_train else None,
            seed=seed,
            dtype=_dtype(self.resolved.ds_config) if to_train else torch.float32,
            zero3=self.resolved.ds_config if to_train and self.resolved.zero_stage == 3 else None,
            attention=self.attention,
        )
        if self.isolated and not on_meta_device():
            check_isolation(model)
        if self.context.get_hparams().get("activation_checkpointing", False):
            enable_activation_checkpointing(model)
        return model if self.lora is None else with_lora(model, self.lora, seed=seed)

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decaying_and_not([p for p in model.parameters() if p.requires_grad])

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        tokens_BT, targets_BT = batch
        positions = (
            {"position_ids": positions_in_documents(tokens_BT, self.data.separator)} if self.isolated else {}
        )
        output = model(input_ids=tokens_BT, use_cache=False, **positions)
        return next_token_loss(output.logits, targets_BT)

    def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
        self.token_loss.update(self.loss(model, batch), batch[1].numel())
        return {}

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation)

    def tokens_per_sample(self) -> int:
        return int(self.sequence_length)

    def save(self, context: Any, path: Path) -> None:
        """A checkpoint; with LoRA, the adapters also in ``peft``'s own form."""
        super().save(context, path)
        if self.lora is not None:
            save_adapter(self.engine.module, Path(path) / ADAPTER_FOLDER)


def _dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """What the engine computes in, and holds the weights in."""
    enabled = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled") is True]
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled[0]] if enabled else torch.float32


def _attention(stated: Any) -> str:
    """The attention kernel; torch's own where none is stated."""
    if stated in (None, *ATTENTION):
        return stated or ATTENTION[0]
    problem = Problem(
        key="hyperparameters.attn_implementation",
        value=stated,
        message="no such attention kernel.",
        fix=f"one of {', '.join(ATTENTION)}",
    )
    raise ConfigError(problem)


def _check_booleans(hparams: dict[str, Any]) -> None:
    problems = [
        Problem(
            key=f"hyperparameters.{name}",
            value=hparams[name],
            message="is true or false.",
            fix=f"{name}: {str(default).lower()}",
        )
        for name, default in BOOLEANS.items()
        if not isinstance(hparams.get(name, default), bool)
    ]
    if problems:
        raise ConfigError(problems)
