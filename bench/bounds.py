"""Prefixes, tokens and windows of real generations against their bounds: trained adapters of the
first pair, on 200 prompts of the study.

    OMP_NUM_THREADS=1 python bench/bounds.py bench/grids/cnndm.yaml bench/grids/cnndm_blocks.yaml
    OMP_NUM_THREADS=1 python bench/bounds.py bench/grids/cnndm_blocks.yaml --prompts 8 --out /tmp/bounds.json

Prompts are the study's test rows and, where these are fewer, rows of training. The runs are taken
from --results-dir, where bench/grid.py left them. Every gated adapter with a bucket generates
greedily in padded batches, one by one, with beams, with tokens found in the prompt, and with tokens
proposed by the bare backbone, under its own E_max and under a budget given to the call; TABS, which
has no bound, generates the same inputs once, and is looked at beside the bound of the HEST of its
scope. `use` is the largest share of a bound that any prefix, token or window used
(bounds.bounds_used): above 1 it is broken.
"""
from dataclasses import replace

import numpy as np
import torch
from answer_time import arguments, runs_of, trained
from transformers.utils.logging import disable_progress_bar

from himalaya_hest.streams.batching import prompt_row
from himalaya_hest.study.bounds import bounds_used
from himalaya_hest.running.resolve import resolve
from himalaya_hest.running.scales import scope_of
from himalaya_hest.running.backbone import load_backbone
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.loop import final_tasks
from himalaya_hest.running.evaluation import evaluation_batches
from himalaya_hest.compare.pairs import method_of
from himalaya_hest.workshop.measuring import called, circumstances, write_record

WAYS = {"greedy, batch 16": (16, {}), "greedy, one by one": (1, {}),
    "4 beams, batch 4": (4, dict(num_beams=4)),
    "prompt lookup": (1, dict(prompt_lookup_num_tokens=4)), "assisted": (1, {})}


def use_of(adapter, batches, new, e_max, capacity, bounded, way):
    "Largest use of each bound over all rows."
    found = [bounds_used(adapter, {k: b[k] for k in ("input_ids", "attention_mask")}, e_max,
        capacity, bounded, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **way)
        for b in batches]
    return np.concatenate(found)


def prompts_of(run, n):
    "The study's task with n prompts: its test rows, then rows of training."
    data, task = run.data[run.order[0]], final_tasks(run)[0]
    prompts = [*task.prompts, *(prompt_row(r) for r in data.train.to_list())][:n]
    if len(prompts) < n: raise SystemExit(f"--prompts {n}: the study has {len(prompts)}")
    return replace(task, prompts=tuple(prompts))


def main():
    args = arguments(__doc__, prompts=200, out="records/bench/bounds.json").parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    runs, missing = runs_of(args.grids, args.results_dir)
    first = begin_run(resolve(dict(study="cnndm")), quiet=True)
    task, tokenizer = prompts_of(first, args.prompts), first.tokenizer
    assistant, rows = load_backbone("mini", dtype="float32")[0], []
    bound = {scope_of(c.adapter, c.preset, c.adapter_config): c.adapter_config["e_max"]
        for c, _ in runs.values() if c.adapter == "hest"}
    for run_id, (config, record) in runs.items():
        scope, adapter = scope_of(config.adapter, config.preset, config.adapter_config), None
        if (
            config.adapter not in ("hest", "tabs")
            or config.preset != "default"
            or scope not in bound
        ):
            continue
        adapter, capacity = trained(
            config, args.results_dir / run_id), config.adapter_config.get("capacity", 4.0)
        for name, (batch, way) in WAYS.items():
            if config.adapter == "tabs" and name != "greedy, batch 16": continue
            n = args.prompts if batch > 1 else max(1, args.prompts // 4)
            batches = evaluation_batches([task], batch, tokenizer, {(0, j) for j in range(n)})
            way = way | (dict(assistant_model=assistant) if name == "assisted" else {})
            for given in (False, True) if config.adapter == "hest" else (False,):
                # tight, so that much is lowered
                e_max = bound[scope] if not given else dict(blocks=.4, directions=.05)[scope]
                use = use_of(adapter, batches, args.new_tokens, e_max, capacity, given, way)
                rows.append(dict(method=method_of(record), run_id=run_id, scope=scope, way=name,
                    given_to_the_call=given, bounded=config.adapter == "hest", e_max=e_max,
                    n_rows=len(use), use=dict(
                        zip(("prefix", "token", "window"), use.max(0).tolist()))))
                print(rows[-1], flush=True)
    record = circumstances(called(__file__), "cpu") | dict(prompts=args.prompts,
        new_tokens=args.new_tokens, missing=missing, rows=rows)
    write_record(args.out, record)


if __name__ == "__main__": main()
