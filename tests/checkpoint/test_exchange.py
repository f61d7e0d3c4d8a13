"""To Hugging Face and back: every family, from every layout the same file, and no rank ever holds the whole model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from plait.checkpoint.files import File
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.save import Saver
from plait.checkpoint.shelf import newest
from plait.models.decoder import Decoder
from plait.models.hf import load_weights
from plait.models.where import Where
from plait.parallel.launch import World, launch
from plait.parallel.weights import gather_buffers, gather_whole, pieces_held
from plait.spec.errors import DataError, PlaitError, UsageError
from plait.spec.families import FAMILIES
from plait.spec.fit import fit
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import RunSpec
from plait.train.huggingface import HuggingFace, export, spec_of, take_in
from plait.train.loop import prepare, train_steps
from plait.train.resume import Start
from plait.train.states import facts_of, states_of
from tests.cli.commands import plait
from tests.fixtures import T0, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

transformers = pytest.importorskip("transformers")
T = TypeVar("T")
TINY = {spec.family: name for name, spec in PRESETS.items() if name.endswith("-tiny")}
LAYOUTS: list[dict[str, Any]] = [
    {}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    {"tp": 4, "sequence_parallel": True}, {"dp": 2, "cp": 2, "zero": 2},
]  # fmt: skip


def written(run: RunSpec, shelf: Path) -> None:
    """A checkpoint of the run's first weights, norms and biases random."""

    def save(rank: int, world: int) -> None:
        mine = Rank.of(run)
        saver = Saver(shelf, mine.mesh.group_beside("world"), keep=1)
        saver.start(states_of(mine.step), facts_of(mine.step, 1, None, "none"))
        saver.wait()

    on_ranks(fit(run).world, save)


def with_precision(run: RunSpec, compute: str) -> RunSpec:
    return run.model_copy(update={"precision": run.precision.model_copy(update={"compute": compute})})


def opened(folder: Path, use: Callable[[Any], T], **how: Any) -> T:
    """What `use` finds in the model that transformers opens, in a process of its own: it starts threads for good."""

    def act(rank: int, world: int) -> T:
        return use(transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval().requires_grad_(False))

    return on_ranks(1, act)[0]


def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    return opened(folder, lambda model: model(tokens).logits, **how)


def opens_with_our_logits_and_comes_back(run: RunSpec, tmp_path: Path) -> None:
    """Exported, opened there and read again: the same logits at every position, the same bytes."""
    written(run, tmp_path)
    manifest = newest(tmp_path)
    export(manifest, tmp_path / "theirs")
    tokens = torch.randint(0, run.model.vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    with HuggingFace(tmp_path / "theirs", spec_of(tmp_path / "theirs")) as source:
        ours = {t.name: source.read(t.name, tuple((0, n) for n in t.shape)) for t in run.model.parameters()}
    model = Decoder(run.model, device="cpu").eval()
    load_weights(model, ours)
    with torch.no_grad():
        mine = model.logits(tokens, Where.of(torch.arange(2), 16))
    assert mine.abs().max() > 0.1, "logits that say something"
    assert (mine - logits_of(tmp_path / "theirs", tokens)).abs().max() <= 1e-5
    take_in(tmp_path / "theirs", tmp_path / "back")
    export(read_manifest(tmp_path / "back"), tmp_path / "again")
    for path in (tmp_path / "theirs").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_directory_opens_in_transformers_with_our_logits_and_comes_back_bitwise(
    family: str, tmp_path: Path
) -> None:
    opens_with_our_logits_and_comes_back(run_of(PRESETS[TINY[family]]), tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tp", [2, 1])
def test_b76_four_query_heads_for_each_key_have_the_same_logits_at_every_position_from_any_split(
    tp: int, tmp_path: Path
) -> None:
    model = PRESETS["llama-tiny"].model_copy(update={"heads": 8, "kv_heads": 2, "head_dim": 4})
    opens_with_our_logits_and_comes_back(run_of(model, tp=tp), tmp_path)


EXPORTED: list[tuple[ModelSpec, list[dict[str, Any]]]] = [
    (T0, LAYOUTS),
    (
        PRESETS["mixtral-tiny"],
        [{}, {"dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2, "zero": 3}, {"pp": 2, "ep": 2, "dp": 2}],
    ),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "layouts"), EXPORTED, ids=["dense", "experts"])
def test_b73_what_is_exported_is_whole_and_does_not_depend_on_the_layout(
    model: ModelSpec, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = []
    for number, layout in enumerate(layouts):
        written(run_of(model, **layout), tmp_path / str(number))
        export(newest(tmp_path / str(number)), tmp_path / f"theirs {number}", shard_bytes=60_000)
        found.append({path.name: path.read_bytes() for path in (tmp_path / f"theirs {number}").iterdir()})
    assert len(found[0]) > 4 and all(files == found[0] for files in found)
    sizes = []
    for path in (tmp_path / "theirs 0").glob("*.safetensors"):
        with File(path) as file:
            sizes += [math.prod(entry.shape) for entry in file.entries.values()]
    assert min(sizes) > 0 and sum(sizes) == sum(t.size for t in model.parameters() if t.kind == "weight")


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f == "gpt2" else pytest.mark.proof) for f in FAMILIES])
def test_their_weights_are_read_straight_into_any_layout(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(PRESETS[TINY[family]], **layout)
    written(run_of(run.model), tmp_path)
    export(newest(tmp_path), tmp_path / "theirs", shard_bytes=60_000)

    def read(world: World) -> dict[str, Tensor]:
        training = prepare(run, world, Start(tmp_path / "theirs"))
        parallel = training.parallel
        owned = pieces_held(parallel.placements, sharded=run.zero.stage == 3)
        whole = gather_whole(parallel.states.weights(), owned, training.mesh)
        return whole | gather_buffers(parallel.buffers, parallel.placements, training.mesh)

    found = launch(fit(run).world, read, threads=1, timeout_s=60)[0]
    with HuggingFace(tmp_path / "theirs", run.model) as source:
        for tensor in run.model.parameters():
            wanted = source.read(tensor.name, tuple((0, n) for n in tensor.shape))
            assert torch.equal(found[tensor.name].to(wanted.dtype), wanted), tensor.name


def peak_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def test_an_import_on_four_ranks_takes_less_than_twice_the_model_in_all(tmp_path: Path) -> None:
    model = ModelSpec(vocab=8192, hidden=768, layers=4, heads=12, kv_heads=12, ffn=2048, max_sequence=64)
    run = run_of(model, tp=2, pp=2)
    written(run, tmp_path)
    export(newest(tmp_path), tmp_path / "theirs")

    def taken(world: World) -> int:
        prepare(run_of(PRESETS["llama-tiny"], tp=2, pp=2), world)  # what any run of that split needs
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak_bytes("VmRSS")
        prepare(run, world, Start(tmp_path / "theirs"))
        return peak_bytes("VmHWM") - before

    total = sum(launch(4, taken, threads=1, timeout_s=100))
    assert total < 2 * model.parameter_count() * 4, total / (model.parameter_count() * 4)


@pytest.mark.parametrize(("asked", "found"), [(None, "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_b78_the_dtype_of_an_export_is_the_one_declared_and_asked_for(
    asked: str | None, found: str, tmp_path: Path
) -> None:
    written(with_precision(run_of(PRESETS["qwen2-tiny"], tp=2), "bfloat16"), tmp_path)
    manifest = newest(tmp_path)
    export(manifest, tmp_path / "theirs", asked)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == found
    dtypes = opened(tmp_path / "theirs", lambda model: {str(p.dtype) for p in model.parameters()}, dtype="auto")
    assert dtypes == {f"torch.{found}"}
    with HuggingFace(tmp_path / "theirs", spec_of(tmp_path / "theirs")) as source:
        assert source.dtype == found
        tensor = source.read("embedding.tokens.weight", ((0, 64), (0, 32)))
    assert (tensor == tensor.bfloat16()).all() == (found == "bfloat16"), "fp32 is the master copy, not the rounded one"


def test_b78_a_value_beyond_fp16_is_refused_and_nothing_is_left_under_the_name(tmp_path: Path) -> None:
    def save(rank: int, world: int) -> None:
        mine = Rank.of(run_of(PRESETS["llama-tiny"]))
        mine.step.masters[0][0] = 1e6
        saver = Saver(tmp_path, mine.mesh.group_beside("world"), keep=1)
        saver.start(states_of(mine.step), facts_of(mine.step, 1, None, "none"))
        saver.wait()

    on_ranks(1, save)
    with pytest.raises(DataError, match="beyond fp16's 65504"):
        export(newest(tmp_path), tmp_path / "theirs", "float16")
    assert not (tmp_path / "theirs").exists()


def theirs(tmp_path: Path, preset: str = "llama-tiny") -> Path:
    written(run_of(PRESETS[preset]), tmp_path)
    export(newest(tmp_path), tmp_path / "theirs")
    return tmp_path / "theirs"


def rewritten(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    save_file(change(state), folder / "model.safetensors")


CHANGES: dict[str, tuple[Any, str]] = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != "model.norm.weight"}, r"lacks: model\.norm\.weight"),
    "extra": (lambda s: {**s, "model.more": torch.ones(1)}, r"unknown tensors: model\.more"),
    "prefixed": (lambda s: {f"module.{k}": v for k, v in s.items()}, "lacks: "),
    "misshapen": (lambda s: {**s, "model.norm.weight": torch.ones(33)}, r"\(33,\), and the model needs \(32,\)"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CHANGES)
def test_b72_missing_unknown_prefixed_and_misshapen_tensors_stop_all_ranks_by_name(case: str, tmp_path: Path) -> None:
    change, message = CHANGES[case]
    rewritten(theirs(tmp_path), change)
    run = run_of(PRESETS["llama-tiny"], tp=2)

    def begin(world: World) -> str:
        with pytest.raises(UsageError, match=message) as refused:
            prepare(run, world, Start(tmp_path / "theirs"))
        return refused.value.message

    told = launch(2, begin, threads=1, timeout_s=60)
    assert told[0] == told[1]


def first_loss(folder: Path, spec: ModelSpec) -> float:
    """Of a run that begins with the weights of a directory."""
    run = run_of(spec)
    find = lambda world: next(train_steps(prepare(run, world, Start(folder)))).loss  # noqa: E731
    return launch(1, find, threads=1, timeout_s=60)[0]


def test_b75_a_tied_table_is_read_from_either_place_and_a_contradiction_stops(tmp_path: Path) -> None:
    folder = theirs(tmp_path, "qwen2-tiny")
    spec, whole, place, head = spec_of(folder), ((0, 64), (0, 32)), "model.embed_tokens.weight", "lm_head.weight"
    with HuggingFace(folder, spec) as source:
        table = source.read("embedding.tokens.weight", whole)
    loss = first_loss(folder, spec)
    assert abs(loss - math.log(64)) > 1e-3
    assert opened(folder, lambda model: model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr())
    for change in (
        lambda s: {head if k == place else k: v for k, v in s.items()},  # only the head
        lambda s: {**s, place: s[head].clone()},  # both, equal
    ):
        rewritten(folder, change)
        with HuggingFace(folder, spec) as source:
            assert torch.equal(source.read("embedding.tokens.weight", whole), table)
        assert first_loss(folder, spec) == loss
    rewritten(folder, lambda s: {**s, place: s[head] + 1})
    with HuggingFace(folder, spec) as source, pytest.raises(DataError, match=r"differ.*model\.tied"):
        source.read("embedding.tokens.weight", whole)
    with HuggingFace(folder, spec.model_copy(update={"tied": False})) as source:  # two tables are then what they are
        both = [source.read(name, whole) for name in ("embedding.tokens.weight", "head.projection.weight")]
    assert torch.equal(both[1], table) and torch.equal(both[0], table + 1)


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    folder = theirs(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle"):
        take_in(folder, tmp_path / "ours")


def test_convert_and_train_from_go_both_ways_on_the_command_line(tmp_path: Path) -> None:
    folder = theirs(tmp_path)
    assert plait("convert", folder, tmp_path / "ours").code == 0
    shown = plait("show", tmp_path / "ours")
    assert shown.code == 0 and "healthy" in shown.stdout and "blocks.0.attention.q.weight" in shown.stdout
    file = next((tmp_path / "ours").rglob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    broken = plait("show", tmp_path / "ours")
    assert broken.code == 1 and f"BROKEN {file.name}" in broken.stdout
    file.write_bytes(whole)
    words = ("batch.global_size=8", "batch.micro_size=4", "batch.sequence=16", "data.source=synthetic", "train.steps=1",
             "train.eval_batches=0", "layout.tp=2", "checkpoint.every=1", "--json")  # fmt: skip
    losses = []
    for start in (folder, tmp_path / "ours"):
        ended = plait("train", "--from", start, *words, f"train.run_dir={tmp_path / f'run {start.name}'}")
        assert ended.code == 0, ended.stderr
        losses.append(json.loads(ended.stdout)["loss_first"])
    assert losses[0] == losses[1] != pytest.approx(4.16, abs=0.1)
    never = tmp_path / "never"
    other = plait("train", "--from", folder, *words, "model.layers=5", "model.tied=true", f"train.run_dir={never}")
    assert other.code == 2 and f"layers 5, there {PRESETS['llama-tiny'].layers}" in other.error and not never.exists()
    missing = plait("train", "--from", tmp_path / "nowhere", *words)
    assert missing.code == 2 and "nowhere does not exist" in missing.error
    out = plait("convert", tmp_path / "run theirs", tmp_path / "trained", "--dtype", "float32")
    assert out.code == 0 and (tmp_path / "trained" / "model.safetensors").exists()
    again = plait("convert", tmp_path / "run theirs", tmp_path / "trained")
    assert again.code == 2 and "is not empty" in again.error
    assert issubclass(DataError, PlaitError)
