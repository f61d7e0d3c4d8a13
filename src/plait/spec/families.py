"""Model families as a table: how a Hugging Face `config.json` says what `ModelSpec` says.

The names of the weights are in models/hf.py, in a table with the same rows. A key that would change the computation
and is not understood is refused by name; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from plait.spec.errors import InvalidRun, Violation
from plait.spec.experts import TRAINING
from plait.spec.model import ModelSpec, RopeScaling, violations

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One row: `fixed` fields of ModelSpec, `keys` as pairs (field, config key; "moe.count" is a field of `moe`), the
    names of activations under key `activation`, `defaults` for keys that a file may lack, `only`, the values of further
    keys that plait can build, and `derived`, keys that follow from others.
    """

    architecture: str
    fixed: Mapping[str, object]
    keys: tuple[tuple[str, str], ...]
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "swiglu"})
    defaults: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()
    also: Mapping[str, str] = field(default_factory=dict)  # other names of keys
    ffn_ratio: int | None = None  # ffn / hidden where the file does not say ffn
    grouped: bool = False  # whether key topk_method says if groups count

    @property
    def rotary(self) -> bool:
        return self.fixed.get("positions") != "learned"


_LLAMA_KEYS = (
    ("vocab", "vocab_size"),
    ("hidden", "hidden_size"),
    ("layers", "num_hidden_layers"),
    ("heads", "num_attention_heads"),
    ("kv_heads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
    ("ffn", "intermediate_size"),
    ("max_sequence", "max_position_embeddings"),
    ("norm_eps", "rms_norm_eps"),
    ("tied", "tie_word_embeddings"),
    ("attention_dropout", "attention_dropout"),
)
_BIAS_KEYS = (("qkv_bias", "attention_bias"), ("out_bias", "attention_bias"))
_GPT2_KEYS = (
    ("vocab", "vocab_size"),
    ("hidden", "n_embd"),
    ("layers", "n_layer"),
    ("heads", "n_head"),
    ("kv_heads", "n_head"),
    ("ffn", "n_inner"),
    ("max_sequence", "n_positions"),
    ("norm_eps", "layer_norm_epsilon"),
    ("tied", "tie_word_embeddings"),
    ("dropout", "resid_pdrop"),
    ("dropout", "embd_pdrop"),
    ("attention_dropout", "attn_pdrop"),
)
_GPT2_DEFAULTS = {
    **{"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}
_GPT2_ONLY = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_QWEN_ONLY = {"use_sliding_window": (False,), "layer_types": ("full_attention",)}

_QWEN_MOE_ONLY = {**_QWEN_ONLY, "mlp_only_layers": ()}
_LATENT_KEYS = (
    ("latent.q_rank", "q_lora_rank"),
    ("latent.kv_rank", "kv_lora_rank"),
    ("latent.kept", "qk_nope_head_dim"),
    ("latent.rotated", "qk_rope_head_dim"),
    ("latent.value", "v_head_dim"),
)
_DEEPSEEK_KEYS = (
    *(row for row in _LLAMA_KEYS if row[0] != "head_dim"),
    *_LATENT_KEYS,
    ("moe.count", "n_routed_experts"),
    ("moe.top_k", "num_experts_per_tok"),
    ("moe.ffn", "moe_intermediate_size"),
    ("moe.shared", "n_shared_experts"),
    ("moe.first_dense", "first_k_dense_replace"),
    ("moe.scale", "routed_scaling_factor"),
    ("moe.groups", "n_group"),
    ("moe.top_groups", "topk_group"),
)
_DEEPSEEK_ONLY = {"attention_bias": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)}
_DEEPSEEK_DERIVED = frozenset({"head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"})

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"norm": "layer", "positions": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True},
        _GPT2_KEYS,
        activation="activation_function",
        activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        defaults=_GPT2_DEFAULTS,
        only=_GPT2_ONLY,
        ffn_ratio=4,
    ),
    "llama": Family("LlamaForCausalLM", {}, (*_LLAMA_KEYS, *_BIAS_KEYS, ("mlp_bias", "mlp_bias"))),
    "mistral": Family(
        "MistralForCausalLM", {}, (*_LLAMA_KEYS, ("window", "sliding_window")), defaults={"sliding_window": 4096}
    ),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, _LLAMA_KEYS, only=_QWEN_ONLY),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        (*_LLAMA_KEYS, *_BIAS_KEYS),
        defaults={"head_dim": 128},
        only=_QWEN_ONLY,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {},
        (
            *(*_LLAMA_KEYS, ("window", "sliding_window"), ("moe.count", "num_local_experts")),
            *(("moe.top_k", "num_experts_per_tok"), ("moe.ffn", "intermediate_size")),
        ),
        only={"router_jitter_noise": (0.0,)},
        also={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        (
            *(*_LLAMA_KEYS, *_BIAS_KEYS, ("moe.count", "num_experts"), ("moe.top_k", "num_experts_per_tok")),
            ("moe.every", "decoder_sparse_step"),
            *(("moe.ffn", "moe_intermediate_size"), ("moe.normalise", "norm_topk_prob")),
        ),
        defaults={"norm_topk_prob": False},
        only=_QWEN_MOE_ONLY,
        also={"num_local_experts": "num_experts"},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {"moe.normalise": False, "latent.interleaved": True},
        _DEEPSEEK_KEYS,
        defaults={"topk_method": "greedy"},
        only={
            **{**_DEEPSEEK_ONLY, "scoring_func": ("softmax",), "norm_topk_prob": (False,)},
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        derived=_DEEPSEEK_DERIVED,
        grouped=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {"moe.scores": "sigmoid", "moe.bias": True, "moe.group_score": "top2"},
        (*_DEEPSEEK_KEYS, ("moe.normalise", "norm_topk_prob"), ("latent.interleaved", "rope_interleave")),
        only={**_DEEPSEEK_ONLY, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        # The layers that predict further tokens stand beside the decoder, and plait leaves them out.
        derived=_DEEPSEEK_DERIVED | {"num_nextn_predict_layers", "num_mtp_layers"},
    ),
}

_NEEDED = {"vocab", "hidden", "layers", "heads", "ffn", "max_sequence", "norm_eps"}
_NEEDED |= {"moe.count", "moe.top_k", "moe.ffn", "latent.kv_rank", "latent.kept", "latent.rotated", "latent.value"}
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
    "yarn": {"factor": "factor", "original_max_position_embeddings": "original_max_positions"},
}
_YARN_KEYS = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}  # which a file may lack; named alike
_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
# Keys that do not change what the weights compute. Qwen's window keys would, with use_sliding_window alone.
_HARMLESS = {
    *("architectures", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "pretraining_tp"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "task_specific_params", "n_ctx", "reorder_and_upcast_attn"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"),
}


def from_hf_config(config: Config) -> ModelSpec:
    """A `config.json` as a ModelSpec. Raises InvalidRun with every key that is missing, unknown or unsupported."""
    name = config.get("model_type")
    if found := unknown_family("model_type", name):
        raise InvalidRun(found, "config.json")
    family = FAMILIES[str(name)]
    config = {family.also.get(key, key): value for key, value in config.items()}
    fields, found = _fields(family, {**family.defaults, **config})
    found += _unknown_keys(family, config)
    if family.rotary:
        rope, refused = _rope(config)
        fields |= rope
        found += refused
    if found:
        raise InvalidRun(found, "config.json")
    try:
        spec = ModelSpec.model_validate(_nested({"family": name, **family.fixed, **fields}))
    except ValidationError as error:
        raise InvalidRun(_wrong_types(family, error), "config.json") from error
    if broken := violations(spec):
        raise InvalidRun(broken, "config.json")
    return spec


def unknown_family(key: str, name: object) -> list[Violation]:
    """That `name` is no row of the table, under the key that says it; nothing where it is one."""
    if isinstance(name, str) and name in FAMILIES:
        return []
    return [Violation(key, f"{name!r} is not a family that plait knows", "known: " + ", ".join(FAMILIES))]


def _wrong_types(family: Family, error: ValidationError) -> list[Violation]:
    """Values that are none of their field's, under the keys of the file."""
    keys = dict(family.keys)
    found = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"])
        key = keys.get(field, field)
        found.append(Violation(key, f"is {one['input']!r}: {one['msg'][:1].lower()}{one['msg'][1:]}"))
    return found


def to_hf_config(spec: ModelSpec) -> Config:
    """The inverse. Raises InvalidRun naming each field that the family cannot express.

    Residual dropout, init_std and what balances experts are left out where the family has no key: they say nothing
    about trained weights.
    """
    if found := unknown_family("model.family", spec.family):
        raise InvalidRun(found)
    family = FAMILIES[spec.family]
    config: Config = {"model_type": spec.family, "architectures": [family.architecture]}
    config |= {key: _value(spec, name) for name, key in family.keys}
    if family.grouped and spec.moe is not None:
        config["topk_method"] = "greedy" if spec.moe.groups == 1 else "group_limited_greedy"
    config[family.activation] = next((t for t, ours in family.activations.items() if ours == spec.mlp), None)
    if family.rotary:
        config |= {"rope_theta": spec.rope_theta, "rope_scaling": _scaling_table(spec.rope_scaling)}
    free: dict[str, Any] = dict.fromkeys({"init_std", "dropout"} - {name for name, _ in family.keys}, True)
    free["moe"] = set(TRAINING)
    back = from_hf_config(config).model_dump(exclude=free)
    lost = [(name, value) for name, value in spec.model_dump(exclude=free).items() if back[name] != value]
    if lost:
        why = f"the family {spec.family} cannot express"
        raise InvalidRun(Violation(f"model.{name}", f"is {value}, which {why}") for name, value in lost)
    return config


def _nested(fields: Config) -> Config:
    """{"moe.count": 8} -> {"moe": {"count": 8}}."""
    nested: Config = {}
    for name, value in fields.items():
        part, dot, inner = name.partition(".")
        if dot:
            nested.setdefault(part, {})[inner] = value
        else:
            nested[name] = value
    return nested


def _value(spec: ModelSpec, name: str) -> Any:
    """The field of that name; None where the part that it belongs to is not there."""
    part, dot, inner = name.partition(".")
    value = getattr(spec, part)
    return getattr(value, inner) if dot and value is not None else value


def _fields(family: Family, values: Config) -> tuple[Config, list[Violation]]:
    """Fields of ModelSpec that the keys give, and what stands in the way."""
    fields: Config = {}
    found = []
    for name, key in family.keys:
        value = values.get(key)
        if value is not None and fields.setdefault(name, value) != value:
            found.append(Violation(key, f"is {value}, where another key says {fields[name]}; plait has one {name}"))
        if value is None and name == "ffn" and family.ffn_ratio is not None:
            hidden = fields.get("hidden")
            fields[name] = family.ffn_ratio * hidden if isinstance(hidden, int) else hidden
        elif value is None and name in _NEEDED:
            found.append(Violation(key, "is missing"))
    if family.grouped and values.get("topk_method") == "greedy":
        fields |= {"moe.groups": 1, "moe.top_groups": 1}
    activation = values.get(family.activation) or next(iter(family.activations))
    fields["mlp"] = family.activations.get(activation) if isinstance(activation, str) else None
    if fields["mlp"] is None:
        can = " or ".join(family.activations)
        found.append(Violation(family.activation, f"is {activation!r}, and plait can only build {can}"))
    return fields, found


def _unknown_keys(family: Family, config: Config) -> Iterator[Violation]:
    known = {key for _, key in family.keys} | {family.activation} | _HARMLESS | family.derived
    known |= _ROPE_KEYS if family.rotary else set()
    for key, value in config.items():
        if value is None or key in known:
            continue
        can = family.only.get(key)
        if can is None:
            yield Violation(key, f"is {value!r}, a key that plait does not know for this family")
        elif any(v not in can for v in (value if isinstance(value, list) else [value])):
            yield Violation(key, f"is {value!r}, and plait can only build {can[0] if can else []!r}")


def _rope(config: Config) -> tuple[Config, list[Violation]]:
    """Rotary fields from either spelling: rope_theta beside rope_scaling (transformers 4), or one table (5)."""
    tables = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    if no_table := [key for key, value in tables.items() if not isinstance(value, dict)]:
        return {}, [Violation(key, f"is {tables[key]!r}, where a table is needed") for key in no_table]
    table = {**tables["rope_scaling"], **tables["rope_parameters"]}
    theta = table.pop("rope_theta", config.get("rope_theta") or 10000.0)
    old, new = table.pop("type", "default"), table.pop("rope_type", None)
    kind = new or old
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        known = ", ".join(_SCALING_KEYS)
        return {}, [Violation("rope_scaling", f"{kind!r} is a kind that plait does not know", f"known: {known}")]
    keys = _SCALING_KEYS[kind]
    found = [Violation(f"rope_scaling.{key}", "is missing") for key in keys if key not in table]
    more = _YARN_KEYS & table.keys() if kind == "yarn" else set()
    left = table.keys() - keys - more
    found += [Violation(f"rope_scaling.{key}", f"is a key that {kind!r} does not have") for key in left]
    if found or kind == "default":
        return {"rope_theta": theta}, found
    scaling = {"kind": kind, **{name: table[key] for key, name in keys.items()}}
    scaling |= {key: table[key] for key in more if table[key] is not None}
    return {"rope_theta": theta, "rope_scaling": scaling}, []


def _scaling_table(scaling: RopeScaling | None) -> Config | None:
    if scaling is None:
        return None
    names = {**_SCALING_KEYS[scaling.kind], **{key: key for key in _YARN_KEYS if scaling.kind == "yarn"}}
    values = {key: getattr(scaling, name) for key, name in names.items()}
    return {"rope_type": scaling.kind} | {key: value for key, value in values.items() if value}
