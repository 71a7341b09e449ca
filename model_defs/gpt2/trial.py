"""GPT-2 under DeepSpeed: data parallel with ZeRO, and as a pipeline of the same blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from determined_ds import DataLoader, DataParallelTrial, PipelineTrial, ReconciledTrial
from model_defs.common.parameters import decay_groups
from model_defs.common.sections import parse_section
from model_defs.common.text import load_text, next_token_loss
from model_defs.gpt2.model import (
    GPT2,
    Options,
    gpt2_config,
    load_initial_weights,
    parameters_by_huggingface_name,
    pipeline_layers,
)
from model_defs.gpt2.pretrained import load_pretrained


class _GPT2(ReconciledTrial):
    """What both forms share: the text, the configuration of the model, the weights it starts from."""

    def prepare(self) -> None:
        hparams = self.context.get_hparams()
        own = self.options = parse_section(Options, hparams)
        switch, interval = own.activation_checkpointing, own.activation_checkpoint_interval
        self.activation_checkpoint_interval = interval if switch is None else switch * max(1, interval)
        self.data = load_text(self.context.get_data_config(), own.sequence_length)
        num_tokens, attention = self.data.vocab_size, self.sequence.attention()
        self.config = gpt2_config(own, num_tokens=num_tokens, attention=attention)

    def start_weights(self, model: torch.nn.Module) -> None:
        """Fill the model, or one rank's part of it, with pretrained weights or with seeded random ones."""
        if next(model.parameters()).is_meta:
            return  # only its sizes are needed
        if self.options.pretrained:
            load_pretrained(model, self.options.pretrained)
        else:
            load_initial_weights(model, self.config, self.context.get_trial_seed())

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model)

    def weight_names(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return parameters_by_huggingface_name(model)

    def huggingface_config(self) -> Any:
        config = copy.deepcopy(self.config)
        config.architectures = ["GPT2LMHeadModel"]
        config.use_cache = True  # for those who generate
        return config

    def export_files(self, folder: Path) -> None:
        self.data.export_tokenizer(folder)

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation)

    def tokens_per_sample(self) -> int:
        return self.options.sequence_length


class GPT2Trial(_GPT2, DataParallelTrial):
    """GPT-2, replicated; ranks may share sequences."""

    sequence_parallel = True

    def build_model(self) -> torch.nn.Module:
        model = GPT2(self.config)
        model.activation_checkpoint_interval = self.activation_checkpoint_interval
        self.start_weights(model)
        return model

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        tokens_BT, targets_BT = batch
        positions_T = self.sequence.positions(tokens_BT.shape[1], tokens_BT.device)
        return next_token_loss(model(tokens_BT, positions_T), targets_BT, self.sequence)


class GPT2PipelineTrial(_GPT2, PipelineTrial):
    """GPT-2, its blocks spread over pipeline stages; the embedding is tied to the head."""

    checkpointable_layers = ["Block"]  # noqa: RUF012 — DeepSpeed wants a list
    # By number of blocks. By parameters, DeepSpeed builds the whole model on every rank to count them.
    partition_method = "type:Block"

    def build_layers(self) -> list[LayerSpec]:
        return pipeline_layers(self.config)

    def load_weights(self, module: PipelineModule) -> None:
        self.start_weights(module)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return next_token_loss(outputs, targets)
