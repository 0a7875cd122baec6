"""LoRA by PEFT and transformers' `Trainer` alone: the outside check of this package's runner.
Nothing of the package is imported here, and `Trainer` is used as it comes.

    OMP_NUM_THREADS=1 python bench/outside.py --model FOLDER --data FOLDER --runs FOLDER

FOLDER/<task>/{train,validation}.jsonl are the rows. Which training rows are taken, in which order,
stands in RUNS/order.json, numbers of rows from 0 by task and seed, since the package draws them by
a generator of its own: `bench/outside_ours.py order` writes it. Everything else is done here anew:
prompts by the tokenizer's chat template, labels, batches, decoding and the score. Each task and
seed leaves RUNS/trainer-<task>-<seed>.json; what is there is not made again.
`bench/outside_ours.py` trains the same through the package and compares.
"""
import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments)

TASKS = { # what is asked, the column of the text, that of the label, the labels in order
    "sst2": ("Is the sentence positive or negative?", "sentence", "label",
             ("negative", "positive")),
    "ag_news": ("What is the news text about? Answer World, Sports, Business or Sci/Tech.",
                "text", "label", ("World", "Sports", "Business", "Sci/Tech")),
    "trec": ("What does the question ask for? Answer abbreviation, entity, description, human, "
             "location or number.", "text", "coarse_label",
             ("abbreviation", "entity", "description", "human", "location", "number")),
}
SEEDS, ROWS, STEPS, BATCH, NEW_TOKENS = (0, 1, 2), 400, 50, 8, 16
LORA = dict(r=8, lora_alpha=16, lora_dropout=0., target_modules=["q_proj", "v_proj"])
OPTIMISER = dict(
    learning_rate=3e-3, weight_decay=.01, adam_beta1=.9, adam_beta2=.999, max_grad_norm=1.,
    lr_scheduler_type="linear")
WARMUP = .1 # share of the steps


def options(parser):
    "What both scripts take."
    parser.add_argument("--model", type=Path, required=True, help="folder of the backbone")
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder a task")
    parser.add_argument("--runs", type=Path, required=True, help="folder of order and results")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")


def read(data, task, split):
    "Rows of a split as (conversation with the question, label)."
    asked, column, label, labels = TASKS[task]
    lines = (data / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [([dict(role="user", content=f"{asked}\n{row[column].strip()}")], labels[row[label]])
            for row in map(json.loads, lines)]


def tokens(tokenizer, talk, **how):
    return tokenizer.apply_chat_template(talk, return_dict=True, **how)["input_ids"]


def training_row(tokenizer, talk, label):
    "The whole conversation up to the end token of its answer; only the answer is a label."
    prompt = tokens(tokenizer, talk, add_generation_prompt=True)
    whole = tokens(tokenizer, [*talk, dict(role="assistant", content=label)])
    # behind the end token the template has a line end, which no answer reaches
    whole = whole[:len(whole) - whole[::-1].index(tokenizer.eos_token_id)]
    assert whole[:len(prompt)] == prompt
    return dict(input_ids=whole, attention_mask=[1] * len(whole),
                labels=[-100] * len(prompt) + whole[len(prompt):])


def trained(model, tokenizer, rows, a, seed):
    "What `Trainer` logs of each step."
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=a.steps, per_device_train_batch_size=BATCH // a.accumulation,
            gradient_accumulation_steps=a.accumulation, warmup_steps=int(WARMUP * a.steps),
            train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", seed=seed,
            use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False,
            **OPTIMISER)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100))
        trainer.train()
    return [[x["loss"], x["grad_norm"], x["learning_rate"]]
            for x in trainer.state.log_history if "loss" in x]


def answers(model, tokenizer, talks, size=25):
    "What is generated greedily, in the order of the rows."
    model.eval()
    prompts = [tokens(tokenizer, t, add_generation_prompt=True) for t in talks]
    order, said = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), {}
    for at in range(0, len(order), size):
        chosen = order[at:at + size]
        batch = tokenizer.pad(
            dict(input_ids=[prompts[i] for i in chosen]), padding_side="left", return_tensors="pt")
        out = model.generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS)
        texts = tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
        said |= dict(zip(chosen, texts))
    return [said[i].strip() for i in range(len(talks))]


def outcome(a, task, seed, positions):
    "One training of one task, and its answers to all validation rows."
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(
        a.model, use_safetensors=True, trust_remote_code=False, dtype=torch.float32)
    torch.manual_seed(seed)
    model, began = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA)), time.time()
    rows, judged = read(a.data, task, "train"), read(a.data, task, "validation")
    chosen = [training_row(tokenizer, *rows[i]) for i in positions[:a.steps * BATCH]]
    steps = trained(model, tokenizer, chosen, a, seed)
    said = answers(model, tokenizer, [talk for talk, _ in judged])
    right = [s.casefold() == label.casefold() for s, (_, label) in zip(said, judged)]
    return dict(steps=steps, answers=said, accuracy=sum(right) / len(right),
                tokens=sum(len(r["input_ids"]) for r in chosen),
                seconds=round(time.time() - began))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    a = parser.parse_args()
    order = json.loads((a.runs / "order.json").read_text(encoding="utf-8"))
    for seed in a.seeds:
        for task in a.tasks:
            path = a.runs / f"trainer-{task}-{seed}.json"
            if path.exists(): continue
            found = outcome(a, task, seed, order[task][str(seed)])
            path.write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(f"{task}, seed {seed}: {found['accuracy']:.3f}, {found['seconds']} s", flush=True)


if __name__ == "__main__": main()
