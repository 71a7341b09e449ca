"""Writes `determined_ds/config/deepspeed_keys.json`: every key the installed DeepSpeed reads from its JSON.

    python tests/config/deepspeed/generate_deepspeed_keys.py [PATH]

The file is a JSON Schema of draft 7 with four keywords more: `ignoreCase` (`enum` folds case), `deprecated` (what
to use instead), `removed` (DeepSpeed raises with this message) and `model` (the pydantic class behind an object).
DeepSpeedConfig is run on dicts that record what is asked of them, and with which default. What a run cannot show
stands in the tables; a key without a type, and an override that matches no key, are errors.
"""

import contextlib
import copy
import enum
import inspect
import json
import logging
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # The same answer on every machine.

import deepspeed
import pydantic
from deepspeed.module_inject import auto_ep_config, autotp_config
from deepspeed.moe.ep_experts import EXPERT_ACTIVATIONS
from deepspeed.ops import adam, lamb, lion
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.runtime import config as ds
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.model_checkpointing import constants as ckpt
from deepspeed.utils.logging import log_levels

Node = dict[str, Any]
DEFAULT_PATH = Path(__file__).parents[3] / "determined_ds" / "config" / "deepspeed_keys.json"
PROBE = "__probe__"
SEED: Node = {"train_batch_size": 1, "optimizer": {"type": "adam"}, "scheduler": {"type": "WarmupLR"}}
DEFAULT_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
TYPE_NAMES = DEFAULT_TYPES | {tuple: "array", Path: "string", dict: "object", type(None): "null"}


def node(type_names: str, **facts: Any) -> Node:
    """A node from space-separated type names; an enum gains null where null is allowed."""
    if "enum" in facts:
        facts["enum"] = [*facts["enum"], *[None] * ("null" in type_names.split())]
    return ({"type": sorted(type_names.split())} if type_names else {}) | facts


def table(rows: Mapping[str, Node]) -> dict[str, Node]:
    """Nodes by path, of rows with space-separated paths; ``a.{b c}`` stands for two."""
    nodes: dict[str, Node] = {}
    for paths, facts in rows.items():
        for section, keys in re.findall(r"([\w.]+)(?:{([^}]+)})?", paths):
            nodes |= {f"{section}{key}": facts for key in keys.split() or [""]}
    return nodes


FOLD = {"ignoreCase": True}
COUNT = node("integer null", exclusiveMinimum=0, maximum=2**31 - 1)
RATE = {"type": ["number", "array", "null"]}  # A list has one a parameter group.
DTYPES = [value for dtype in ds.DtypeEnum for value in dtype._all_values if isinstance(value, str)]
WRITER_UNITS = ckpt.CHECKPOINT_DATA_PARALLEL_UNITS
ZERO, SAMPLING = "zero_optimization", "data_efficiency.data_sampling"

# What the defaults and annotations do not tell. Ranges and enums are those that DeepSpeed itself checks.
OVERRIDES = table(
    {
        "gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu": COUNT,
        "steps_per_print": node("number null", exclusiveMinimum=0),  # Accelerate writes infinity.
        """vocabulary_size activation_checkpointing.number_checkpoints autotuning.max_train_batch_size
        autotuning.model_info.{hidden_size num_layers num_params}""": node("integer null"),
        f"{SAMPLING}.dynamic_batching.max_batch_size": node("integer"),
        "expert_parallel.{comm_max_tokens_per_rank comm_qp_margin} fp16.loss_scale": {"minimum": 0},
        """expert_parallel.{comm_num_sm num_expert_groups num_limited_groups}
        zero_optimization.zenflow.update_interval""": {"minimum": 1},
        "expert_parallel.load_balance_coeff": node("null"),
        "optimizer.legacy_fusion": node("boolean"),
        """flops_profiler.output_file optimizer.type scheduler.type autotuning.{metric_path model_info_path}
        expert_parallel.expert_w3""": node("null string"),
        "pipeline.stages": node("integer string"),
        f"{SAMPLING}.curriculum_learning.curriculum_metrics": node("object"),
        """aio bf16 expert_parallel autotuning.{arg_mappings model_info} checkpoint.writer optimizer.params
        scheduler.params zero_optimization.leaf_module""": node("null object"),
        "datastates_ckpt": node("boolean null object"),  # Read by the package datastates.
        "torch_autocast.lower_precision_safe_modules": node("array"),
        """data_types.keep_in_fp32_modules
        zero_optimization.leaf_module.{classes names name_suffixes}""": node("array string"),
        "bfloat16": {"deprecated": "bf16"},
        "communication_data_type seq_parallel_communication_data_type": node(
            "null string", enum=["fp32", "fp16", "bf16"], **FOLD
        ),
        "data_types.{buffer_dtype grad_accum_dtype param_dtype}": node("null string", enum=DTYPES),
        "torch_autocast.dtype": node("string", enum=DTYPES),
        "log_level": node("null string", enum=log_levels, **FOLD),
        "gradient_allreduce_op": node("string", enum=ds.GRADIENT_ALLREDUCE_OP_SUPPORTED, **FOLD),
        "checkpoint.tag_validation": node("string", enum=ds.CHECKPOINT_TAG_VALIDATION_MODES, **FOLD),
        "checkpoint.writer.data_parallel": node("null string", enum=WRITER_UNITS, **FOLD),
        "checkpoint.writer.type": node("null string", enum=ckpt.CHECKPOINT_WRITER_TYPES, **FOLD),
        "expert_parallel.expert_activation": node("null string", enum=sorted(EXPERT_ACTIVATIONS)),
        "expert_parallel.preset_model": node("null string", enum=sorted(auto_ep_config.PRESET_MODELS)),
        f"{SAMPLING}.dynamic_batching.sequence_picking_order": {"enum": ["random", "seqlen", "dataloader"]},
        "zero_optimization.zenflow.select_strategy": {"enum": ["auto", "step", "epoch"]},
    }
)
# What a run of DeepSpeedConfig does not ask for: read by other files, or only under rare settings.
UNTRACED = table(
    {
        "data_parallel_size sequence_parallel_size": node("integer", minimum=1),
        "allgather_size": node("number", deprecated=f"{ZERO}.allgather_bucket_size"),
        "optimizer.params.max_grad_norm": node("number", deprecated="gradient_clipping"),
        "optimizer.params.{eps lr weight_decay} scheduler.params.{warmup_max_lr warmup_min_lr}": RATE,
        "optimizer.params.betas": node("array null"),
        "scheduler.params.{total_num_steps warmup_num_steps}": node("null number"),
        f"{SAMPLING}.dynamic_batching.max_tokens": node("integer"),
        f"{SAMPLING}.dynamic_batching.metrics_path": node("string"),
        "pipeline.use_reentrant": node("boolean null"),
    }
)
# Sections that are read elsewhere, and take any other key too.
OPEN = {"optimizer.params", "scheduler.params", f"{SAMPLING}.curriculum_learning"}
OPEN |= {"data_efficiency.data_routing.random_ltd"}


def parameters(*kinds: type) -> set[str]:
    """The names that the constructors of optimizers or schedules take from a config."""
    names = {name for kind in kinds for name in [*inspect.signature(kind).parameters][1:]}
    return names - {"adamw_mode", "last_batch_iteration", "max_grad_norm"}  # Given by the engine, or refused.


# Names for torch.optim (as a table: the file must not depend on torch's version), names the engine takes out.
TORCH = {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
ENGINE = {"fp32_optimizer_states", ds.ADAM_W_MODE, ds.TORCH_ADAM_PARAM}
MUON = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, "adam_lr", "muon_lr"}
ADAM = parameters(adam.FusedAdam, adam.DeepSpeedCPUAdam) | TORCH | ENGINE
OPTIMIZERS = {
    ds.ADAM_OPTIMIZER: ADAM,
    ds.ADAMW_OPTIMIZER: ADAM,
    ds.ADAGRAD_OPTIMIZER: parameters(DeepSpeedCPUAdagrad) | TORCH | {"initial_accumulator_value", "lr_decay"},
    ds.LAMB_OPTIMIZER: parameters(lamb.FusedLamb),
    ds.LION_OPTIMIZER: parameters(lion.FusedLion, lion.DeepSpeedCPULion),
    ds.MUON_OPTIMIZER: MUON | ENGINE | {"foreach", "per_head_muon"},
}


class Recorder(dict[str, Any]):
    """A dict that notes in `reads` the path of every key asked of it, with the default if one was given."""

    reads: ClassVar[dict[str, Any]] = {}

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.prefix = prefix
        for key, value in values.items():
            self[key] = Recorder(value, f"{prefix}{key}.") if isinstance(value, dict) else value

    def get(self, key: str, default: Any = None) -> Any:
        if self.reads.get(self.prefix + key) is None:
            self.reads[self.prefix + key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.reads.setdefault(self.prefix + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.reads.setdefault(f"{self.prefix}{key}")
        return super().__contains__(key)

    def keys(self) -> "Recorder":  # type: ignore[override]
        return self  # `key in config.keys()` asks, too.


def trace() -> tuple[dict[str, Any], dict[str, type]]:
    """What DeepSpeedConfig reads, {path: default}, and the pydantic classes it makes of it, {path: class}."""
    models: dict[str, type] = {}
    original: Callable[..., None] = DeepSpeedConfigModel.__init__

    def probed_init(self: Any, **data: Any) -> None:
        if PROBE in data:
            models[data.pop(PROBE)] = type(self)
        original(self, **data)

    tried, todo = set(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS), [""]
    with mock.patch.object(DeepSpeedConfigModel, "__init__", probed_init):
        while todo:
            for path in todo:  # An object at this path: is it looked into?
                here = config = copy.deepcopy(SEED)
                for key in filter(None, path.split(".")):
                    here = child if isinstance(child := here.setdefault(key, {}), dict) else {}
                here[PROBE] = path
                with contextlib.suppress(Exception):
                    ds.DeepSpeedConfig(Recorder(config))
            tried |= set(todo)
            todo = sorted(path for path in Recorder.reads.keys() - tried if PROBE not in path)
    return {path: default for path, default in Recorder.reads.items() if PROBE not in path}, models


def annotation_node(annotation: Any) -> Node:
    """The node of a pydantic field's or dataclass field's annotation; of a pydantic model, one with its fields."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [annotation_node(member) for member in args]
        if not all("type" in member for member in members):
            return {}
        names = {name for member in members for name in member["type"]}
        return {key: fact for member in members for key, fact in member.items()} | {"type": sorted(names)}
    if origin is typing.Literal:
        return node(TYPE_NAMES[type(args[0])], enum=args)
    kind = origin or annotation
    if inspect.isclass(kind) and issubclass(kind, DeepSpeedConfigModel):
        return model_node(kind)
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return node(TYPE_NAMES[kind.__bases__[0]], enum=[member.value for member in kind])
    return node(TYPE_NAMES.get(kind, ""))


def model_node(model: type[pydantic.BaseModel]) -> Node:
    """The node of a pydantic model: fields under name and alias, with ranges and deprecations."""
    limits = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
    keys: Node = {}
    for name, field in model.model_fields.items():
        child = annotation_node(field.annotation)
        for limit in field.metadata:
            child |= {key: getattr(limit, attr) for attr, key in limits.items() if hasattr(limit, attr)}
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("deprecated"):
            child["deprecated"] = extra.get("new_param") or extra.get("deprecated_msg", "")
        keys |= {name: child, field.alias or name: child}
    return node("object", model=model.__name__, properties=keys, additionalProperties=False)


def ensure(root: Node, path: str) -> Node:
    """The node at a dotted path, made with its parents where absent."""
    here = root
    for key in path.split("."):
        here.setdefault("type", ["object"])
        here["additionalProperties"] = False
        here = here.setdefault("properties", {}).setdefault(key, {})
    return here


def known_keys() -> Node:
    """The tree of every key, traced, introspected and tabled."""
    autotp_config.AutoTPConfig.from_dict(Recorder({}, "tensor_parallel.partition_config."))
    reads, models = trace()
    reads |= {f"pipeline.{key}": default for key, default in ds.get_pipeline_config({}).items()}
    root: Node = {}
    for path, model in models.items():
        ensure(root, path).update(model_node(model))
    hints = typing.get_type_hints(auto_ep_config.AutoEPConfig).items()
    autoep = {f"expert_parallel.{key}": annotation_node(hint) for key, hint in hints}
    for path, default in reads.items():
        here, found = ensure(root, path), autoep.get(path, node(DEFAULT_TYPES.get(type(default), "")))
        here.update(found | here)
    unused = [path for path in OVERRIDES if path not in reads and not ensure(root, path)]
    for path, facts in (OVERRIDES | UNTRACED).items():
        ensure(root, path).update(facts)
    root["properties"] |= {key: {"removed": why} for key, why in ds._REMOVED_TOP_LEVEL_CONFIG_KEYS.items()}
    zero_keys = ensure(root, ZERO)["properties"]
    zero_keys |= {key: {"removed": why} for key, why in ds._REMOVED_ZERO_CONFIG_KEYS.items()}
    undecided = [path for path in reads if not {"type", "removed"} & ensure(root, path).keys()]
    if unused or undecided:
        raise SystemExit(f"OVERRIDES that match no key: {unused}; keys without a type: {undecided}")
    for path in OPEN:
        del ensure(root, path)["additionalProperties"]
    return root


def generate() -> str:
    """The text of deepspeed_keys.json for the installed DeepSpeed."""
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    schedules = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    data = known_keys() | {
        "deepspeed_version": deepspeed.__version__.split("+")[0],
        "$schema": "http://json-schema.org/draft-07/schema#",
        "optimizer_types": ds.DEEPSPEED_OPTIMIZERS,
        "optimizer_params": {name: sorted(params) for name, params in OPTIMIZERS.items()},
        "scheduler_types": [*schedules],
        "scheduler_params": {name: sorted(parameters(kind)) for name, kind in schedules.items()},
    }
    text = json.dumps(data, indent=1, sort_keys=True)  # Arrays on one line, so that the file is short:
    return re.sub(r"\[\s*\n[^][{}]*\]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_PATH).write_text(generate(), encoding="utf-8")
