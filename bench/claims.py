"""What the claims of Study 1 need beside runs: norms of atoms over a stream, open atoms,
operations, memory, and what the package holds.

    OMP_NUM_THREADS=1 python bench/claims.py                        # all parts, about ten minutes on two cores
    OMP_NUM_THREADS=1 python bench/claims.py norms flops package    # these; others stay as they are
    OMP_NUM_THREADS=1 python bench/claims.py norms --forms default  # some forms of the method, likewise

norms     HIMALAYA through a stream, one run a form: norms of the stored atoms after every task, of
          ΔW (or r) on every evaluated prompt at the end, both computed from the packed state after
          a round trip through its bytes; atoms open on a prompt. What is evaluated in between is
          left out: it changes nothing.
flops     floating-point operations of matrix products (torch.utils.flop_counter) of reading a
          prompt and of decoding, with the adapter and with it disabled, on the adapter trained in
          the first run of `norms`; and the same products counted on meta tensors in the shapes of
          Llama-2-7B.
memory    the peak resident memory of a process that trains two tasks for twenty steps and answers,
          an adapter each, and of one that answers without.
package   a wheel is built and its files are listed; lines of the method, all and those that the
          default preset calls.

Writes records/bench/claims.json, each part with the command and the commit that made it (`dirty`
where there were uncommitted changes), each form of `norms` with its own commit and the settings
that it was trained with.
"""
import argparse
import copy
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
FORMS = { # name → (preset, parts exchanged, tasks; 0: all)
    "default": ("default", {}, 0),
    "default, norm_rescaling off": ("default", dict(norm_rescaling=False), 0),
    "published_gain": ("published_gain", {}, 0),
    "published_gain, norm_rescaling off": ("published_gain", dict(norm_rescaling=False), 8),
    "published": ("published", {}, 0),
}
ADAPTERS = ("himalaya", "lora-bank", "lora", "lora+ewc", "olora", "gpm-lora", "lilac+ewc")


def packed_twin(core):
    "A copy of a core that went through its packed state."
    from himalaya_hest.himalaya.packing import load_packed, packed_state, snap_slots_
    twin = copy.deepcopy(core)
    snap_slots_(twin, (twin.owner >= 0).nonzero().squeeze(1), core.atom_bits)
    state = packed_state(twin, bits=core.atom_bits)
    with torch.no_grad():
        for p in twin.parameters(): p.zero_() # what is measured comes from the packed state alone
    load_packed(twin, state)
    return twin


@torch.no_grad()
def atom_norms(core):
    "Norms of the stored vectors of the slots in use, in float64: (largest, smallest)."
    used, book = core.owner >= 0, core.dictionary
    sides = [book.read] if book.write is book.read else [book.read, book.write]
    norms = torch.cat([p[used].double().norm(dim=1) for side in sides for p in side.values()])
    return float(norms.max()), float(norms.min())


def update_sizes(update, core):
    """Largest norm over the sites, per sequence: of r, or of ΔW over γ, from the explicit vectors
    in float64."""
    if hasattr(update, "r"):
        return torch.stack([r.double().norm(dim=-1) for r in update.r.values()]).amax(0)
    sizes = []
    for v, read, write in zip(update.strength, update.read, update.write):
        q, d, v = read.double(), write.double(), v.double()
        sizes.append(((v @ ((q @ q.T) * (d @ d.T))) * v).sum(-1).clamp_min(0).sqrt()
            / core.dictionary.gamma)
    return torch.stack(sizes).amax(0)


class Watched:
    "Counts the atoms that the gates open, and keeps the updates, while it is entered."
    def __enter__(self):
        import himalaya_hest.himalaya.growth as growth
        self.open, self.updates, self.module, self.original = [], [], growth, growth.gates_of
        def gates_of(core, logits, training):
            opened, gates = self.original(core, logits, training)
            self.open += opened.sum(1).tolist()
            return opened, gates
        growth.gates_of = gates_of
        return self
    def __exit__(self, *_): self.module.gates_of = self.original


def at_the_end(run):
    """Every evaluated prompt, answered by the packed adapter: open atoms, tokens of prompt and
    answer, size of the update."""
    from himalaya_hest.running.evaluation import evaluation_batches, greedy
    from himalaya_hest.bridge.routed import _ROUTED
    core, tuner, seen = run.adapter.tuner.core(), run.adapter.tuner, []
    run.adapter.model.eval()
    handle = tuner.routed_layers()[0].base_layer.register_forward_hook(
        lambda *_: seen.append(_ROUTED.get()["default"]))
    tasks = [run.data[n].evaluation for n in run.order]
    n_open, tokens, sizes = [], [], []
    try:
        with Watched() as watched, torch.no_grad():
            for batch in evaluation_batches(tasks, 64, run.tokenizer):
                seen.clear()
                before = len(watched.open)
                answers = greedy(run.adapter.model, batch, run.tokenizer, run.adapter.takes_masks)
                rows = len(batch["rows"])
                new = watched.open[before:]
                n_open += new if new else [0] * rows
                said = [len(run.tokenizer(a, add_special_tokens=False)["input_ids"]) + 1
                    for a in answers]
                tokens += [p + a for p, a in zip(batch["attention_mask"].sum(1).tolist(), said)]
                sizes += (update_sizes(seen[0], core).tolist() if seen[0] is not None
                    else [0.0] * rows)
    finally: handle.remove()
    assert len(n_open) == len(tokens) == len(sizes), (len(n_open), len(tokens), len(sizes))
    return np.array(n_open), np.array(tokens), np.array(sizes)


def trained(preset, parts, n_tasks, stream, folder):
    "A finished stream, and what was seen of it after every task."
    from accelerate import Accelerator
    from himalaya_hest.running.resolve import resolve
    from himalaya_hest.running.continual_run import begin_run
    from himalaya_hest.running.loop import train_stream
    from himalaya_hest.ground.hooks import StreamHooks
    points = []
    class Norms(StreamHooks):
        def on_task_end(self, loader):
            points.append(atom_norms(packed_twin(run.adapter.tuner.core())))
    config = resolve(dict(adapter="himalaya", preset=preset, adapter_config=dict(parts=parts),
        stream=stream, n_tasks=n_tasks, results_dir=folder, cache_dir=f"{folder}/cache",
        hooks=["Norms"], evaluation=dict(latency_pairs=0, after_tasks=[])))
    run = begin_run(config, quiet=True, hooks=(Norms(),))
    run.accelerator = Accelerator(cpu=True)
    with Watched() as watched: train_stream(run)
    return run, points, watched.open


@functools.cache
def version():
    "The code that this process began with, whatever is committed while it runs."
    from himalaya_hest.running.record import code_version
    return code_version()


def made_with(run, exchanged):
    """The commit and the settings of a run: what has to be the same in the comparison for the
    figures to speak of it."""
    from himalaya_hest.himalaya.flat_form import flat_of
    c = run.config
    return dict(git=version()["git"], dirty=version()["dirty"], preset=c.preset,
        gamma=run.adapter.tuner.core().dictionary.gamma, learning_rate=c.training["learning_rate"],
        exchanged=sorted(exchanged), adapter_config=flat_of(vars(c)),
        training={k: v for k, v in c.training.items() if k != "checkpoint_interval_s"}, seed=c.seed,
        order_seed=c.order_seed, tasks=len(run.order), world=run.world["digest"])


def norms(args):
    out = (json.loads(args.out.read_text(encoding="utf-8")).get("norms", {}).get("forms", {})
        if args.out.exists() else {})
    for name, (preset, parts, n_tasks) in ((n, FORMS[n]) for n in FORMS if n in args.forms):
        with tempfile.TemporaryDirectory() as folder:
            run, points, _ = trained(preset, parts, n_tasks, args.stream, folder)
            core = run.adapter.tuner.core()
            shares = sorted(run.position.scores[-1].items())
            core.load_state_dict(packed_twin(core).state_dict())
            n_open, tokens, sizes = at_the_end(run)
            out[name] = dict(**made_with(run, parts), prompts=len(n_open), bits=core.atom_bits,
                largest=[round(a, 5) for a, _ in points], smallest=[round(b, 5) for _, b in points],
                final_score=float(np.mean([s["score"] for _, s in shares])),
                size=dict(of="r" if preset != "default" else "ΔW / γ", largest=float(sizes.max()),
                    mean=float(sizes.mean())), open=dict(mean=float(n_open.mean()),
                        a_token=float((n_open * tokens).sum() / tokens.sum()),
                        largest=int(n_open.max()),
                        counts={int(k): int(v)
                            for k, v in sorted(Counter(n_open.tolist()).items())},
                        by_task=[float(x) for x in by_task(run, n_open)]))
            print(name, {k: out[name][k] for k in ("final_score", "size", "open")},
                f"largest atom {max(out[name]['largest']):.4f}", flush=True)
            if name == "default":
                args.flops_of_default = (flops_of(run) | made_with(run, {})
                    if "flops" in args.parts else None)
    return dict(stream=args.stream, forms=out)


def by_task(run, n_open):
    "Mean open atoms of each task's prompts, in the order trained."
    from himalaya_hest.running.evaluation import evaluation_batches
    rows = [i for batch in evaluation_batches([run.data[n].evaluation for n in run.order], 64,
        run.tokenizer) for i, _ in batch["rows"]]
    return [n_open[[k for k, i in enumerate(rows) if i == t]].mean() for t in range(len(run.order))]


def counted(call):
    "Floating-point operations of the matrix products and attention of a call."
    from torch.utils.flop_counter import FlopCounterMode
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(): call()
    return counter.get_total_flops()


def flops_of(run):
    "Prompts and decoding of the trained mini model, with the adapter and without."
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
    core = run.adapter.tuner.core()
    n = [len(p["input_ids"]) for p in prompts]
    with Watched() as watched: [answer([p], 1) for p in prompts]
    extra = [w - o for w, o in one]
    # by formula over counted
    out["formula"] = [float(adapter_flops(core, t, u) / x)
        for t, u, x in zip(n, watched.open, extra)]
    out["tokens"] = n
    return out


def adapter_flops(core, tokens, slots):
    """Operations of one sequence's prompt with so many open slots: the router once, its slots at
    every site for every token."""
    book, r = core.dictionary, core.router
    d, N = len(r.e_mean), r.n_features
    # features, logits and coefficients, the two means
    router = 2 * 2 * d * N + 2 * N * r.w2.shape[1] + 2 * 2 * tokens * d
    gram = sum(2 * slots * slots * (book.sites[g[0]].d_in + book.sites[g[0]].d_out)
        + 2 * len(g) * slots * slots for g in book.groups.values())
    return router + gram + sum(2 * tokens * slots * (s.d_in + s.d_out) for s in book.sites)


def large_flops(tokens=(1, 128, 1024), slots=3):
    """At the shapes of Llama-2-7B: the backbone counted on meta tensors, its adapted sites too, the
    router by the formula that the mini model confirms."""
    from himalaya_hest.compare.large import large_adapter
    from himalaya_hest.bridge.routed import _ROUTED
    tuner = large_adapter(dict(config=dict(adapter="himalaya", preset="default", seed=0))).tuner
    core, out = tuner.core().eval(), {}
    for h in tuner._handles: h.remove() # the router reads values, which meta tensors have not
    for n in tokens:
        inputs = dict(input_ids=torch.zeros(1, n, dtype=torch.long, device="meta"),
            attention_mask=torch.zeros(1, 1, n, n, device="meta"), use_cache=False)
        bare = counted(lambda: tuner.model(**inputs))
        update = core.dictionary(torch.zeros(slots, dtype=torch.long, device="meta"),
            torch.zeros(1, slots, device="meta"))
        token = _ROUTED.set(dict(default=update))
        try: sites = counted(lambda: tuner.model(**inputs)) - bare
        finally: _ROUTED.reset(token)
        whole = adapter_flops(core, n, slots)
        at_sites = sum(2 * n * slots * (s.d_in + s.d_out) for s in core.dictionary.sites)
        out[str(n)] = dict(backbone=bare, sites=sites, sites_by_formula=at_sites,
            adapter=whole - at_sites + sites, extra=(whole - at_sites + sites) / bare)
    return out


def flops(args):
    if getattr(args, "flops_of_default", None) is None:
        with tempfile.TemporaryDirectory() as folder:
            run = trained("default", {}, 0, args.stream, folder)[0]
            args.flops_of_default = flops_of(run) | made_with(run, {})
    out = dict(stream=args.stream, mini=args.flops_of_default, llama_2_7b=large_flops(), slots=3)
    print({k: f"{np.mean(out['mini'][k]):.4f}, at most {max(out['mini'][k]):.4f}"
        for k in ("prompts", "decoding", "formula")}, out["mini"]["mixed_batch"], out["llama_2_7b"],
        flush=True)
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
    parser.add_argument("parts", nargs="*", default=["norms", "flops", "memory", "package"],
        help="norms, flops, memory, package; none: all")
    parser.add_argument("--stream", default="mini25")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS),
        help="forms for norms; default: all")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if unknown := set(args.parts) - {"norms", "flops", "memory", "package"}:
        parser.error(f"unknown part {sorted(unknown)[0]!r}: norms, flops, memory or package")
    from himalaya_hest.running.record import versions
    version()
    torch.manual_seed(0)
    for part in args.parts:
        found = globals()[part](args)
        record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        record[part] = (dict(command="OMP_NUM_THREADS=1 python bench/claims.py "
            + " ".join([part] + (["--stream", args.stream] if args.stream != "mini25" else [])))
            | found | dict(versions=versions(), code_version=version()))
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n",
            encoding="utf-8")
    print(args.out, flush=True)


if __name__ == "__main__": main()
