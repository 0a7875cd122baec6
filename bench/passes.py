"""Generation with fewer passes over the weights: process time and passes a token, prompt by prompt,
of plain `generate`, of Transformers' own prompt lookup, of fixed rules (a copy, else the table, k
tokens each time), and of `fewer_passes`: with a table of the task's training answers, without one,
with one of another task, without the bound on prefixes, and lenient with drafts.

    OMP_NUM_THREADS=1 python bench/passes.py model=FOLDER source=local data_dir=FOLDER
    OMP_NUM_THREADS=1 python bench/passes.py model=FOLDER source=local data_dir=FOLDER dtype=bfloat16

Arms take turns in random order at each prompt, after one prompt that is not counted. The model is
the bare backbone of scale `small`, prompts are validation rows of --tasks, answers are greedy and
end where the task says. Ratios are medians over prompts of time over that of plain generation,
with the 95 % interval of a bootstrap over prompts, `token_time` of time a token, for answers may
be of other lengths; `same` is the share of prompts with plain
generation's text, `rouge_l` is to the references and `to_plain` to plain generation's texts.
`against_rule` is time over that of the best fixed rule, the best of those that were measured.
Tables are of the references of training rows, and what a pass costs is measured first.
"""
import contextlib
import random
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import process_time

import torch
from acceptance import arguments, begun

from himalaya_hest.hest.acceptance import Acceptance
from himalaya_hest.hest.drafter import Drafted
from himalaya_hest.hest.drafts import learn_table
from himalaya_hest.hest.pass_budget import pass_costs
from himalaya_hest.hest.passes import fewer_passes
from himalaya_hest.measures.text import get_metric
from himalaya_hest.streams.batching import stop_ids
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

PLAIN, LOOKUP, UNBOUNDED = "plain", "prompt_lookup_num_tokens", 1e9
RULES = {f"fixed rule, {k}": k for k in (2, 4)}


def answers_of(data):
    "Token ids of a task's training answers, each behind the last three tokens of its prompt."
    rows = data.train.to_list()
    return [[i for i, l in zip(r["input_ids"], r["labels"]) if l == -100][-3:]
        + [l for l in r["labels"] if l != -100] for r in rows]


def certain():
    "A controller that is sure of every draft."
    acceptance = Acceptance().requires_grad_(False)
    acceptance.hidden.weight.zero_(), acceptance.out.bias.fill_(99.)
    return acceptance


def ways_of(table, other, costs):
    "What `fewer_passes` is told by each arm; plain generation and Transformers' own are told else."
    bounded = dict(table=table, costs=costs)
    ways = {PLAIN: None, LOOKUP: 4} | {
        # with free tokens the longest draft is best: a rule in place of a controller
        name: dict(table=table, acceptance=certain(), costs=(1.,) * (k + 1), energy_budget=UNBOUNDED)
        for name, k in RULES.items()}
    ways |= {"passes": bounded, "passes, copies alone": dict(costs=costs)}
    if other: ways["passes, another task's table"] = dict(table=other, costs=costs)
    ways["passes, no bound"] = bounded | dict(energy_budget=UNBOUNDED)
    for e in (.5, .2, .05): ways[f"lossy, ε = {e}"] = bounded | dict(energy_budget=.5, lossy={e: .5})
    return ways


def timed(model, ids, n, ends, way, told):
    "Process time of an answer, and its tokens."
    kw = dict(prompt_lookup_num_tokens=way) if isinstance(way, int) else {}
    drafting = isinstance(way, dict)
    with fewer_passes(model, **way) if drafting else contextlib.nullcontext(Drafted()) as counted:
        start = process_time()
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=n, pad_token_id=0, eos_token_id=ends, **kw)
        took = process_time() - start
    told.add(counted)
    return took, out[0, ids.shape[1]:].tolist()


def measured(a, run, model, name, ways, dice):
    "Times, texts and counts of all arms on one task's prompts."
    times, texts, told = ({w: make() for w in ways} for make in (list, list, Drafted))
    for k, prompt in enumerate(run.data[name].evaluation.prompts[:a.prompts + 1]):
        for w in dice.sample(list(ways), len(ways)):
            with torch.no_grad():
                took, text = timed(model, torch.tensor([prompt["input_ids"]]), a.new_tokens,
                    stop_ids(run.tokenizer), ways[w], told[w] if k else Drafted())
            if k: times[w].append(took); texts[w].append(text)
        print(f"{name}: {k} of {a.prompts} prompts", end="\r", flush=True)
    return times, texts, told


def rouge_l(texts, references):
    return get_metric("rouge_l")(texts, references)["score"]


def described(run, name, times, texts, told):
    "The record of one task."
    said = {w: run.tokenizer.batch_decode(t, skip_special_tokens=True) for w, t in texts.items()}
    asked = run.data[name].evaluation.references[1:len(said[PLAIN]) + 1]
    rule = min(RULES, key=lambda w: sum(times[w]))
    plain = [(t,) for t in said[PLAIN]]
    def a_token(w): return [t / len(x) for t, x in zip(times[w], texts[w])]
    return dict(best_rule=rule, arms={w: dict(
        time=ratio(times[w], times[PLAIN]), token_time=ratio(a_token(w), a_token(PLAIN)),
        against_rule=ratio(times[w], times[rule]),
        s=sum(times[w]), rouge_l=rouge_l(said[w], asked), to_plain=rouge_l(said[w], plain),
        same=sum(x == y for x, y in zip(texts[w], texts[PLAIN])) / len(texts[w]),
        **(asdict(told[w]) if told[w].passes else {})) for w in times})


def main():
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="of each task")
    parser.add_argument("--out", type=Path, help="records/bench/passes-DTYPE.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run, model = begun(a, folder)
        dice, costs = random.Random(0), pass_costs(model)
        tables = {n: learn_table(answers_of(run.data[n])) for n in run.order}
        found = {}
        for name in run.order:
            other = next((t for n, t in tables.items() if n != name), None)
            ways = ways_of(tables[name], other, costs)
            found[name] = described(run, name, *measured(a, run, model, name, ways, dice))
            for w, r in found[name]["arms"].items(): print(name, w, r["time"], r["same"], flush=True)
        dtype = str(model.dtype).removeprefix("torch.")
    out = a.out or Path(f"records/bench/passes-{dtype}.json")
    write_record(out, circumstances(called(__file__), "cpu") | dict(
        dtype=dtype, prompts=a.prompts, new_tokens=a.new_tokens, pass_costs=asdict(costs),
        tasks=found))


if __name__ == "__main__": main()
