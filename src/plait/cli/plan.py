"""`plait plan`: which split of a model over a machine, will it fit, how fast, and how sure. It needs no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli.run import Json, Words, read_run, to_json, with_options
from plait.spec.errors import UsageError


@dataclass(frozen=True)
class Options:
    """What `plait plan` takes."""

    words: Words = None
    model: Annotated[str | None, typer.Option(metavar="PRESET|config.json", help="The model; default: the run's.")] = (
        None
    )
    cluster: Annotated[str | None, typer.Option(metavar="NAME|FILE.toml", help="The machine.")] = None
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Nodes of it; asks for a search.")] = None
    stack: Annotated[str | None, typer.Option(metavar="NAME", help="The program that trains; default: plait.")] = None
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences per step.")] = None
    seq: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens per sequence.")] = None
    dtype: Annotated[str | None, typer.Option(metavar="bf16|fp8|…", help="Of the products.")] = None
    anchor: Annotated[str | None, typer.Option(metavar="14.7s", help="A measured step of this run.")] = None
    fits: Annotated[bool, typer.Option("--fits", help="Which knob, turned how far, makes it fit.")] = False
    tokens: Annotated[str | None, typer.Option(metavar="15T", help="Time to so many tokens.")] = None
    price: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="Per device and hour: cost to the tokens.")
    ] = None
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Plans to show.")] = 10
    output: Annotated[Path | None, typer.Option("-o", metavar="run.toml", help="Write a run for plait train.")] = None
    system: Annotated[
        str | None, typer.Option("--as", metavar="megatron|torchtitan|deepspeed", help="In its flags or file.")
    ] = None
    published: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Predict runs that others measured, and judge it.")
    ] = None
    held_out: Annotated[
        bool, typer.Option("--held-out", help="With --published: constants fitted to the other sources.")
    ] = False
    as_json: Json = False


def _plan(options: Options) -> None:
    """Plan a run: the best splits of a model over a machine, or one split with its time and memory.

    A run file (or overrides) is planned as it stands; --model, --nodes or layout.mode=auto search for the best split.
    """
    for option, given, needed, there in (
        ("--held-out", options.held_out, "--published FILE.csv", options.published),
        ("--price", options.price is not None, "--tokens 15T", options.tokens),
    ):
        if given and there is None:
            raise UsageError(f"{option} says nothing without {needed.split()[0]}", f"plait plan {needed} {option} ...")
    if options.published is not None:
        _published(options.published, options.held_out, options.as_json)
        return
    from plait.planner.request import Request, resolve

    o = options
    asked = resolve(read_run(o.words), Request(o.model, o.cluster, o.nodes, o.stack, o.batch, o.seq, o.dtype))
    answer = _answer(asked, o.anchor, o.top, o.fits)
    answer |= _to_tokens(answer["best"], o.tokens, o.price)
    _write(asked, answer, o.output, o.system)
    if o.as_json:
        print(to_json(_document(asked, answer)))
    else:
        print("\n".join(_text(asked, answer)))


plan = with_options(_plan, Options)


def _answer(asked: Any, anchor: str | None, top: int, fits: bool) -> dict[str, Any]:
    """Plans, and the search that found them where there was one."""
    from plait.planner.estimate import estimate
    from plait.planner.knobs import knobs
    from plait.planner.request import anchored, find, one

    found = find(asked, top) if asked.searched and not fits else None
    plans = found.plans if found else [estimate(asked.ground, one(asked))]
    if anchor is not None:
        plans = [anchored(asked, plans[0], anchor), *plans[1:]]
        if found:
            found.plans[0] = plans[0]
    return {
        "plans": plans,
        "best": plans[0],
        "found": found,
        "knobs": knobs(asked.ground, plans[0].job) if fits else None,
    }


def _to_tokens(best: Any, tokens: str | None, price: float | None) -> dict[str, Any]:
    """Hours (and cost) to a number of tokens."""
    if tokens is None:
        return {}
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    try:
        count = float(tokens.rstrip("KMBT")) * scale.get(tokens[-1:], 1.0)
    except ValueError as error:
        raise UsageError(f"--tokens {tokens}: not a number of tokens", "for example --tokens 15T") from error
    if not 0 < count < float("inf"):
        raise UsageError(f"--tokens {tokens}: more than 0 tokens are needed", "for example --tokens 15T")
    hours = count / (best.tokens_per_second * best.job.world) / 3600
    return {"hours": hours, "cost": None if price is None else hours * best.job.world * price}


def _write(asked: Any, answer: dict[str, Any], output: Path | None, system: str | None) -> None:
    """Files and lines for whoever trains."""
    from plait.planner.export import start_lines, told
    from plait.planner.request import trainable
    from plait.spec.load import dump

    best = answer["best"]
    answer["told"] = told(system, best.job) if system is not None else None
    answer["start"] = start_lines(best.job, asked.ground.cluster, str(output or "run.toml"))
    if output is None:
        return
    taken = trainable(asked, answer["plans"])
    if taken is None:
        raise UsageError(
            f"none of the {len(answer['plans'])} plans is a run that plait trains",
            "plan with --stack plait",
        )
    run, plan = taken
    if plan is not best:
        print(
            "note: plait does not train the best plan of this stack; the first one that it trains is written",
            file=sys.stderr,
        )
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(dump(run))
    except FileExistsError as error:
        raise UsageError(f"-o {output}: is there already", "name another file, or remove it") from error
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    print(f"{output}: the plan as a run; data, optim and train are yours to set in it", file=sys.stderr)


def _document(asked: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """The JSON document."""
    from plait.planner.export import run_of
    from plait.planner.request import exact

    found, told = answer["found"], answer["told"]
    searched = {
        "within_noise_of_best": found.within_noise if found else 1,
        "examined": found.examined if found else 1,
        "estimated": found.estimated if found else 1,
        "seconds": found.seconds if found else 0.0,
        "rejected": [
            {"reason": one.reason, "count": one.count, "nearest": one.nearest}
            for one in (found.rejected if found else ())
        ],
        "losers": [
            {"kind": kind, "slower_by": slower, "because": because}
            for kind, slower, because in (found.losers if found else ())
        ],
    }
    return {
        "plans": [
            {"run": run_of(asked.run, p.job, asked.cluster).model_dump(mode="json"), **p.as_dict()}
            for p in answer["plans"]
        ],
        **searched,
        **exact(asked),
        "cluster": asked.ground.cluster.name,
        "stack": asked.ground.stack.name,
        "assumed": list(asked.assumed),
        "start": answer["start"],
        **({"fits": answer["knobs"]} if answer["knobs"] is not None else {}),
        **({"as": {"text": told.text, "cannot_say": list(told.unsaid)}} if told else {}),
        **{name: answer[name] for name in ("hours", "cost") if name in answer},
    }


def _text(asked: Any, answer: dict[str, Any]) -> list[str]:
    from plait.planner.knobs import knob_lines
    from plait.report.plan import assumed_lines, found_lines, plan_lines
    from plait.spec.units import format_count, format_seconds

    lines = found_lines(answer["found"]) if answer["found"] else plan_lines(answer["best"])
    lines += ["", *knob_lines(answer["knobs"])] if answer["knobs"] is not None else []
    if "hours" in answer:
        cost = "" if answer["cost"] is None else f", cost {format_count(answer['cost'])}"
        lines += ["", f"to the tokens asked for: {format_seconds(answer['hours'] * 3600)}{cost}"]
    if answer["told"]:
        lines += ["", answer["told"].text, *(f"cannot say: {what}" for what in answer["told"].unsaid)]
    lines += ["", *(f"{name}: {line}" for name, line in answer["start"].items())]
    machine = f"cluster {asked.ground.cluster.name}, stack {asked.ground.stack.name}"
    return [machine, *lines, *assumed_lines(asked.assumed)]


def _published(file: Path, held_out: bool, as_json: bool) -> None:
    from plait.planner.published.judge import judge

    verdict = judge(file, held_out)
    print(to_json(verdict.as_dict()) if as_json else "\n".join(verdict.lines()))
