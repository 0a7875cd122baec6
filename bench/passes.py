"""Generation with fewer passes over the weights: process time and passes a token, prompt by prompt,
of plain `generate`, of Transformers' own prompt lookup, and of `fewer_passes` without a table, with
a table of the task's training answers, and with one of another task.

    OMP_NUM_THREADS=1 python bench/passes.py model=FOLDER source=local data_dir=FOLDER
    OMP_NUM_THREADS=1 python bench/passes.py model=FOLDER source=local data_dir=FOLDER --prompts 2

Arms take turns in random order at each prompt, after one prompt that is not counted. The model is
the bare backbone of scale `small` in float32, prompts are validation rows of --tasks, answers are
greedy. Ratios are medians over prompts of time over that of plain generation, with the 95 %
interval of a bootstrap over prompts; `same` is the share of prompts with plain generation's text.
Tables are of the references of training rows, and what a pass costs is measured first.
"""
import contextlib
import random
import tempfile
from pathlib import Path
from time import process_time

import torch
from acceptance import arguments, begun

from himalaya_hest.hest.drafts import learn_table
from himalaya_hest.hest.passes import Drafted, fewer_passes, pass_costs
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

PLAIN, LOOKUP = "plain", "prompt_lookup_num_tokens"


def answers_of(data):
    "Token ids of a task's training answers, each behind the last three tokens of its prompt."
    rows = data.train.to_list()
    return [[i for i, l in zip(r["input_ids"], r["labels"]) if l == -100][-3:]
        + [l for l in r["labels"] if l != -100] for r in rows]


def timed(model, ids, n, way, told):
    "Process time of an answer, and its tokens."
    kw = dict(prompt_lookup_num_tokens=way) if isinstance(way, int) else {}
    drafting = isinstance(way, dict)
    with fewer_passes(model, **way) if drafting else contextlib.nullcontext(Drafted()) as counted:
        start = process_time()
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=n, pad_token_id=0, **kw)
        took = process_time() - start
    for name in ("tokens", "passes", "drafted", "accepted"):
        setattr(told, name, getattr(told, name) + getattr(counted, name))
    return took, out[0, ids.shape[1]:].tolist()


def main():
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--out", type=Path, default="records/bench/passes.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run, model = begun(a, folder)
        found, dice = {}, random.Random(0)
        tables = {n: learn_table(answers_of(run.data[n])) for n in run.order}
        costs = pass_costs(model)
        for name in run.order:
            other = next((t for n, t in tables.items() if n != name), None)
            ways = {PLAIN: None, LOOKUP: 4, "copies": dict(costs=costs),
                "copies and table": dict(table=tables[name], costs=costs)}
            if other: ways["copies and another task's table"] = dict(table=other, costs=costs)
            times, texts = ({w: [] for w in ways} for _ in range(2))
            told = {w: Drafted() for w in ways}
            for k, prompt in enumerate(run.data[name].evaluation.prompts[:a.prompts + 1]):
                for w in dice.sample(list(ways), len(ways)):
                    counted = told[w] if k else Drafted()
                    with torch.no_grad():
                        took, text = timed(model, torch.tensor([prompt["input_ids"]]), a.new_tokens,
                            ways[w], counted)
                    if k: times[w].append(took); texts[w].append(text)
            found[name] = {w: dict(time=ratio(times[w], times[PLAIN]), s=sum(times[w]),
                same=sum(x == y for x, y in zip(texts[w], texts[PLAIN])) / len(texts[w]),
                **({} if not told[w].passes else vars(told[w]))) for w in ways}
            print(name, found[name], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        prompts=a.prompts, new_tokens=a.new_tokens, pass_costs=costs, tasks=found))


if __name__ == "__main__": main()
