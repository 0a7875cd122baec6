"""The README's ten lines on a model that people know and rows of real data: what two tasks score
when they are just learned and at the end, and how long it takes.

    python bench/door.py MODEL DATA [--adapters himalaya lora lora:3e-3 lora+ewc] [--steps 50] [--rows 40]

MODEL is a folder with a causal language model, such as SmolLM2-135M-Instruct; DATA has
ag_news/train.jsonl, ag_news/validation.jsonl and the same of sst2. Seconds are wall-clock, of
`learn` with its evaluations. A learning rate may follow an adapter, else it has its own. Writes records/bench/door.json, an adapter at a time.
"""
import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from himalaya_hest import ContinualTrainer, HimalayaConfig, Table
from himalaya_hest.adapters.lora_bank import LoraBankConfig
from himalaya_hest.workshop.measuring import circumstances, write_record

ROOT = Path(__file__).resolve().parent.parent
TASKS = dict( # column, instruction, labels
    ag_news=("text", "Which topic is this news about: world, sports, business or technology?",
             ("world", "sports", "business", "technology")),
    sst2=("sentence", "Is the sentiment of this review negative or positive?",
          ("negative", "positive")),
)
ADAPTERS = {
    "himalaya": lambda: HimalayaConfig(task_type="CAUSAL_LM"),
    "lora": lambda: LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]),
    "lora-bank": lambda: LoraBankConfig(
        task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]),
}


def read(path: Path, task: str, n: int) -> list[tuple[str, str]]:
    "The first rows of a file, as text and answer."
    column, _, labels = TASKS[task]
    with open(path, encoding="utf-8") as f: rows = [json.loads(line) for line in f]
    return [(r[column].strip(), labels[r["label"]]) for r in rows[:n]]


def ten_lines(adapter: str, model_folder: str, data: Path, steps: int, n_rows: int) -> dict:
    "What one adapter scores on both tasks, and in how many seconds."
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, use_safetensors=True, trust_remote_code=False)
    named, _, rate = adapter.partition(":")
    method, _, ewc = named.partition("+")
    model = get_peft_model(model, ADAPTERS[method]())
    out = dict(adapter=adapter, trained=sum(p.numel() for p in model.parameters() if p.requires_grad))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, save_strategy="no", logging_steps=10, report_to=[],
            **dict(learning_rate=float(rate)) if rate else {})
        trainer = ContinualTrainer(model, args, processing_class=tokenizer, ewc=bool(ewc) or None)
        start, cpu = time.perf_counter(), time.process_time()
        for task, (_, instruction, _) in TASKS.items():
            trainer.learn(task, read(data/task/"train.jsonl", task, 600), instruction,
                          eval_rows=read(data/task/"validation.jsonl", task, n_rows))
        out |= dict(wall_s=time.perf_counter() - start, cpu_s=time.process_time() - cpu)
    print(trainer.scores)
    return out | dict(
        scores=trainer.scores.rows, average_accuracy=trainer.scores.average_accuracy,
        average_forgetting=trainer.scores.average_forgetting,
        losses=[h["loss"] for h in trainer.state.log_history if "loss" in h])


def table(runs: list[dict]) -> Table:
    "A row an adapter."
    def row(r):
        first, last = r["scores"]
        return [r["adapter"], first["ag_news"]["score"], last["ag_news"]["score"],
                last["sst2"]["score"], r["average_forgetting"], r["wall_s"] / 60]
    columns = ["adapter", "ag_news just learned", "ag_news at the end", "sst2", "forgotten", "minutes"]
    return Table("Two real tasks one after the other", columns, [row(r) for r in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model"); parser.add_argument("data", type=Path)
    parser.add_argument("--adapters", nargs="+", default=["himalaya", "lora", "lora:3e-3", "lora+ewc"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=40)
    asked, path = parser.parse_args(), ROOT/"records"/"bench"/"door.json"
    runs = {r["adapter"]: r for r in json.loads(path.read_text())["runs"]} if path.exists() else {}
    for adapter in asked.adapters:
        runs[adapter] = ten_lines(adapter, asked.model, asked.data, asked.steps, asked.rows)
        told = dict(steps=asked.steps, batch=8, held_back=asked.rows, runs=list(runs.values()))
        # without the paths of this machine
        command = f"python bench/door.py MODEL DATA --steps {asked.steps} --rows {asked.rows}"
        write_record(path, circumstances(command, "cpu") | told)
    print(table(list(runs.values())))


if __name__ == "__main__": main()
