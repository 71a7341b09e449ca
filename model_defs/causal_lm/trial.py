"""Any Hugging Face causal language model under DeepSpeed: ZeRO 0 to 3, whole or by LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from determined_ds import DataLoader, DataParallelTrial
from model_defs.causal_lm.config import check_fit, check_sliced, find_model, read_config
from model_defs.causal_lm.lora import parse_lora, with_lora
from model_defs.causal_lm.model import build_model, check_masks, on_meta_device
from model_defs.common.huggingface import enable_activation_checkpointing, export_generation_config
from model_defs.common.parameters import decay_groups
from model_defs.common.sections import Section, parse_section
from model_defs.common.text import load_text, next_token_loss


class Options(Section):
    """The hyperparameters that the trial reads, beside those that say what the model is."""

    sequence_length: int = Field(128, ge=1)
    """T, tokens of a sequence."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping what it computed."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] | None = None
    """The attention kernel; None: sdpa. The last one needs its package, a GPU and 16 bits."""


class CausalLMTrial(DataParallelTrial):
    """A causal language model on packed text.

    Hyperparameters: ``model`` (a folder, or a name on the hub) or ``model_config`` (a configuration, for random
    weights), ``lora`` (``r``, ``alpha``, ``dropout``, ``target_modules``; the last one may also stand beside it), and
    those of :class:`Options`.
    """

    sequence_parallel = True

    def prepare(self) -> None:
        hparams = self.context.get_hparams()
        self.options = parse_section(Options, hparams)
        self.lora = parse_lora(hparams)
        self.source = find_model(hparams)
        length = self.options.sequence_length
        self.data = load_text(self.context.get_data_config(), length, default_tokenizer=self.source)
        vocab_size = self.data.vocab_size
        self.config = read_config(self.source, hparams.get("model_config"), vocab_size=vocab_size)
        check_fit(self.config, vocab_size=vocab_size, sequence_length=length)
        if self.sequence.size > 1:
            check_sliced(self.config, length)

    def build_model(self) -> torch.nn.Module:
        # Without an engine, a checkpoint's weights are loaded later, and need no partitions.
        to_train = getattr(self.context, "distributed", None) is not None
        seed, ds_config = self.context.get_trial_seed(), self.resolved.ds_config
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        on = [dtypes[name] for name in dtypes if ds_config.get(name, {}).get("enabled") is True]
        model = build_model(
            self.config,
            self.source if to_train else None,
            seed=seed,
            dtype=on[0] if on and to_train else torch.float32,
            zero3=ds_config if to_train and self.resolved.zero_stage == 3 else None,
            attention=self.sequence.attention(self.options.attn_implementation or "sdpa"),
        )
        if self.sequence.size > 1 and not on_meta_device():
            check_masks(model)
        if self.options.activation_checkpointing:
            enable_activation_checkpointing(model)
            # Only what has an input with a gradient is computed again: so must the first block, where it is frozen.
            model.enable_input_require_grads()
        return model if self.lora is None else with_lora(model, self.lora, seed=seed)

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model)

    def loss(self, model: Any, batch: Any) -> torch.Tensor | dict[str, torch.Tensor]:
        loss, balance = self._losses(model, batch)
        if balance is None:
            return loss
        # Of a mixture of experts: tokens should go to all of them alike.
        weighted = float(self.config.router_aux_loss_coef) * balance
        return {"loss": loss + weighted, "token_loss": loss.detach(), "balance_loss": balance.detach()}

    def _losses(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The mean loss of a token; of a mixture of experts with ``output_router_logits``, that of their balance."""
        tokens_BT, targets_BT = batch
        positions = {}
        if self.sequence.size > 1:
            positions_T = self.sequence.positions(tokens_BT.shape[1], tokens_BT.device)
            positions["position_ids"] = positions_T.expand_as(tokens_BT)
        output = model(input_ids=tokens_BT, use_cache=False, **positions)
        loss = next_token_loss(output.logits, targets_BT, self.sequence)
        return loss, getattr(output, "aux_loss", None)

    def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"validation_loss": self._losses(model, batch)[0]}

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation)

    def tokens_per_sample(self) -> int:
        return self.options.sequence_length

    def export_files(self, folder: Path) -> None:
        self.data.export_tokenizer(folder)
        if self.source is not None:
            export_generation_config(self.source, folder)
