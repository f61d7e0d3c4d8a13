"""Weights under Hugging Face names, by table: one row per kind of tensor, one table per family of spec/families.py.

Reads and writes mappings of names to tensors; files are someone else's. Every name is accounted for: what is missing,
unknown or contradictory stops.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from plait.models.decoder import Decoder, logical_tensors
from plait.spec.errors import DataError
from plait.spec.model import ModelSpec

Rectangle = tuple[tuple[int, int], ...]  # (start, stop) along each dim
V = TypeVar("V")


@dataclass(frozen=True)
class Row:
    """Our tensors, stacked along dim 0, are theirs; transposed where theirs is stored (inputs, outputs).

    `{i}` stands for the layer and `{p}` for weight or bias. With an `{e}`, theirs are tensors of their own for each
    expert, and ours is all of them stacked.
    """

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False


def _llama(ours: str, theirs: str) -> Row:
    return Row((f"blocks.{{i}}.{ours}.{{p}}",), f"model.layers.{{i}}.{theirs}.{{p}}")


def _experts(ours: str, theirs: str) -> Row:
    return Row((f"blocks.{{i}}.mlp.experts.{ours}",), f"model.layers.{{i}}.{theirs}.weight")


def _gpt2(ours: str, theirs: str, transposed: bool = True) -> Row:
    return Row(
        tuple(f"blocks.{{i}}.{o}.{{p}}" for o in ours.split()), f"transformer.h.{{i}}.{theirs}.{{p}}", transposed
    )


_LLAMA = (
    Row(("embedding.tokens.weight",), "model.embed_tokens.weight"),
    _llama("attention_norm", "input_layernorm"),
    _llama("attention.q", "self_attn.q_proj"),
    _llama("attention.k", "self_attn.k_proj"),
    _llama("attention.v", "self_attn.v_proj"),
    _llama("attention.q_norm", "self_attn.q_norm"),
    _llama("attention.k_norm", "self_attn.k_norm"),
    _llama("attention.out", "self_attn.o_proj"),
    _llama("mlp_norm", "post_attention_layernorm"),
    _llama("mlp.gate", "mlp.gate_proj"),
    _llama("mlp.up", "mlp.up_proj"),
    _llama("mlp.down", "mlp.down_proj"),
    Row(("head.norm.weight",), "model.norm.weight"),
    Row(("head.projection.weight",), "lm_head.weight"),
)
_MIXTRAL = (
    *_LLAMA,
    Row(("blocks.{i}.mlp.router.weight",), "model.layers.{i}.block_sparse_moe.gate.weight"),
    _experts("gate", "block_sparse_moe.experts.{e}.w1"),
    _experts("up", "block_sparse_moe.experts.{e}.w3"),
    _experts("down", "block_sparse_moe.experts.{e}.w2"),
)
_QWEN_MOE = (
    *_LLAMA,
    Row(("blocks.{i}.mlp.router.weight",), "model.layers.{i}.mlp.gate.weight"),
    *(_experts(name, f"mlp.experts.{{e}}.{name}_proj") for name in ("gate", "up", "down")),
)
_DEEPSEEK = (
    *_QWEN_MOE,
    Row(("blocks.{i}.mlp.router.bias",), "model.layers.{i}.mlp.gate.e_score_correction_bias"),
    *(_llama(f"mlp.shared.{name}", f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")),
    _llama("attention.q_down", "self_attn.q_a_proj"),
    _llama("attention.q_latent_norm", "self_attn.q_a_layernorm"),
    _llama("attention.q_up", "self_attn.q_b_proj"),
    Row(
        ("blocks.{i}.attention.kv_down.weight", "blocks.{i}.attention.k_rotated.weight"),
        "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    ),
    _llama("attention.kv_latent_norm", "self_attn.kv_a_layernorm"),
    _llama("attention.kv", "self_attn.kv_b_proj"),
)
_GPT2 = (
    Row(("embedding.tokens.weight",), "transformer.wte.weight"),
    Row(("embedding.positions.weight",), "transformer.wpe.weight"),
    _gpt2("attention_norm", "ln_1", False),
    _gpt2("attention.q attention.k attention.v", "attn.c_attn"),
    _gpt2("attention.out", "attn.c_proj"),
    _gpt2("mlp_norm", "ln_2", False),
    _gpt2("mlp.up", "mlp.c_fc"),
    _gpt2("mlp.down", "mlp.c_proj"),
    Row(("head.norm.{p}",), "transformer.ln_f.{p}"),
    Row(("head.projection.weight",), "lm_head.weight"),
)
NAMES: dict[str, tuple[Row, ...]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}

HEAD = "lm_head.weight"
# Buffers that old files carry; they follow from the spec.
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def from_hf(state: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors under our global names. Raises DataError naming what is missing, left over, or of another shape."""
    state = _with_prefix(state, spec)
    if spec.tied:
        state = _fill_tied(state, spec)
    ours: dict[str, Tensor] = {}
    shapes = {t.name: t.shape for t in spec.parameters()}
    rows = [(row, _names(row, spec)) for row in _rows(spec)]
    known = {name for _, names in rows for name in names}
    _refuse("lacks", known - state.keys())
    _refuse("has unknown tensors", state.keys() - known)
    for row, names in rows:
        first = state[names[0]].T if row.transposed else state[names[0]]
        theirs = torch.stack([state[name] for name in names]) if "{e}" in row.theirs else first
        wanted = (sum(shapes[name][0] for name in row.ours), *shapes[row.ours[0]][1:])
        if tuple(theirs.shape) != wanted:
            raise DataError(f"{row.theirs} is {tuple(theirs.shape)} as stacked rows, and the model needs {wanted}")
        ours |= zip(row.ours, torch.split(theirs, [shapes[name][0] for name in row.ours]), strict=True)
    return ours


def to_hf(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """The inverse: tensors under Hugging Face names. A tied head is written once, as the embedding."""
    theirs: dict[str, Tensor] = {}
    for row in _rows(spec):
        whole = torch.cat([tensors[name] for name in row.ours])
        parts = whole.unbind() if "{e}" in row.theirs else [whole.T if row.transposed else whole]
        theirs |= {name: part.contiguous() for name, part in zip(_names(row, spec), parts, strict=True)}
    return theirs


class Origin(NamedTuple):
    """Where one of our tensors lies in their files: rows from `start` on of `name` (transposed or not), or, where
    `experts` are several names, each of them one index of our first dim."""

    name: str
    experts: tuple[str, ...]
    start: int
    transposed: bool

    def read(self, rectangle: Rectangle, read: Callable[[str, Rectangle], Tensor]) -> Tensor:
        """A rectangle of our tensor, from `read(their name, rectangle of theirs)`."""
        (low, high), *rest = rectangle
        if self.experts:
            return torch.stack([read(name, tuple(rest)) for name in self.experts[low:high]])
        rows = (low + self.start, high + self.start)
        return read(self.name, (*rest, rows)).T if self.transposed else read(self.name, (rows, *rest))


def origins(spec: ModelSpec) -> dict[str, Origin]:
    """Our name -> where it lies. What a router remembers of its load lies nowhere."""
    shapes = {t.name: t.shape for t in spec.parameters()}
    found = {}
    for row in _rows(spec):
        starts = itertools.accumulate((shapes[name][0] for name in row.ours), initial=0)
        names = _names(row, spec)
        for name, start in zip(row.ours, starts, strict=False):
            found[name] = Origin(names[0], tuple(names) if "{e}" in row.theirs else (), start, row.transposed)
    return found


def names_in(files: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Their name of each tensor that the model needs -> its name in the files. A tied table may stand at either place.

    Raises DataError naming what is missing or unknown.
    """
    found = _with_prefix({name: name for name in files}, spec)
    table, head = NAMES[spec.family][0].theirs, found.get(HEAD)
    if spec.tied and head is not None:
        found.setdefault(table, found.pop(HEAD))
        found.pop(HEAD, None)
    known = {name for row in _rows(spec) for name in _names(row, spec)}
    _refuse("lacks", known - found.keys())
    _refuse("has unknown tensors", found.keys() - known)
    return found


def shapes_in_hf(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Their name -> its shape, and our tensors that lie in it, in the order of the model."""
    shapes = {t.name: t.shape for t in spec.parameters()}
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for row in _rows(spec):
        rows, *rest = sum(shapes[name][0] for name in row.ours), *shapes[row.ours[0]][1:]
        shape = tuple(rest) if "{e}" in row.theirs else (*rest, rows) if row.transposed else (rows, *rest)
        found |= {name: (shape, row.ours) for name in _names(row, spec)}
    return found


@torch.no_grad()
def load_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Fill a whole Decoder in place from tensors under our global names."""
    held = logical_tensors(model.spec, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    loads = {t.name: 1 / t.size for t in model.spec.parameters() if t.role == "router_load"}
    _refuse("lacks", held.keys() - tensors.keys() - loads.keys())
    for name, value in held.items():
        value.copy_(tensors[name] if name in tensors else torch.full_like(value, loads[name]))


def _rows(spec: ModelSpec) -> Iterator[Row]:
    """The family's rows with layer and kind filled in, in so far as the model has them."""
    names = {t.name for t in spec.parameters()}
    for row in NAMES[spec.family]:
        layers = range(spec.layers) if "{i}" in row.theirs else (0,)
        kinds = ("weight", "bias") if "{p}" in row.theirs else ("",)
        for i, p in itertools.product(layers, kinds):
            ours = tuple(name.format(i=i, p=p) for name in row.ours)
            if names.issuperset(ours):
                yield Row(ours, row.theirs.format(i=i, p=p, e="{e}"), row.transposed and p != "bias")


def _names(row: Row, spec: ModelSpec) -> list[str]:
    """Their names of a filled row: one, or one for each expert."""
    experts = spec.moe.count if spec.moe is not None and "{e}" in row.theirs else 1
    return [row.theirs.format(e=e) for e in range(experts)]


def _with_prefix(state: Mapping[str, V], spec: ModelSpec) -> dict[str, V]:
    """Names as a causal language model has them: files of the bare body lack the first word.

    DeepSeek-V3's layer after the last predicts a further token, and is no part of the decoder.
    """
    prefix = NAMES[spec.family][0].theirs.split(".")[0] + "."
    further = re.compile(rf"model\.layers\.{spec.layers}\.") if spec.family == "deepseek_v3" else None
    state = {
        name: value
        for name, value in state.items()
        if not name.endswith(_DERIVED) and not (further and further.match(name))
    }
    if any(name.startswith(prefix) for name in state):
        return state
    return {name if name == HEAD else prefix + name: value for name, value in state.items()}


def _fill_tied(state: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Either place of a tied tensor will do; two different values contradict the spec."""
    table = NAMES[spec.family][0].theirs
    head, embedding = state.pop(HEAD, None), state.get(table)
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise DataError(f"{HEAD} and {table} differ, and model.tied says that they are one", "set model.tied=false")
    if embedding is None and head is not None:
        state[table] = head
    return state


def _refuse(what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise DataError(f"the file of weights {what}: {', '.join(names[:5])}{more}")
