r"""What `fewer_passes` costs where no guess stands: answers of words drawn nearly evenly, which copy
nothing and repeat nothing.

    OMP_NUM_THREADS=1 python bench/no_gain.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16

Each of --prompts validation rows of --tasks is answered with --new-tokens tokens, sampled at
--temperature, by plain generation, by it once more (`again`: what two measurements of the same
differ by) and within `fewer_passes(model)`, in an order drawn anew for each prompt: by the model in
the type that it is loaded in, in float32, and in eight bits (W8A8). Process time of a whole answer
over plain generation's of the same prompt in the same kind of weights, medians with the 95 %
interval of a bootstrap over prompts.
"""
import contextlib
import copy
import random
from dataclasses import asdict
from pathlib import Path
from time import process_time

import torch
from acceptance import arguments, begun

from himalaya_hest.hest.drafter import Drafted
from himalaya_hest.hest.eight_bits import in_eight_bits
from himalaya_hest.hest.passes import fewer_passes
from himalaya_hest.workshop.measuring import called, circumstances, ratio, write_record

WAYS = "plain", "again", "fewer_passes"


def timed(model, ids, a, way, seed):
    "Process time of an answer, and what was drafted."
    torch.manual_seed(seed)
    with fewer_passes(model) if way == "fewer_passes" else contextlib.nullcontext(Drafted()) as told:
        start = process_time()
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            temperature=a.temperature, min_new_tokens=a.new_tokens, max_new_tokens=a.new_tokens,
            pad_token_id=0)
        return process_time() - start, told


def main():
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=3.)
    parser.add_argument("--out", type=Path, default="records/bench/no_gain.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    run, model = begun(a)
    rows = [p["input_ids"] for n in run.order for p in run.data[n].evaluation.prompts]
    dtype = str(model.dtype).removeprefix("torch.")
    kinds = {dtype: model, "float32": copy.deepcopy(model).float(), "int8": model}
    arms, dice = [(k, w) for k in kinds for w in WAYS], random.Random(0)
    times, drafted = {arm: [] for arm in arms}, {k: Drafted() for k in kinds}
    for i, row in enumerate(dice.sample(rows, a.prompts + 1)):
        for kind, way in dice.sample(arms, len(arms)):
            with in_eight_bits(model) if kind == "int8" else contextlib.nullcontext():
                took, told = timed(kinds[kind], torch.tensor([row]), a, way, i)
            if not i: continue # the first prompt warms up
            times[kind, way].append(took); drafted[kind].add(told)
        print(f"prompt {i}", end="\r", flush=True)
    found = {k: dict(
        time={w: ratio(times[k, w], times[k, "plain"]) for w in WAYS[1:]},
        drafted=asdict(drafted[k])) for k in kinds}
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        model=Path(run.config.model).name, dtype=dtype, prompts=a.prompts,
        new_tokens=a.new_tokens, temperature=a.temperature, kinds=found))
    for k in found: print(k, found[k])


if __name__ == "__main__": main()
