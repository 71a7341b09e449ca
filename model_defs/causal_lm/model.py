"""A causal language model, built whole or partitioned as it is built (ZeRO 3), with the weights to start from."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import transformers
from torch import nn

from model_defs.causal_lm.config import CONFIG_KEY, MODEL_KEY, SIZES
from model_defs.common.huggingface import first_line, misfits, quiet
from model_defs.common.parameters import seed_of
from model_defs.common.sections import config_error

# On the meta device there is nothing to mask: attention of this name is given no mask, which would be computed
# from the values of tensors.
UNMASKED = "sdpa_unmasked"


def build_model(
    config: Any,
    source: str | None,
    *,
    seed: int,
    dtype: torch.dtype,
    zero3: dict[str, Any] | None,
    attention: str = "sdpa",
) -> Any:
    """A model with the weights to start from.

    Args:
        config: Its configuration.
        source: Where its weights are; None: drawn at random, the same whatever strategy trains them.
        seed: Of the draw.
        dtype: What loaded weights are turned into.
        zero3: The DeepSpeed configuration of ZeRO 3, to hold no more than this rank's share of each parameter; of
            weights that are loaded rank 0 reads the values, and hands each parameter on. None: the model is whole.
        attention: The attention kernel, by transformers' name.

    Returns:
        A ``transformers.PreTrainedModel``, in evaluation mode where it was loaded.

    Raises:
        ConfigError: The weights cannot be read, or are of another shape than the configuration says.
    """
    kind = transformers.AutoModelForCausalLM
    if on_meta_device():
        transformers.AttentionInterface.register(UNMASKED, transformers.AttentionInterface()["sdpa"])
        return kind.from_config(config, attn_implementation=UNMASKED)
    partitioning = None
    if zero3 is not None:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

        # While it lives, transformers builds under deepspeed.zero.Init.
        partitioning = HfDeepSpeedConfig(zero3)
    try:
        with quiet():
            if source is not None:
                return _load(
                    config,
                    source,
                    partitioned=partitioning is not None,
                    dtype=dtype,
                    attn_implementation=attention,
                )
            try:
                model = kind.from_config(config, attn_implementation=attention)
            except Exception as error:  # What it raises differs by the model.
                message = f"cannot be built: {first_line(error)}"
                raise config_error(CONFIG_KEY, config.model_type, message, SIZES) from error
            load_initial_weights(model, seed)
            return model
    finally:
        if partitioning is not None:
            unset_hf_deepspeed_config()


def on_meta_device() -> bool:
    """Whether only the sizes of what is built are needed."""
    return torch.empty(0).is_meta


def _load(config: Any, source: str, *, partitioned: bool, **how: Any) -> Any:
    model, reason = None, ""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            output_loading_info=True,
            # They are reported below; under ZeRO 3, transformers rejects them itself.
            ignore_mismatched_sizes=not partitioned,
            **how,
        )
        reason = misfits(info)
    except (
        Exception
    ) as error:  # What it raises differs by the file that is missing, broken or of another model.
        reason = first_line(error)
    if partitioned:  # rank 0 alone reads the weights: all say what the first has to say
        reasons: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reasons, reason)
        reason = next((each for each in reasons if each), "")
    if reason:
        message = f"its weights do not load into the model of its config.json: {reason}"
        fix = "a folder that save_pretrained has written; an unfinished copy must be copied again"
        raise config_error(MODEL_KEY, source, message, fix)
    return model


@torch.no_grad()
def load_initial_weights(model: Any, seed: int) -> None:
    """Draw a model's weights by its own rule, the same whether it is whole or partitioned, on any device.

    Each module draws on the CPU in fp32, from a generator of its own that the seed and the module's name decide.
    ``zero.Init`` makes parameters on the GPU and in the engine's precision, where another generator would draw.

    Source: ``initialize_weights_zero3`` of transformers 5.23, whose draw is another than without ZeRO 3.
    """
    from deepspeed import zero

    def visit(module: Any, name: str, rule: Any) -> None:
        for child_name, child in module.named_children():
            own_rule = child._init_weights if isinstance(child, transformers.PreTrainedModel) else rule
            visit(child, f"{name}.{child_name}", own_rule)
        # A rule may write to a child's parameters, too.
        parts = [module, *(c for c in module.children() if not isinstance(c, transformers.PreTrainedModel))]
        parameters = [parameter for part in parts for parameter in part.parameters(recurse=False)]
        with zero.GatheredParameters(parameters, modifier_rank=0), torch.random.fork_rng(devices=[]):
            held = {parameter: parameter.data for parameter in parameters}
            for parameter, data in held.items():
                parameter.data = data.to("cpu", torch.float32, copy=True)
            torch.random.default_generator.manual_seed(seed_of(seed, name))
            try:
                rule(module)
            finally:
                for parameter, data in held.items():
                    data.copy_(parameter.data)
                    parameter.data = data

    visit(model, "", model._init_weights)
    model.tie_weights()


def check_masks(model: nn.Module) -> None:
    """Check that a model attends as the positions of a slice say, as those do that make no masks of their own."""
    masks = hasattr(sys.modules[type(model).__module__], "create_causal_mask")
    if not masks or "position_ids" not in inspect.signature(type(model).forward).parameters:
        message = f"{type(model).__name__} makes its own masks, which do not go by the positions of a slice."
        raise config_error(
            "hyperparameters.sequence_parallel_size", None, message, "sequence_parallel_size: 1"
        )
