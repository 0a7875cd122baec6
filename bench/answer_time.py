"""Process time of answers: each trained adapter of a grid beside the bare backbone in fp32 and
bf16, in turns.

    OMP_NUM_THREADS=1 python bench/answer_time.py bench/grids/cnndm_pareto.yaml bench/grids/cnndm_blocks.yaml
    OMP_NUM_THREADS=1 python bench/answer_time.py bench/grids/cnndm_blocks.yaml --prompts 4 --rounds 2 --out trial.json

The runs of pair 0, ablations left out, are taken from --results-dir, where bench/grid.py left them:
the adapter of each is loaded onto the run's backbone. Prompts are test rows of the study's task. At
batch 1 each prompt is a request, at batch 8 that many of like length with padding; every request is
answered with the same number of new tokens, whatever the model would say, by the code with which
runs measure their latency (energy_evaluation.latencies_ms): prefill is the time until the first
pass has ended, decoding what the other passes take, and the rest of an answer is choosing tokens.

Before time is taken each adapter answers its prompts as in its run; `answers_equal` is the share of
answers that are the run's own, to the letter. Int8 products are calibrated and weights rounded by
then. All methods are visited in turns, in a new order each round, each with a request that is not
timed before its own. Time is process time. Figures are medians over rounds of the mean over
requests, with quartiles; `of_fp32` is the median of the ratios of each round with the 95 % interval
of a bootstrap over rounds; `ms_rounds` has the rounds themselves.
"""
import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml
from peft import PeftModel
from transformers.utils.logging import disable_progress_bar

from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.running.resolve import resolve
from himalaya_hest.running.backbone import load_backbone
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.loop import final_tasks
from himalaya_hest.running.energy import latencies_ms
from himalaya_hest.running.evaluation import evaluation_batches, greedy
from himalaya_hest.ground.hooks import HookList
from himalaya_hest.compare.pairs import method_of
from himalaya_hest.adapters.registry import Adapter
from himalaya_hest.workshop.measuring import (
    called, circumstances, ratio, spread, write_record)
from himalaya_hest.jobs.grid_runs import combinations


def arguments(doc, prompts, out):
    "A parser with what benchmarks of trained adapters share."
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("grids", nargs="+", type=Path)
    parser.add_argument("--results-dir", default="runs/grid", type=Path)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--out", default=out)
    return parser


def runs_of(grids, results_dir):
    """{run_id: (config, record)} of the first pair, each run once, without ablations; those that
    were not run are named, and printed."""
    found, missing = {}, []
    for grid in grids:
        for parameters in combinations(yaml.safe_load(grid.read_text(encoding="utf-8")), 1):
            config = resolve(parameters | dict(results_dir=str(results_dir)))
            if config.role == "ablation": continue
            path = Path(results_dir) / config.run_id
            if not (path / "record.json").is_file() or not (path / "adapter").is_dir():
                missing.append(config.run_id); continue
            found.setdefault(config.run_id,
                (config, json.loads((path / "record.json").read_text(encoding="utf-8"))))
    for m in missing: print(f"left out, not in {results_dir}: {m}")
    return found, missing


def trained(config, folder):
    "The adapter of a run."
    backbone, _, _ = load_backbone(config.model, config.model_revision, "float32")
    model = PeftModel.from_pretrained(backbone, folder / "adapter").eval()
    return Adapter(config.adapter, model, HookList([]),
        "prompt_mask" in model.special_peft_forward_args)


def bare(dtype):
    "The backbone alone, behind the same doors as an adapter."
    model, _, _ = load_backbone("mini", dtype=dtype)
    model.get_base_model = lambda: model
    return Adapter("none", model, HookList([]))


def equal_answers(adapter, task, tokenizer, folder):
    """Share of the answers that are those of the run, which keeps them without white space around
    them."""
    told = {r["row"]: r["answer"]
        for r in map(json.loads,
            (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines())}
    same = [told[j] == text.strip() for batch in evaluation_batches([task], 50, tokenizer)
        for (_, j), text in zip(batch["rows"], greedy(adapter.model, batch, tokenizer,
            adapter.takes_masks))]
    return float(np.mean(same))


def in_turns(todo, task, tokenizer, args):
    """{(method, batch size, phase): ms of a request in each round}, and {(method, batch size): ms
    of all requests}"""
    found, requests, rng = {}, {}, np.random.default_rng(0)
    for i in range(args.rounds):
        for name in rng.permutation(list(todo)):
            for b in args.batches:
                ms, steps = latencies_ms(todo[name], task, tokenizer, args.prompts, args.new_tokens,
                    b)
                decode = steps.reshape(len(ms), -1).sum(1)
                for phase, x in dict(answer=ms, prefill=ms - decode, decode=decode).items():
                    found.setdefault((name, b, phase), []).append(float(x.mean()))
                requests.setdefault((name, b), []).extend(ms.tolist())
        print(f"round {i + 1} of {args.rounds}: {time.process_time():.0f} s of a processor",
            flush=True)
    return found, requests


def row_of(name, b, phase, found, requests, runs, equal):
    "What the record says of a method."
    record = runs[name][1] if name in runs else None
    out = dict(method=method_of(record) if record else name, run_id=name if record else None,
        batch_size=b, phase=phase, ms=spread(found[name, b, phase]),
        of_fp32=ratio(found[name, b, phase], found["fp32", b, phase]),
        ms_rounds=[round(x, 5) for x in found[name, b, phase]])
    if phase == "answer":
        out["requests"] = dict(n=len(requests[name, b]),
            **{f"p{q}_ms": float(np.percentile(requests[name, b], q)) for q in (50, 95, 99)})
    return out | (dict(answers_equal=equal[name], energy_share=record["summary"]["energy_share"],
        rougeL=record["summary"]["rougeL"]) if record else {})


def main():
    parser = arguments(__doc__, prompts=16, out="records/bench/answer_time.json")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    kept, (runs, missing) = keep_memory(), runs_of(args.grids, args.results_dir)
    if not runs:
        raise SystemExit(
            f"no run of these grids is in {args.results_dir}: python bench/grid.py "
            f"{args.grids[0]} --pairs 1 --results-dir {args.results_dir}"
        )
    first = begin_run(next(iter(runs.values()))[0], quiet=True)
    task, tokenizer = final_tasks(first)[0], first.tokenizer
    worlds = {record["world"]["digest"] for _, record in runs.values()}
    if worlds != {first.world["digest"]}:
        raise SystemExit("the runs belong to different worlds, or to another than this version "
            "makes: " "run the grids again")
    width = first.model.config.hidden_size
    todo = {"fp32": bare("float32"), "bf16": bare("bfloat16")} | {
        i: trained(config, args.results_dir / i) for i, (config, _) in runs.items()}
    equal = {i: equal_answers(todo[i], task, tokenizer, args.results_dir / i) for i in runs}
    for i, x in equal.items(): print(f"{x:4.0%} of the run's answers: {i}", flush=True)
    chosen = sorted(task.prompts[:args.prompts], key=lambda p: len(p["input_ids"]))
    found, requests = in_turns(
        todo, replace(task, prompts=tuple(chosen), references=task.references[: args.prompts]),
        tokenizer, args)
    rows = [row_of(name, b, phase, found, requests, runs, equal)
        for name, b, phase in sorted(found, key=lambda k: (k[1], list(todo).index(k[0]), k[2]))]
    for r in rows:
        print(
            f"{r['phase']:8} batch {r['batch_size']}  {r['ms']['median']:9.3f} ms, "
            f"{r['of_fp32']['median']:.2f} [{r['of_fp32']['low']:.2f}, "
            f"{r['of_fp32']['high']:.2f}] of fp32  {r['method']}"
        )
    record = circumstances(called(__file__), "cpu") | dict(width=width, prompts=args.prompts,
        prompt_tokens=spread([len(p["input_ids"]) for p in chosen]), new_tokens=args.new_tokens,
        rounds=args.rounds, freed_memory_kept=kept, missing=missing, rows=rows)
    write_record(args.out, record)


if __name__ == "__main__": main()
