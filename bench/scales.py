"""The scales medium and full at their true shapes, with random weights, through `run_continual`.

    python bench/scales.py                # all six exercises -> records/bench/scales.json
    python bench/scales.py medium full    # some of them
    python bench/scales.py --tokens 64    # shorter rows

`medium` is Qwen2.5-0.5B as it is (24 layers of width 896, 14 heads of which 2 for keys and values,
vocabulary 151 936, tied) in bfloat16; `full` is Llama-2-7B at its true width (4096, inner 11 008,
vocabulary 32 000) with 2 of its 32 layers, in NF4. Each is written to a temporary folder with
random weights and the shipped tokenizer (its 2 048 ids are enough), and trained for one task, two
steps at batch 1 x 128 tokens, with HIMALAYA, LoRA and LoRA+EWC; the task is generated text of
exactly so many tokens a row. Each exercise runs in a process of its own: seconds, and the peak of
that process's memory. What needs no values (parameters, the state of HIMALAYA between tasks, the
plan) is counted at the full shape on meta tensors.
"""
import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCALES = {"medium": ("Qwen/Qwen2.5-0.5B", {}, "none"), "full": ("NousResearch/Llama-2-7b-hf",
    {"num_hidden_layers": 2}, "nf4")}
ADAPTERS = ("himalaya", "lora", "lora+ewc")


def write_model(folder, name, changes):
    "A model of that shape with random weights in bfloat16, with the shipped tokenizer."
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from himalaya_hest.streams.backbone import mini_backbone_dir
    from himalaya_hest.running.shapes import model_config
    config = model_config(name)
    for k, v in dict(changes, bos_token_id=1, eos_token_id=2, pad_token_id=0).items():
        setattr(config, k, v)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(mini_backbone_dir()).save_pretrained(folder)


def write_task(folder, tokens):
    "One task whose prompts are cut to rows of just so many tokens."
    words = (
        "the river finds its own way down to the sea and nobody asks it why it turns left "
        "at the mill".split()
    )
    rows = [dict(text=" ".join(words[(i * 7 + k * 3) % len(words)] for k in range(3 * tokens)),
        answer=" ".join(words[i % 5 : i % 5 + 30])) for i in range(4)]
    (folder/"data"/"rivers").mkdir(parents=True)
    for split, part in (("train", rows[:2]), ("validation", rows[2:])):
        (folder / "data" / "rivers" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n"
            for r in part))
    (folder / "rivers.yaml").write_text(
        "name: rivers\nsource: local\ntasks:\n- {name: rivers, kind: summarisation, "
        "languages: [en], instruction: Go on., prompt: '{text}', target: '{answer}', "
        "metric: rouge_l, max_new_tokens: 8}\n"
    )


def one(scale, adapter, folder, tokens):
    "Run one exercise in this process and print what it took."
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from himalaya_hest.jobs.run import run_continual
    folder, quantisation = Path(folder), SCALES[scale][2]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.time()
    record = run_continual(
        dict(adapter=adapter, scale=scale, model=str(folder / "model"),
            stream=str(folder / "rivers.yaml"), data_dir=str(folder / "data"),
            quantisation=quantisation, training=dict(per_device_train_batch_size=1,
                max_length=tokens, max_train_rows=2), evaluation=dict(max_eval_rows=1,
                    final_eval_rows=2, max_new_tokens=4, latency_pairs=0),
            results_dir=str(folder / "runs"), cache_dir=str(folder / "cache")), quiet=True)
    saved = (Path(folder / "runs" / record["run_id"] / "adapter"
        / "adapter_model.safetensors").stat().st_size)
    c = record["config"]
    print(json.dumps(dict(scale=scale, adapter=adapter, quantisation=c["quantisation"],
        dtype=c["dtype"], gradient_checkpointing=c["training"]["gradient_checkpointing"],
        steps=record["task_info"][0]["steps"], tokens_a_row=tokens,
        train_loss=round(next(h["train_loss"] for h in record["history"] if "train_loss" in h), 4),
        seconds=round(time.time() - start, 1), run_seconds=record["summary"]["wall_s"],
        peak_rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        before_mb=round(before / 1e3), state_bytes=sum(record["bytes"].values()),
        save_pretrained_bytes=saved)))


def on_meta():
    "What the full shapes say without values."
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.shapes import adapter_size, model_config, shape_of
    out = {}
    for scale in SCALES:
        for adapter in ("himalaya", "lora", "lora-bank"):
            config = resolve(dict(scale=scale, adapter=adapter))
            size = adapter_size(config, model_config(config.model), 25)
            out[f"{scale}, {adapter}"] = dict(
                parameters=shape_of(model_config(config.model)).parameters, trained=size.trained,
                state_bytes=size.state)
            if adapter == "himalaya":
                assert size.state < 2.5e6, "HIMALAYA's state between tasks is over its budget"
                from himalaya_hest.himalaya.tuner import HimalayaConfig
                method = HimalayaConfig(**config.adapter_config)
                out[f"{scale}, {adapter}"] |= {k: getattr(method, k) for k in ("n_tasks", "n_coordinates", "n_features")}
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scales", nargs="*", help="medium, full; default: both")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--one", nargs=3, metavar=("SCALE", "ADAPTER", "FOLDER"),
        help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one: return one(*args.one, args.tokens)
    env, results = (os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}, [])
    import torch
    for scale in args.scales or SCALES:
        with tempfile.TemporaryDirectory() as d:
            name, changes, _ = SCALES[scale]
            write = (
                f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); from scales "
                f"import write_model; write_model({d + '/model'!r}, {name!r}, {changes!r})"
            )
            subprocess.run([sys.executable, "-c", write], env=env, check=True, capture_output=True)
            write_task(Path(d), args.tokens)
            for adapter in ADAPTERS:
                done = subprocess.run(
                    [sys.executable, __file__, "--tokens", str(args.tokens), "--one", scale,
                        adapter, d], env=env, capture_output=True, text=True)
                if done.returncode: sys.exit(f"{scale}, {adapter}:\n{done.stderr[-4000:]}")
                results.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(results[-1], flush=True)
    import bitsandbytes, transformers
    out = dict(command=f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} python bench/scales.py",
        machine=platform.machine(), versions=dict(python=platform.python_version(),
            torch=torch.__version__, transformers=transformers.__version__,
            bitsandbytes=bitsandbytes.__version__), exercises=results, on_meta_tensors=on_meta())
    if not args.scales:
        (ROOT / "records" / "bench" / "scales.json").write_text(json.dumps(out, indent=1) + "\n",
            encoding="utf-8")
    else: print(json.dumps(out["on_meta_tensors"], indent=1))


if __name__ == "__main__": main()
