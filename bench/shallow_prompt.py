r"""A prompt that the last blocks read as keys and values alone: time of its pass, and the loss of
right answers, for a few numbers of such blocks, before training and after training with as many.

    OMP_NUM_THREADS=1 python bench/shallow_prompt.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16

The model is the bare backbone of scale `small`; a LoRA (r = 8 on q and v, rate 3e-3) is trained for
--steps of --batch rows of the task's training rows, the same and from one start for each number.
Loss is nats a target token over --rows rows of the training file that are not trained on;
differences to no such block are means over rows, with the 95 % BCa interval over rows. A pass
over a prompt is timed as `generate` makes it, with a cache, numbers in turns at each prompt:
process time over that of no such block.
"""
import copy
import random
from pathlib import Path
from time import process_time

import numpy as np
import torch
from acceptance import arguments, begun
from peft import LoraConfig, get_peft_model

from himalaya_hest.hest.prompt_blocks import shallow_prompt
from himalaya_hest.streams.batching import Collator, TaskLoader
from himalaya_hest.workshop.measuring import (
    called, circumstances, mean_interval, ratio, write_record)


def losses(model, m, rows):
    "Nats a target token of each row."
    out = []
    for row in rows:
        ids, labels = (torch.tensor([row[k]]) for k in ("input_ids", "labels"))
        with torch.no_grad(), shallow_prompt(model, m):
            logits = model(input_ids=ids, labels=labels).logits[0, :-1].float()
        out.append(float(torch.nn.functional.cross_entropy(logits, labels[0, 1:])))
    return np.array(out)


def learn(model, optimizer, batches, loss_of):
    "A step a batch, at rates that fall to zero on a straight line."
    rates = [g["lr"] for g in optimizer.param_groups]
    model.train()
    for k, batch in enumerate(batches):
        for g, rate in zip(optimizer.param_groups, rates):
            g["lr"] = rate * (1 - k / len(batches))
        loss = loss_of(model, batch)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(f"step {k + 1} of {len(batches)}", end="\r", flush=True)
    return model.eval()


def trained(model, batches, loss_of, seed=0, rate=3e-3):
    "A LoRA that learned by a loss of a model and a batch."
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(model), LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.)
    return learn(model, optimizer, batches, loss_of)


def own_loss(model, batch): # as the model says it
    return model(**{n: batch[n] for n in ("input_ids", "attention_mask", "labels")}).loss


def read_so(m): # the loss where the last m blocks read a prompt as keys and values alone
    def loss_of(model, batch):
        with shallow_prompt(model, m): return own_loss(model, batch)
    return loss_of


def prompt_times(model, numbers, prompts):
    "Process time of each prompt's pass, by number of blocks."
    found, dice = {m: [] for m in numbers}, random.Random(0)
    for k, prompt in enumerate(prompts):
        ids = torch.tensor([prompt["input_ids"]])
        for m in dice.sample(numbers, len(numbers)):
            with torch.no_grad(), shallow_prompt(model, m):
                start = process_time()
                model(input_ids=ids, use_cache=True, logits_to_keep=1)
                if k: found[m].append(process_time() - start)
    return found


def beside(values, plain):
    return dict(mean=float(values.mean()), less_plain=[*mean_interval(values - plain).values()])


def main():
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 1, 6, 12])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rows", type=int, default=60, help="whose loss is measured")
    parser.add_argument("--prompts", type=int, default=16, help="that are timed")
    parser.add_argument("--out", type=Path, default="records/bench/shallow_prompt.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    run, model = begun(a)
    found = {}
    for name in run.order:
        data = run.data[name]
        rows, n = data.train.to_list(), a.steps * a.batch
        rows, held = rows[:n], rows[n:n + a.rows]
        batches = list(TaskLoader(rows, Collator(run.tokenizer), a.batch, seed=0))
        times = prompt_times(model, a.blocks, data.evaluation.prompts[:a.prompts + 1])
        before = {m: losses(model, m, held) for m in a.blocks}
        after = {m: losses(trained(model, batches, read_so(m)), m, held) for m in a.blocks if m != 1}
        found[name] = {str(m): dict(
            prompt_time=ratio(times[m], times[0]), prompt_ms=1e3 * float(np.median(times[m])),
            untrained=beside(before[m], before[0]),
            **(dict(trained=beside(after[m], after[0])) if m in after else {}))
            for m in a.blocks}
        print(name, found[name], flush=True)
    layers, dtype = model.config.num_hidden_layers, str(model.dtype).removeprefix("torch.")
    write_record(a.out, circumstances(called(__file__), "cpu") | dict(
        dtype=dtype, n_blocks=layers, steps=a.steps, batch=a.batch, rows=a.rows, tasks=found))


if __name__ == "__main__": main()
