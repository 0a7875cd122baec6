"""A budget below one plain pass a token, held and not held: on a real model, the leniency that was
learned for a budget beside the one that moves with what answers cost.

    OMP_NUM_THREADS=1 python bench/held_budget.py model=FOLDER source=local data_dir=FOLDER \
        training.max_length=256 --tasks squad_v2 cnn_dailymail

For each task a LoRA learns --steps steps of --batch training rows and is merged. The controller is
fitted and the cost of a token at each ε learned on greedy answers to --answers further training
rows, with a table of the answers of the rows before. Budgets lie at a quarter, half and three
quarters from the largest of these costs to the smallest. The same --prompts validation rows, in an
order drawn from a seed, are answered under each, once by the ε that was learned for it (`learned`)
and once by the one that moves (`held`). Costs are counted, not timed, by the costs of passes that
ship: those of a model of this size in bfloat16. `share` is what a token cost, in passes over one;
`after` that of the first ten, twenty, … answers; `to_plain` ROUGE-L with plain generation's text;
`score` the task's own.
"""
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from acceptance import arguments, begun
from passes import asked_of, ending, kept_back, learned, learned_rows, references

from himalaya_hest.hest.drafts import learn_table
from himalaya_hest.hest.head_groups import grouped_attention
from himalaya_hest.hest.leniency import learn_leniency
from himalaya_hest.hest.mean_budget import leniency_for
from himalaya_hest.hest.own_controller import learn_controller
from himalaya_hest.hest.passes import fewer_passes
from himalaya_hest.measures.rows import row_values
from himalaya_hest.measures.text import get_metric
from himalaya_hest.running.evaluation import first_line
from himalaya_hest.streams.batching import prompt_row, stop_ids
from himalaya_hest.workshop.measuring import called, circumstances, mean_interval, write_record

BETWEEN = .25, .5, .75 # of the way from the largest learned cost to the smallest


def answered(run, model, asked, rows, n, way):
    "Texts of these validation rows, and the cost of the answers so far after each."
    texts, so_far = [], []
    with fewer_passes(model, **way) as told:
        for k in rows:
            ids = torch.tensor([asked.prompts[k]["input_ids"]], device=model.device)
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=n, pad_token_id=0, **ending(ids, run.tokenizer, asked.stop))
            texts.append(run.tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
            so_far.append((told.spent, told.plain))
    cut = first_line if asked.stop == "line" else str
    return [cut(t) for t in texts], so_far, asdict(told)


def task_told(a, run, model, name):
    "All budgets on one task."
    asked = asked_of(run, name)
    n = min(a.new_tokens, asked.max_new_tokens)
    rows = random.Random(0).sample(range(len(asked.prompts)), min(a.prompts, len(asked.prompts)))
    tuned = learned(a, run, model, name, 0, a.rate) if a.steps else model
    ids = [torch.tensor([prompt_row(r)["input_ids"]]) for r in kept_back(a, run, name)]
    table = learn_table(references(run.data[name].train.to_list()[:learned_rows(a, run, name)]))
    # calibration answers end as the task's do
    ends = dict(eos_token_id=stop_ids(run.tokenizer))
    if asked.stop == "line": ends |= dict(stop_strings=["\n"], tokenizer=run.tokenizer)
    bounded = dict(table=table, acceptance=learn_controller(tuned, ids, n, **ends))
    curve = learn_leniency(tuned, ids, n, **bounded, **ends)
    plain, _, lossless = answered(run, tuned, asked, rows, n, bounded)
    right = [asked.references[k] for k in rows]
    def values(texts): return np.array(row_values(asked.metric, texts, right, asked.labels))
    found, first, last, plains = [], max(curve.values()), min(curve.values()), values(plain)
    # where all ε cost alike there is one budget
    for budget in dict.fromkeys(first + b * (last - first) for b in BETWEEN):
        of = dict(budget=budget, learned_epsilon=leniency_for(budget, curve))
        ways = dict(learned={of["learned_epsilon"]: budget}, held=curve)
        for way, lossy in ways.items():
            texts, so_far, told = answered(
                run, tuned, asked, rows, n, bounded | dict(energy_budget=budget, lossy=lossy))
            scores = values(texts)
            of[way] = dict(
                share=told["spent"] / told["plain"], epsilon=told["epsilon"], passes=told["passes"],
                tokens=told["tokens"],
                after={i: s / p for i, (s, p) in enumerate(so_far, 1) if i % 10 == 0},
                to_plain=get_metric("rouge_l")(texts, [(t,) for t in plain])["score"],
                score=float(scores.mean()), less_plain=mean_interval(scores - plains))
            print(f"{name}, budget {budget:.3f}, {way}: {of[way]['share']:.3f}", flush=True)
        found.append(of)
    return dict(metric=asked.metric, prompts=len(rows), cost_by_leniency=curve,
                lossless_share=lossless["spent"] / lossless["plain"],
                plain_score=float(plains.mean()), budgets=found)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=45, help="0: the bare backbone")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--answers", type=int, default=24, help="of training rows, not learned")
    parser.add_argument("--prompts", type=int, default=60, help="of each task")
    parser.add_argument("--out", type=Path, default="records/bench/held_budget.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    run, model = begun(a)
    record = circumstances(called(__file__), "cpu") | dict(
        model=Path(run.config.model).name, dtype=str(model.dtype).removeprefix("torch."),
        steps=a.steps, new_tokens=a.new_tokens, tasks={})
    with grouped_attention(model):
        for name in run.order:
            record["tasks"][name] = task_told(a, run, model, name)
            write_record(a.out, record)


if __name__ == "__main__": main()
