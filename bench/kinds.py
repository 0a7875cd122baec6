"""What kinds of weights cost in time and loss.

A model's weights in float32, in bfloat16, in int8 (weight-only) and in int8 with activations in
int8 too (W8A8), and the second and the last compiled by PyTorch: process time of a prompt's pass,
of a token of the answer, of whole answers, plain and with `fewer_passes`, and what the rounding
costs in nats of right answers.

    OMP_NUM_THREADS=1 python bench/kinds.py model=FOLDER source=local data_dir=FOLDER

The model is the bare backbone of scale `small`, prompts are validation rows of the task, answers are
greedy. All kinds, plain and with `fewer_passes`, take turns in random order at each prompt, after
one prompt that is not counted. Ratios are medians over prompts with the 95 % interval of a bootstrap
over prompts: `token` of decoding a token (an answer's time without its prompt's pass, over its
tokens but the first, which comes of that pass), `prompt` of that pass, `answer` of the whole, a
token. `of_float32`: over plain generation in float32; `of_plain`: of `fewer_passes` over plain
generation in the same kind, with a table of the task's training answers and costs of passes that
were measured in that kind. Loss is nats a token of
references of training rows, the prompt read in one pass and the answer token by token, as it is
decoded; differences to float32 are means over rows with the 95 % BCa interval. `read_mb` are bytes of
the linear layers, which each pass reads; `held_mb` all weights in memory: eight bits stand beside the
model's own. `compile_s` is the processor time, with the compilers', of a first short answer that
makes the kernels (`torch.compile(model.forward, dynamic=True)`, nothing cached). In eight bits each
layer's forward is its own, which PyTorch compiles anew up to a limit and no further: it is raised,
and the record holds it (`recompile_limit`; records without it are of PyTorch's own limit).
"""
import contextlib
import copy
import os
import random
from dataclasses import asdict
from pathlib import Path
from time import process_time

import numpy as np
import torch
import torch._dynamo
from acceptance import arguments, begun
from passes import references
from torch import nn

from himalaya_hest.ground.freed_memory import keep_memory
from himalaya_hest.hest.drafts import learn_table
from himalaya_hest.hest.eight_bits import in_eight_bits
from himalaya_hest.hest.pass_budget import pass_costs
from himalaya_hest.hest.passes import fewer_passes
from himalaya_hest.streams.batching import stop_ids
from himalaya_hest.workshop.measuring import (
    called, circumstances, mean_interval, ratio, write_record)

FLOAT32, BFLOAT16 = "float32", "bfloat16"
ROUNDED = {"weight-only int8": False, "W8A8": True} # are activations rounded?
COMPILED = BFLOAT16, "W8A8"
RECOMPILE_LIMIT = 64 # more than the model has layers; PyTorch's own is 8


def kinds_of(model, until):
    "Kind → (model, MB that a pass reads, MB in memory); one float32 copy of the weights for all."
    def bytes_of(m): return sum(p.nbytes for p in m.parameters()) / 1e6
    def read(m): return sum(l.weight.nbytes for l in m.modules() if isinstance(l, nn.Linear)) / 1e6
    def again(m): return copy.deepcopy(m, {id(p): p for p in m.parameters()})
    half = copy.deepcopy(model).to(torch.bfloat16)
    kinds = {n: (m, read(m), bytes_of(m)) for n, m in ((FLOAT32, model), (BFLOAT16, half))}
    def rounded(activations):
        own = again(model)
        mb = until.enter_context(in_eight_bits(own, activations)) / 1e6
        return own, mb, bytes_of(model) + mb
    kinds |= {name: rounded(activations) for name, activations in ROUNDED.items()}
    for name in COMPILED:
        own, *mb = rounded(ROUNDED[name]) if name in ROUNDED else (again(half), *kinds[name][1:])
        own.forward = torch.compile(own.forward, dynamic=True)
        kinds[f"{name}, compiled"] = own, *mb
    return kinds


def cpu_s(): # of this process and of compilers that it waited for
    return sum(os.times()[:4])


def first_answer(model, ids):
    "Processor time of a first answer of three tokens: kernels for a prompt and for one token."
    start = cpu_s()
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
    return cpu_s() - start


def timed(model, ids, n, ends, drafting):
    "Process times of the prompt's pass and of the rest of an answer, and its tokens."
    passes = []
    hook = model.register_forward_hook(lambda *_: passes.append(process_time()))
    with fewer_passes(model, **drafting) if drafting else contextlib.nullcontext() as told:
        start = process_time()
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=n, pad_token_id=0, eos_token_id=ends)
        end = process_time()
    hook.remove()
    return passes[0] - start, end - passes[0], out[0, ids.shape[1]:].tolist(), told


def generated(a, kinds, prompts, ends, table, costs):
    "(kind, with fewer passes?) → what `timed` says of each prompt."
    found, dice = {(k, f): [] for k in kinds for f in (False, True)}, random.Random(0)
    for i, prompt in enumerate(prompts):
        for k, fewer in dice.sample(list(found), len(found)):
            drafting = dict(table=table, costs=costs[k]) if fewer else None
            ids = torch.tensor([prompt["input_ids"]])
            one = timed(kinds[k][0], ids, a.new_tokens, ends, drafting)
            if i: found[k, fewer].append(one)
        print(f"{i} of {a.prompts} prompts", flush=True)
    return found


def losses(model, row, n):
    "Nats of a row's first n target tokens, decoded one by one."
    ids, start = torch.tensor([row["input_ids"]]), row["labels"].count(-100)
    out, nats = model(input_ids=ids[:, :start], use_cache=True, logits_to_keep=1), []
    for i in range(start, min(start + n, ids.shape[1])):
        nats.append(-out.logits[0, -1].float().log_softmax(-1)[ids[0, i]].item())
        out = model(input_ids=ids[:, i:i + 1], past_key_values=out.past_key_values, use_cache=True)
    return np.mean(nats)


def described(kinds, found, nats, costs, compile_s):
    "The record of all kinds."
    def column(k, fewer, of): return [of(*one) for one in found[k, fewer]]
    parts = dict(
        token=lambda first, rest, text, _: rest / (len(text) - 1),
        prompt=lambda first, rest, text, _: first,
        answer=lambda first, rest, text, _: (first + rest) / len(text))
    rows = {}
    for k, (_, read_mb, held_mb) in kinds.items():
        told = [one[3] for one in found[k, True]]
        same = np.mean([a[2] == b[2] for a, b in zip(found[k, False], found[k, True])])
        rows[k] = dict(
            read_mb=read_mb, held_mb=held_mb, pass_costs=asdict(costs[k]), nll=float(nats[k].mean()),
            less_float32=[*mean_interval(nats[k] - nats[FLOAT32]).values()],
            ms={n: 1e3 * float(np.median(column(k, False, of))) for n, of in parts.items()},
            of_float32={n: ratio(column(k, False, of), column(FLOAT32, False, of))
                for n, of in parts.items()},
            of_plain={n: ratio(column(k, True, parts[n]), column(k, False, parts[n]))
                for n in ("token", "answer")},
            tokens_a_pass=sum(t.tokens for t in told) / sum(t.passes for t in told), same=float(same),
            compile_s=compile_s.get(k))
    return rows


def main():
    parser = arguments(__doc__)
    parser.set_defaults(tasks=["cnn_dailymail"], new_tokens=40)
    parser.add_argument("--prompts", type=int, default=10, help="that are answered")
    parser.add_argument("--rows", type=int, default=30, help="whose loss is measured")
    parser.add_argument("--target-tokens", type=int, default=24, help="of each of them, at most")
    parser.add_argument("--out", type=Path, default="records/bench/kinds.json")
    a = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch.set_num_threads(1), torch.set_grad_enabled(False), keep_memory()
    with contextlib.ExitStack() as until:
        run, model = begun(a)
        kinds, [data] = kinds_of(model, until), run.data.values()
        prompts = data.evaluation.prompts[:a.prompts + 1]
        ids = torch.tensor([prompts[0]["input_ids"]])
        compile_s = {k: first_answer(m, ids) for k, (m, _, _) in kinds.items() if "compiled" in k}
        costs = {k: pass_costs(m) for k, (m, _, _) in kinds.items()}
        rows = data.train.to_list()
        found = generated(
            a, kinds, prompts, stop_ids(run.tokenizer), learn_table(references(rows)), costs)
        nats = {k: np.array([losses(m, r, a.target_tokens) for r in rows[:a.rows]])
            for k, (m, _, _) in kinds.items()}
        told = described(kinds, found, nats, costs, compile_s)
    for k, r in told.items(): print(k, r, flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        task=a.tasks[0], prompts=a.prompts, new_tokens=a.new_tokens, rows=a.rows,
        target_tokens=a.target_tokens, recompile_limit=RECOMPILE_LIMIT,
        prompt_tokens=float(np.mean([len(p["input_ids"]) for p in prompts[1:]])), kinds=told))


if __name__ == "__main__": main()
