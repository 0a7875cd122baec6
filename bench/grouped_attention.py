r"""What `grouped_attention` saves: of a pass over one token and over several behind texts of some
lengths, and of whole answers, the weights held in three ways.

    OMP_NUM_THREADS=1 python bench/grouped_attention.py model=FOLDER source=local data_dir=FOLDER \
        training.max_length=928 --tasks cnn_dailymail xsum

The model is the bare backbone of scale `small`, its weights in float32, in bfloat16 and in eight
bits with the activations (W8A8). Process time within the block over that outside of it. Passes over
1, 2, 4 and 8 tokens behind each of --contexts tokens, both ways and all numbers in turns in each of
--rounds rounds, after one that is not counted: medians over rounds with the 95 % interval of a
bootstrap. Greedy answers of --new-tokens tokens to --prompts validation rows, both ways in random
order at each: medians over prompts, and `same`, the share of texts that are the same.
"""
import contextlib
import itertools
import random
from pathlib import Path
from time import process_time

import numpy as np
import torch
from acceptance import arguments, begun

from himalaya_hest.hest.eight_bits import in_eight_bits
from himalaya_hest.hest.head_groups import grouped_attention
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

WAYS = dict(plain=contextlib.nullcontext, grouped=grouped_attention)
KINDS = {"float32": (torch.float32, contextlib.nullcontext),
         "bfloat16": (torch.bfloat16, contextlib.nullcontext),
         "W8A8": (torch.bfloat16, in_eight_bits)}
WIDTHS = 1, 2, 4, 8


@torch.no_grad()
def pass_times(ways, widths, context, rounds):
    "Way, that is a model and how it is held, → width → process time of each round's pass."
    ids, found = torch.ones(1, context, dtype=torch.long), {w: {n: [] for n in widths} for w in ways}
    caches = {m: m(input_ids=ids, use_cache=True).past_key_values for m, _ in ways.values()}
    # the first round warms up
    for k in range(rounds + 1):
        for n, (w, (model, held)) in itertools.product(widths, ways.items()):
            with held(model):
                start = process_time()
                model(input_ids=ids[:, :1].expand(1, n), past_key_values=caches[model],
                      use_cache=True)
                if k: found[w][n].append(process_time() - start)
            caches[model].crop(-n) # the same text each time
    return found


def passes(model, context, rounds):
    "By width, and what a pass over one token takes."
    ways = {w: (model, held) for w, held in WAYS.items()}
    times = pass_times(ways, WIDTHS, context, rounds)
    plain, grouped = times["plain"], times["grouped"]
    return dict(ms={w: 1e3 * float(np.median(times[w][1])) for w in WAYS},
                ratios={str(n): ratio(grouped[n], plain[n]) for n in WIDTHS})


def answers(model, rows, n):
    "Whole answers, and whether the texts are the same."
    times, texts, dice = {w: [] for w in WAYS}, {w: [] for w in WAYS}, random.Random(0)
    for k, row in enumerate(rows):
        ids = torch.tensor([row])
        for w in dice.sample(list(WAYS), len(WAYS)):
            with WAYS[w](model):
                start = process_time()
                out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                    do_sample=False, min_new_tokens=n, max_new_tokens=n, pad_token_id=0)
            # the first prompt warms up
            if k: times[w].append(process_time() - start); texts[w].append(out[0].tolist())
        print(f"prompt {k}", end="\r", flush=True)
    return dict(time=ratio(times["grouped"], times["plain"]),
                same=float(np.mean([a == b for a, b in zip(*texts.values())])))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 512, 800])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--out", type=Path, default="records/bench/grouped_attention.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    run, model = begun(a)
    rows = [p["input_ids"] for n in run.order for p in run.data[n].evaluation.prompts]
    rows = random.Random(0).sample(rows, a.prompts + 1)
    found, config = {}, model.config
    for name, (dtype, held) in KINDS.items():
        model.to(dtype)
        with held(model):
            found[name] = dict(
                passes={str(c): passes(model, c, a.rounds) for c in a.contexts},
                answers=answers(model, rows, a.new_tokens))
        print(name, found[name], flush=True)
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        model=Path(run.config.model).name, prompts=a.prompts, rounds=a.rounds,
        new_tokens=a.new_tokens, prompt_tokens=float(np.median([len(r) for r in rows])),
        heads=config.num_attention_heads, key_heads=config.num_key_value_heads, kinds=found))


if __name__ == "__main__": main()
