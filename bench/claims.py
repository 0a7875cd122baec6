"""What the claims of Study 1 need beside runs: norms of updates over a stream, routing, operations,
memory, and what the package holds.

    OMP_NUM_THREADS=1 python bench/claims.py                        # all parts, some minutes on two cores
    OMP_NUM_THREADS=1 python bench/claims.py updates flops package  # these; others stay as they are
    OMP_NUM_THREADS=1 python bench/claims.py updates flops --stream small10 scale=small \
        model=FOLDER source=local data_dir=FOLDER --out records/bench/claims_small.json

updates   HIMALAYA through a stream, after each task the size of its update at every site, from the
          bytes that are kept; at the end which rows of bytes are others than after their task, and
          which task every evaluated prompt finds. What is evaluated in between is left out: it
          changes nothing.
flops     floating-point operations of matrix products (torch.utils.flop_counter) of reading a
          prompt and of decoding, with the adapter and with it disabled, on the adapter trained for
          `updates` (`run`); and the same products counted in the shapes of Llama-2-7B.
memory    the peak resident memory of a process that trains two tasks for twenty steps and answers,
          an adapter each, and of one that answers without.
package   a wheel is built and its files are listed; lines of the method, all and those that the
          default calls.

Writes records/bench/claims.json, each part with the command and the commit that made it (`dirty`
where there were uncommitted changes).
"""
import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

OUT = Path("records/bench/claims.json")
PARTS = ("updates", "flops", "memory", "package")
ADAPTERS = ("himalaya", "lora-bank", "lora", "lora+ewc", "olora", "gpm-lora", "lilac+ewc")


class Kept:
    "After each task the sizes of its update over γ, at every site, and its row of bytes."
    def __init__(self): self.sizes, self.rows = [], []
    def look(self, cores):
        from himalaya_hest.compare.tasks import update_norms
        last = torch.tensor([len(cores.finished) - 1])
        self.sizes.append(update_norms(cores, cores.kept(last))[0] / cores.gamma)
        self.rows.append(cores.finished.rows[-1].clone())
    def changed(self, cores):
        "How many rows are others now."
        return sum(not torch.equal(a, b) for a, b in zip(self.rows, cores.finished.rows, strict=True))


@torch.no_grad()
def found_share(run):
    "For each task, in the order trained: the share of its evaluated prompts that find it."
    from himalaya_hest.bridge.routed import batch_contexts
    from himalaya_hest.himalaya.tuner import nearest_tasks
    from himalaya_hest.running.evaluation import evaluation_batches
    tuner, right = run.adapter.tuner, [[] for _ in run.order]
    run.adapter.model.eval()
    for batch in evaluation_batches([run.data[n].evaluation for n in run.order], 64, run.tokenizer):
        found = nearest_tasks(tuner.core(), *batch_contexts(tuner, "default", batch)).tolist()
        for (task, _), f in zip(batch["rows"], found): right[task].append(f == task)
    return [float(np.mean(r)) for r in right], sum(map(len, right))


@functools.cache
def trained(stream, parameters):
    "A finished stream, and what was kept after every task."
    from accelerate import Accelerator
    from himalaya_hest.running.continual_run import begin_run
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.run_files import read_arguments
    from himalaya_hest.running.loop import train_stream
    from himalaya_hest.ground.hooks import StreamHooks
    kept = Kept()
    class Norms(StreamHooks):
        def on_task_end(self, loader): kept.look(run.adapter.tuner.core().tasks)
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(dict(adapter="himalaya", stream=stream, results_dir=folder,
            cache_dir=f"{folder}/cache", hooks=["Norms"],
            evaluation=dict(latency_pairs=0, after_tasks=[])) | read_arguments(parameters))
        run = begin_run(config, quiet=True, hooks=(Norms(),))
        run.accelerator = Accelerator(cpu=True)
        train_stream(run)
    return run, kept


@functools.cache
def version():
    "The code that this process began with, whatever is committed while it runs."
    from himalaya_hest.running.continual_run import code_version
    return code_version()


def made_with(run):
    """The commit and the settings of a run: what has to be the same in the comparison for the
    figures to speak of it."""
    c, cores = run.config, run.adapter.tuner.core().tasks
    return dict(git=version()["git"], dirty=version()["dirty"], gamma=cores.gamma, rank=cores.r,
        bits=cores.bits, adapter_config=c.adapter_config,
        training={k: v for k, v in c.training.items() if k != "checkpoint_interval_s"}, seed=c.seed,
        order_seed=c.order_seed, tasks=len(run.order), world=run.world["digest"])


def updates(args):
    run, kept = trained(args.stream, args.parameters)
    right, n = found_share(run)
    out = dict(largest=[float(s.max()) for s in kept.sizes], mean=[float(s.mean()) for s in kept.sizes],
        changed=kept.changed(run.adapter.tuner.core().tasks), prompts=n, right=right)
    print({k: out[k] if k == "changed" else f"{min(out[k]):.4f} to {max(out[k]):.4f}"
        for k in ("largest", "changed", "right")}, flush=True)
    return dict(stream=args.stream) | made_with(run) | out


def counted(call):
    "Floating-point operations of the matrix products and attention of a call."
    from torch.utils.flop_counter import FlopCounterMode
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(): call()
    return counter.get_total_flops()


def flops_of(run):
    "Prompts and decoding of the trained model, with the adapter and without."
    from himalaya_hest.streams.batching import Collator
    adapter, out = run.adapter, {}
    collate, prompts = Collator(
        run.tokenizer, padding_side="left"), [run.data[n].evaluation.prompts[0] for n in run.order]
    def answer(rows, new):
        b = collate(rows)
        keep = ("input_ids", "attention_mask") + (("prompt_mask", "instruction_mask")
            if adapter.takes_masks else ())
        return adapter.model.generate(**{k: b[k] for k in keep}, do_sample=False,
            min_new_tokens=new, max_new_tokens=new, pad_token_id=run.tokenizer.eos_token_id)
    def both(rows, new):
        with_ = counted(lambda: answer(rows, new))
        with adapter.model.disable_adapter(): without = counted(lambda: answer(rows, new))
        return with_, without
    one, many = [both([p], 1) for p in prompts], [both([p], 17) for p in prompts]
    out["prompts"] = [w / o - 1 for w, o in one]
    out["decoding"] = [(w17 - w1) / (o17 - o1) - 1 for (w1, o1), (w17, o17) in zip(one, many)]
    mixed = both(prompts, 17)
    out["mixed_batch"] = dict(sequences=len(prompts), extra=mixed[0] / mixed[1] - 1)
    out["tokens"] = [len(p["input_ids"]) for p in prompts]
    return out


def routing_flops(core, tasks=25):
    "Operations of finding one prompt's task among so many, by a router of the same size."
    from himalaya_hest.himalaya.router import Router, task_scores
    router = Router(len(core.router.e_mean), core.router.content.k)
    for n in ("e_scale", "t_scale"): getattr(router, n).fill_(1.)
    draw = lambda n: torch.randn(n, len(router.e_mean))
    for _ in range(tasks): router.add(draw(8), draw(8))
    return counted(lambda: task_scores(router, draw(1), draw(1)))


def large_flops(tokens=(1, 128, 1024)):
    """At the shapes of Llama-2-7B: backbone, widening and adapted sites counted on meta tensors, the
    router on drawn prompts of 25 tasks."""
    from himalaya_hest.study.footprint import at_large_scale
    from himalaya_hest.bridge.routed import _ROUTED, Routing
    from himalaya_hest.himalaya.task_cores import task_update
    tuner = at_large_scale().tuner
    core, out, made = tuner.core().eval(), {}, []
    for h in tuner._handles: h.remove() # the router reads values, which meta tensors have not
    cores = core.tasks.to("meta")
    one = torch.ones(1, 1, device="meta")
    once = routing_flops(core) + counted(lambda: made.append(task_update(cores, cores.live(), one)))
    for n in tokens:
        inputs = dict(input_ids=torch.zeros(1, n, dtype=torch.long, device="meta"),
            attention_mask=torch.zeros(1, 1, n, n, device="meta"), use_cache=False)
        bare = counted(lambda: tuner.model(**inputs))
        token = _ROUTED.set(Routing(default=made[0]))
        try: sites = counted(lambda: tuner.model(**inputs)) - bare
        finally: _ROUTED.reset(token)
        out[str(n)] = dict(backbone=bare, sites=sites, adapter=once + sites, extra=(once + sites) / bare)
    return out, cores.r


def flops(args):
    run, _ = trained(args.stream, args.parameters)
    large, rank = large_flops()
    out = dict(stream=args.stream, run=flops_of(run) | made_with(run), llama_2_7b=large, rank=rank)
    print({k: f"{np.mean(out['run'][k]):.4f}, at most {max(out['run'][k]):.4f}"
        for k in ("prompts", "decoding")}, out["run"]["mixed_batch"], out["llama_2_7b"], flush=True)
    return out


ONE = """import json, re, sys
from himalaya_hest.jobs.run import run_continual
r = run_continual(json.loads(sys.argv[1]), quiet=True)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()) # Linux; ru_maxrss may be the parent's
print(json.dumps(dict(mb=int(peak[1]) / 1e3, state_mb=r["summary"]["adapter_mb"])))"""


def memory(args):
    def peak(**kw):
        with tempfile.TemporaryDirectory() as folder:
            p = (dict(stream=args.stream, n_tasks=2, training=dict(max_steps=20),
                evaluation=dict(latency_pairs=0), results_dir=folder, cache_dir=f"{folder}/cache")
                | kw)
            done = subprocess.run([sys.executable, "-c", ONE, json.dumps(p)], capture_output=True,
                text=True, env=os.environ
                | dict(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"))
            if done.returncode: raise RuntimeError(done.stderr[-2000:])
            return json.loads(done.stdout.strip().splitlines()[-1])
    out = {"none": peak(adapter="lora", protocol="zero_shot")} | {a: peak(adapter=a)
        for a in ADAPTERS}
    print({k: round(v["mb"]) for k, v in out.items()}, flush=True)
    return dict(stream=args.stream, tasks=2, steps=20, peak=out)


def package(args):
    from himalaya_hest.workshop.equations import (
        METHOD, SHELL, called_by, exercised_lines, method_lines,
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
            "--no-build-isolation", "-w", folder, "."], check=True)
        wheel, = Path(folder).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        sources = {n: zipfile.ZipFile(wheel).read(n).decode() for n in names if n.endswith(".py")}
    suffixes = Counter(Path(n).suffix for n in names if ".dist-info" not in n)
    kernels = sorted(n for n, s in sources.items() if re.search(
        r"cpp_extension|load_inline|import triton|torch\.cuda\.(jit|_compile_kernel)", s))
    from himalaya_hest.jobs.run import run_continual
    with tempfile.TemporaryDirectory() as folder:
        few = dict(adapter="himalaya", stream=args.stream, n_tasks=2,
            training=dict(max_steps=10, max_train_rows=80), evaluation=dict(latency_pairs=2,
                max_eval_rows=4), results_dir=folder, cache_dir=f"{folder}/cache")
        called = called_by(lambda: run_continual(few, quiet=True))
    lines = {what: {part: dict(code=sum(x[m].code for m in of),
        with_signatures=sum(sum(x[m]) for m in of)) for part, of in (("method", METHOD),
            ("shell", SHELL))} for what, x in (("all", method_lines(METHOD + SHELL)),
                ("default", exercised_lines(called)))}
    out = dict(wheel=wheel.name, files={k or "none": v for k, v in sorted(suffixes.items())},
        kernels=kernels, lines=lines)
    print(out, flush=True)
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; none: all")
    parser.add_argument("--stream", default="mini25")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_intermixed_args()
    args.parameters = tuple(x for x in args.parts if "=" in x) # of the run
    args.parts = [x for x in args.parts if "=" not in x] or list(PARTS)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]!r}: {', '.join(PARTS)}")
    if args.parameters and (fixed := {"memory", "package"} & set(args.parts)):
        parser.error(f"{args.parameters[0]} is of a run, and of scale mini are "
                     + " and ".join(sorted(fixed)))
    from himalaya_hest.running.record import versions
    version()
    torch.manual_seed(0)
    for part in args.parts:
        found = globals()[part](args)
        record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        record[part] = (dict(command="OMP_NUM_THREADS=1 python bench/claims.py "
            + " ".join([part, *(["--stream", args.stream] if args.stream != "mini25" else []),
                        *args.parameters, *(["--out", str(args.out)] if args.out != OUT else [])]))
            | found | dict(versions=versions(), code_version=version()))
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n",
            encoding="utf-8")
    print(args.out, flush=True)


if __name__ == "__main__": main()
