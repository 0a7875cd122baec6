"""lm-evaluation-harness on a live adapted model: are its log-likelihoods and its generations the
package's own?

    python bench/lm_eval_live.py --out records/bench/lm_eval.json

Needs `pip install lm_eval` beside the development requirements; no network. Two tasks of two
answers each are learned on the packaged mini backbone, and 40 held-out rows of each are scored by
lm-evaluation-harness from a local JSON file: as it comes (with one request and with eight in a
batch), after `set_instruction`, and with `PromptedLM` below, which says which tokens are the
prompt. Each log-likelihood is compared with that of one forward of the same tokens with both masks
of the package, and each generation with `generate` of the prompt with both masks.
"""
import argparse
import importlib.metadata
import json
import logging
import random
import tempfile
import warnings
from pathlib import Path

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM

from himalaya_hest.streams.batching import Collator, encode
from himalaya_hest.ground.hooks import TaskContext
from himalaya_hest.streams.backbone import mini_backbone_dir
from himalaya_hest.adapters.registry import build_adapter
from himalaya_hest.streams.tasks import Example

INSTRUCTIONS = ["Say whether the text names a colour.",
    "Answer with the opposite of what the sentence says about colours."]
THINGS, COLOURS, ANSWERS = (
    "river stone house lamp paper window garden winter music engine".split(),
    "red green blue white".split(), ["no", "yes"])


class PromptedLM(HFLM):
    "One request at a time, and which of its tokens are the prompt."
    def _loglikelihood_tokens(self, requests, **kwargs):
        out = []
        for request in requests: # strings, tokens of the context, tokens of the continuation
            self.n_prompt = len(request[1])
            out += super()._loglikelihood_tokens([request], **kwargs | dict(disable_tqdm=True))
        return out
    def _model_call(self, inps, **kwargs):
        prompt = (torch.arange(inps.shape[1], device=inps.device) < self.n_prompt).expand_as(inps)
        with torch.no_grad():
            return self.model(inps, attention_mask=torch.ones_like(inps), prompt_mask=prompt).logits


def rows_of(task, n, seed):
    "(text, index of its answer), n times."
    dice, out = random.Random(seed), []
    for _ in range(n):
        words, named = [dice.choice(THINGS) for _ in range(dice.randint(4, 8))], dice.random() < .5
        if named: words[dice.randrange(len(words))] = dice.choice(COLOURS)
        out.append((" ".join(words), int(named != bool(task))))
    return out


def train(adapter, tokenizer, task, n_steps=60):
    "One task, with its hooks."
    data = [encode(Example(INSTRUCTIONS[task], text, ANSWERS[i], (ANSWERS[i],), "en"), tokenizer,
        128, 8) for text, i in rows_of(task, 256, task)]
    collate, hooks = Collator(tokenizer), adapter.hooks
    batches = [{k: v for k, v in collate(data[i : i + 16]).items() if torch.is_tensor(v)}
        for i in range(0, 256, 16)]
    batches = [{k: b[k] for k in ("input_ids", "attention_mask", "labels", "prompt_mask",
        "instruction_mask")} for b in batches]
    hooks.on_task_start(TaskContext(str(task), task, n_steps, batches))
    optimizer = torch.optim.AdamW(adapter.tuner.optimizer_groups(1e-2))
    adapter.model.train()
    for i in range(n_steps):
        old = {n: p.detach().clone() for n, p in hooks.tracked_parameters().items()}
        loss = adapter.model(**batches[i % 16]).loss
        optimizer.zero_grad()
        loss.backward()
        hooks.after_backward()
        optimizer.step()
        hooks.after_optimizer_step(old)
    adapter.model.eval()
    hooks.on_task_end(batches)


def task_config(task, folder, kind):
    "A task of lm-evaluation-harness on a local file."
    path = Path(folder) / f"{task}.json"
    path.write_text("".join(
        json.dumps(dict(instruction=INSTRUCTIONS[task], text=text, label=i, answer=ANSWERS[i]))
        + "\n" for text, i in rows_of(task, 40, 100 + task)), encoding="utf-8")
    common = dict(task=f"colours_{task}_{kind}", dataset_path="json",
        dataset_kwargs=dict(data_files=dict(test=str(path))), test_split="test", output_type=kind,
        target_delimiter="\n", metadata=dict(version=1))
    if kind == "multiple_choice":
        return common | dict(doc_to_text="{{instruction}}\n{{text}}", doc_to_target="label",
            doc_to_choice=ANSWERS,
            metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True)])
    return common | dict(doc_to_text="{{instruction}}\n{{text}}\n", doc_to_target="answer",
        generation_kwargs=dict(until=["\n"], max_gen_toks=4, do_sample=False),
        metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)])


def masks(tokenizer, ids, task, n_prompt):
    "prompt_mask and instruction_mask of one row, whose first token is the tokenizer's own."
    at, n = torch.arange(len(ids))[None], len(
        tokenizer(INSTRUCTIONS[task], add_special_tokens=False)["input_ids"])
    return dict(prompt_mask=at < n_prompt, instruction_mask=(at >= 1) & (at < 1 + n))


@torch.no_grad()
def own_likelihood(adapter, tokenizer, task, context, continuation):
    "Log-likelihood of a continuation, with both masks."
    ids = torch.tensor([context + continuation])
    logits = adapter.model(input_ids=ids, attention_mask=torch.ones_like(ids),
        **masks(tokenizer, ids[0], task, len(context))).logits
    return float(logits.log_softmax(-1)[0, len(context) - 1 : -1].gather(1,
        torch.tensor(continuation)[:, None]).sum())


def evaluated(lm, config):
    "Score and samples of one task."
    out = lm_eval.simple_evaluate(lm, tasks=[config], bootstrap_iters=0, log_samples=True)
    return (next(v for k, v in out["results"][config["task"]].items()
        if k.startswith(("acc,", "exact_match,"))), out["samples"][config["task"]])


def arguments_of(sample):
    return ([(a["arg_0"], a["arg_1"]) for a in sample["arguments"].values()]
        if isinstance(sample["arguments"], dict) else [tuple(a) for a in sample["arguments"]])


def compare_choices(adapter, tokenizer, task, folder, cls, batch_size, said):
    "One row of the record."
    adapter.tuner.set_instruction(INSTRUCTIONS[task] if said else None, tokenizer)
    lm = cls(pretrained=adapter.model, tokenizer=tokenizer, batch_size=batch_size)
    score, samples = evaluated(lm, task_config(task, folder, "multiple_choice"))
    adapter.tuner.set_instruction(None)
    apart, right = [], []
    for s in samples:
        own = [own_likelihood(adapter, tokenizer, task, *lm._encode_pair(*pair))
            for pair in arguments_of(s)]
        apart += [abs(a - float(b[0])) for a, b in zip(own, s["filtered_resps"])]
        right.append(own.index(max(own)) == s["doc"]["label"])
    return dict(accuracy=score, own_accuracy=sum(right) / len(right), largest_difference=max(apart),
        mean_difference=sum(apart) / len(apart))


def compare_generations(adapter, tokenizer, task, folder):
    "Share of generations that are the package's own."
    lm = HFLM(pretrained=adapter.model, tokenizer=tokenizer, batch_size=8)
    score, samples = evaluated(lm, task_config(task, folder, "generate_until"))
    same = []
    for s in samples:
        ids = tokenizer(arguments_of(s)[0][0], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = adapter.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                max_new_tokens=4, do_sample=False, **masks(tokenizer, ids[0], task, ids.shape[1]))
        same.append(tokenizer.decode(out[0, ids.shape[1] :],
            skip_special_tokens=True).split("\n")[0] == s["filtered_resps"][0])
    return dict(exact_match=score, same_as_own=sum(same) / len(same))


WAYS = {"HFLM, one request at a time": (HFLM, 1, False), "HFLM, eight in a batch": (HFLM, 8, False),
    "HFLM, one at a time, set_instruction": (HFLM, 1, True), "PromptedLM": (PromptedLM, 1, False),
    "PromptedLM, set_instruction": (PromptedLM, 1, True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("records/bench/lm_eval.json"))
    out = parser.parse_args().out
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(mini_backbone_dir())
    backbone = transformers.AutoModelForCausalLM.from_pretrained(mini_backbone_dir(),
        dtype=torch.float32).eval()
    adapter = build_adapter("himalaya", backbone, tokenizer,
        adapter_config=dict(n_features=256))
    for task in (0, 1): train(adapter, tokenizer, task)
    with tempfile.TemporaryDirectory() as folder:
        choices = {way: [compare_choices(adapter, tokenizer, t, folder, *settings) for t in (0, 1)]
            for way, settings in WAYS.items()}
        generations = [compare_generations(adapter, tokenizer, t, folder) for t in (0, 1)]
    found = {n: importlib.metadata.version(n).partition("+")[0] for n in (
        "lm_eval", "torch", "transformers", "peft")}
    out.write_text(json.dumps(
        dict(command=f"python bench/lm_eval_live.py --out {out.as_posix()}", versions=found,
            choices=choices, generations=generations), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main()
