"""Fit the controller of `fewer_passes` that comes with the package: greedy answers of a real model
to training rows, both guesses at each of their tokens, and which of them stood.

    OMP_NUM_THREADS=1 python bench/acceptance.py model=FOLDER source=local data_dir=FOLDER
    OMP_NUM_THREADS=1 python bench/acceptance.py model=FOLDER source=local data_dir=FOLDER --rows 4

Writes himalaya_hest/data/acceptance.json (unless --out says otherwise) and a record. Tables of
answers are of the other half of the answers, so that no guess is of the answer itself. The record's
figures are of a controller that a quarter of the answers was kept from: area under the curve and
log loss on that quarter, beside the log loss of a constant. What ships is fitted on all of them.
"""
import argparse
import json
import math
import tempfile
from pathlib import Path

import torch

from himalaya_hest.hest.acceptance import learn_acceptance
from himalaya_hest.hest.own_controller import examples, own_answers
from himalaya_hest.running.continual_run import begin_run
from himalaya_hest.running.resolve import resolve
from himalaya_hest.running.run_files import read_arguments
from himalaya_hest.streams.batching import prompt_row, stop_ids
from himalaya_hest.workshop.measuring import auroc, called, circumstances, write_record

SHIPPED = Path("himalaya_hest/data/acceptance.json")


def arguments(doc):
    "What this, `passes.py` and `shallow_prompt.py` are told alike."
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", nargs="*", help="of a run, as name=value")
    parser.add_argument("--stream", default="local25", help="that has the tasks")
    parser.add_argument("--tasks", nargs="+", default=["cnn_dailymail", "xsum"])
    parser.add_argument("--new-tokens", type=int, default=48)
    return parser


def begun(a):
    "A run with the tasks' rows, and its bare backbone. Nothing of it is left in a folder."
    with tempfile.TemporaryDirectory() as folder:
        stream = Path(folder)/"asked.yaml"
        stream.write_text(f"{{name: asked, extends: {a.stream}, only: [{', '.join(a.tasks)}]}}")
        of = dict(scale="small", adapter="lora", dtype="float32", results_dir=folder,
            training=dict(max_length=384))
        run = begin_run(resolve(of | dict(stream=str(stream)) | read_arguments(a.parameters)))
    return run, run.adapter.model.unload().eval()


def answers_of(model, tokenizer, prompts, n):
    "Greedy answers to rows, that end where the tokenizer's texts do."
    ids = [torch.tensor([row["input_ids"]], device=model.device) for row in prompts]
    return own_answers(model, ids, n, eos_token_id=stop_ids(tokenizer))


def joined(parts): return tuple(torch.cat(x) for x in zip(*parts))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=40, help="training rows of each task")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--record", type=Path, default="records/bench/acceptance.json")
    a = parser.parse_args()
    run, model = begun(a)
    prompts = [prompt_row(r) for n in run.order for r in run.data[n].train.to_list()[:a.rows]]
    parts = examples(answers_of(model, run.tokenizer, prompts, a.new_tokens))
    kept = [i % 4 == 3 for i in range(len(parts))]
    x, y = joined([p for p, k in zip(parts, kept) if not k])
    held_x, held_y = joined([p for p, k in zip(parts, kept) if k])
    logit = learn_acceptance(x, y)(held_x)
    stood, fell = (logit[held_y == k].numpy() for k in (1, 0))
    share = float(y.mean())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, held_y)
    right = float(held_y.mean())
    constant = -right * math.log(share) - (1 - right) * math.log(1 - share)
    x, y = joined(parts)
    weights = {k: v.tolist() for k, v in learn_acceptance(x, y).state_dict().items()}
    rounded = json.loads(json.dumps(weights), parse_float=lambda t: round(float(t), 5))
    shipped = dict(command=called(__file__), weights=rounded)
    a.out.write_text(json.dumps(shipped) + "\n", encoding="utf-8")
    write_record(a.record, circumstances(called(__file__), "cpu") | dict(
        answers=len(parts), examples=len(y), accepted=float(y.mean()), held_out=len(held_y),
        auc=auroc(stood, fell), log_loss=float(loss),
        constant_log_loss=constant))
    print(json.loads(a.record.read_text()))


if __name__ == "__main__": main()
