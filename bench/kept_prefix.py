r"""Answers to prompts that begin alike: process time and right answers with and without the keys of
their common beginning kept, which is an instruction, or examples of training rows and the instruction.

    OMP_NUM_THREADS=1 python bench/kept_prefix.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16

The model is the backbone of scale `small`. An instruction alone is asked of a LoRA that was tuned
for the task (as in `shallow_prompt.py`, --steps of --batch rows), examples of the bare model.
Prompts are validation rows of --tasks, one at a time, answers are greedy and end where the task
says. Both ways take turns in random order at each prompt, after one prompt that is not counted.
Ratios are medians over prompts of the time of a whole answer over that of the plain way, with the
95 % interval of a bootstrap over prompts. `s_per_right` is the seconds of all answers over the
number of those that are right, with the time of making the keys once among the kept way's; `same`
is the share of prompts with the plain way's answer, `share` that of their tokens that was kept.
"""
import copy
import os
import random
from dataclasses import replace
from pathlib import Path
from time import process_time

import torch
from acceptance import arguments, begun
from shallow_prompt import read_so, trained

from himalaya_hest.hest.passes import language_model
from himalaya_hest.hest.prompt_prefix import kept_prefix, prefix_keys
from himalaya_hest.measures.text import get_metric
from himalaya_hest.running.evaluation import evaluation_batches, greedy
from himalaya_hest.streams.batching import Collator, prompt_row, TaskLoader, text_ids
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

PLAIN, KEPT = "plain", "kept"


def begun_with(data, tokenizer, n_examples):
    "A task whose prompts have examples in front, and what they begin with."
    rows = data.train.to_list()
    # an answer's end token gives way to an empty line
    gap = 2 * text_ids(["\n"], tokenizer)[0]
    examples = sum((r["input_ids"][:-1] + gap for r in rows[:n_examples]), [])
    prefix = os.path.commonprefix([prompt_row(r)["input_ids"] for r in rows])
    prompts = tuple(dict(input_ids=examples + p["input_ids"]) for p in data.evaluation.prompts)
    return replace(data.evaluation, prompts=prompts), examples + prefix


def tuned(model, data, tokenizer, a):
    rows = data.train.to_list()[:a.steps * a.batch]
    batches = list(TaskLoader(rows, Collator(tokenizer), a.batch, seed=0))
    return trained(model, batches, read_so(0))


def timed(model, batch, tokenizer):
    "Process time of an answer, and its text."
    start = process_time()
    said, = greedy(model, batch, tokenizer, takes_masks=False)
    return process_time() - start, said


def making_s(model, prefix):
    "Least process time of the keys of a prefix."
    def once():
        start = process_time()
        with torch.no_grad(): prefix_keys(language_model(model), torch.tensor(prefix), 1)
        return process_time() - start
    return min(once() for _ in range(3))


def measured(model, task, prefix, tokenizer, n, dice):
    "The record of one task, asked in one way."
    batches = evaluation_batches([task], 1, tokenizer)
    batches = dice.sample(batches, min(n + 1, len(batches)))
    # the same weights, without the hook
    plain = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    ways, found = {PLAIN: plain, KEPT: model}, {PLAIN: [], KEPT: []}
    with kept_prefix(model, prefix) as told:
        for k, batch in enumerate(batches):
            for w in dice.sample(list(ways), 2):
                result = timed(ways[w], batch, tokenizer)
                if k: found[w].append(result)
    return described(task, [j for b in batches[1:] for _, j in b["rows"]], found) | dict(
        prefix=len(prefix), share=told.kept / told.tokens, tokens=told.tokens / told.prompts,
        making_s=making_s(model, prefix), prompts=len(batches) - 1)


def described(task, rows, found):
    times, texts = ({w: [r[i] for r in found[w]] for w in found} for i in (0, 1))
    def is_right(text, j):
        return get_metric(task.metric)(
            [text], [task.references[j]], task.labels, [task.languages[j]])["score"]
    return dict(
        time=ratio(times[KEPT], times[PLAIN]),
        same=sum(a == b for a, b in zip(texts[KEPT], texts[PLAIN])) / len(rows),
        ways={w: dict(s=sum(times[w]), right=sum(map(is_right, texts[w], rows))) for w in found})


def priced(record):
    "With seconds for each right answer."
    for w, of in record["ways"].items():
        s = of["s"] + (record["making_s"] if w == KEPT else 0.)
        of["s_per_right"] = s / of["right"] if of["right"] else None
    return record


def main():
    parser = arguments(__doc__)
    parser.set_defaults(tasks=["ag_news", "sst2", "trec"])
    parser.add_argument("--examples", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--prompts", type=int, default=24, help="of each task")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, default="records/bench/kept_prefix.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    run, model = begun(a)
    dice, found = random.Random(0), {}
    for name in run.order:
        for n in a.examples:
            asked = model if n else tuned(model, run.data[name], run.tokenizer, a)
            task, prefix = begun_with(run.data[name], run.tokenizer, n)
            told = priced(measured(asked, task, prefix, run.tokenizer, a.prompts, dice))
            found.setdefault(name, {})[str(n)] = told
            print(name, n, told, flush=True)
    dtype = str(model.dtype).removeprefix("torch.")
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        dtype=dtype, steps=a.steps, batch=a.batch, tasks=found))


if __name__ == "__main__": main()
