"""Does memory follow the rows, or the tasks? Generated rows through the whole data path and the
real training loop.

    nice -n 19 python bench/memory.py --rows 50000                     # data path, then 200 steps a
    task with lora and with himalaya
    nice -n 19 python bench/memory.py --rows 5000                      # the same with a tenth of
    the rows, to compare
    python bench/memory.py --rows 500 --tasks 3 --steps 5 --record -   # a small one, to see that it works
    python bench/memory.py --again                         # slopes and peaks anew from the record

Each task gets rows of some 300 to 1500 bytes (seeded, in four languages) as JSON lines in a
temporary folder. Stages, each in a process of its own: `data` reads, checks, hashes and tokenises
every split, computes the digest of the world and reads every loader to its end; `lora` and
`himalaya` are `run_continual` on what `data` left in the cache, with the shipped backbone, batches
of --batch rows and --eval-rows evaluated rows, all tasks evaluated at the end alone. After each
task the memory is read from /proc/self/status: RssAnon is what the process holds, RssFile are pages
of mapped files, which the system takes back when it needs them; malloc is what the C library has
given out and not got back (mallinfo2), without the holes that tensors of changing sizes leave in
its heap. The slope is a straight line through the tasks after the first five, with its 95 %
interval.
"""
import os

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import argparse
import ctypes
import gc
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "records" / "bench" / "memory.json"
MB, SKIPPED = 2 ** 20, 5
LANGUAGES = ("en", "de", "fr", "sw")
FORMS = {"translation": dict(instruction="Translate into German.", prompt="{text}",
    target="{other}", metric="chrf", languages=["en", "de"]),
    "summarisation": dict(instruction="Say in a few words what the text is about.", prompt="{text}",
        target="{short}", metric="rouge_l", languages=["en"]),
    "qa": dict(instruction="Answer from the text.", prompt="{short}?\n{text}",
        target="{answers.text[0]}", no_answer="none", metric="token_f1", languages=["fr"]),
    "pair": dict(instruction="Does the second text follow? Answer no or yes.",
        prompt="{text}\n{short}", target="{label}", labels=["no", "yes"], metric="label_accuracy",
        languages=["sw"]), "classification": dict(instruction="Which kind of text is it?",
            prompt="{text}", target="{label}", labels=["news", "letter"], label_noise=0.1,
            metric="label_accuracy", languages=["en"])}


def sentences(language, draw, n=2000):
    "Sentences of the mini world's words."
    from himalaya_hest.streams.mini_world import lexicon
    words, at = lexicon("main"), LANGUAGES.index(language)
    one = lambda kind: (lambda k: k if not at else words[kind][k][at - 1])(
        draw.choice(sorted(words[kind])))
    return [
        f"{one('subjects')} {one('verbs')} {one('objects')} {one('adverbs')}, "
        f"{draw.randrange(10_000)}."
        for _ in range(n)
    ]


def write_rows(path, task, n_rows, seed):
    "One split as JSON lines; rows of 300 to 1500 bytes."
    draw = random.Random(f"{path.name} {task} {seed}")
    known = {l: sentences(l, draw) for l in LANGUAGES}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for i in range(n_rows):
            language, size, text = draw.choice(LANGUAGES), draw.randrange(200, 1300), ""
            while len(text) < size: text += draw.choice(known[language]) + " "
            short = draw.choice(known[language])
            row = dict(id=i, text=text, short=short, other=draw.choice(known["de"]),
                label=draw.randrange(2),
                answers=dict(text=[short.split()[0], short.split()[-1]][: draw.randrange(3)]))
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_world(folder, n_tasks, n_rows, n_held, seed):
    "The data and the stream file."
    kinds = list(FORMS)
    tasks = [dict(FORMS[kinds[k % len(kinds)]], name=f"task{k:02}", kind=kinds[k % len(kinds)],
        max_new_tokens=24) for k in range(n_tasks)]
    for k, task in enumerate(tasks):
        for split, n in (("train", n_rows), ("validation", n_held)):
            write_rows(folder / "data" / task["name"] / f"{split}.jsonl", task["name"], n, seed)
        told(f"generate {k + 1}/{n_tasks}")
    (folder / "stream.yaml").write_text(
        json.dumps(dict(name="generated", source="local", tasks=tasks)))


def told(*what): print(f"[{time.perf_counter() - STARTED:7.0f} s]", *what, flush=True)


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_size_t)
        for n in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def given_out():
    "MB that malloc has given out; None where the C library does not say."
    try: count = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError): return None
    count.restype = Mallinfo
    now = count()
    return (now.uordblks + now.hblkhd) / MB


def memory():
    """MB of this process: held (RssAnon), of mapped files (RssFile), both (VmRSS), the largest both
    have been since the last call (VmHWM)."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line)
    now = {k: int(lines[k].split()[0]) * 1024 / MB for k in ("RssAnon", "RssFile", "VmRSS",
        "VmHWM")}
    try: Path("/proc/self/clear_refs").write_text("5")
    except OSError: now["VmHWM"] = None
    return now | dict(malloc=given_out())


def slope(values):
    """MB a task by least squares over the tasks after the first SKIPPED, with the half width of its
    95 % interval."""
    import numpy as np
    from scipy import stats
    y = np.array(values[SKIPPED:] if len(values) > SKIPPED + 2 else values)
    if np.ptp(y) == 0: return dict(mb_per_task=0., half_width=0., tasks=len(y))
    fit = stats.linregress(np.arange(len(y)), y)
    return dict(mb_per_task=fit.slope,
        half_width=float(stats.t.ppf(0.975, max(len(y) - 2, 1)) * fit.stderr), tasks=len(y))


def summary(points):
    "What a stage's points say."
    out = {name: dict(slope=slope([p[name] for p in points]), largest=max(p[name] for p in points))
        for name in ("RssAnon", "RssFile", "VmRSS", "malloc") if points[0][name] is not None}
    peaks = [p["VmHWM"] for p in points if p["VmHWM"]]
    return out | dict(peak_mb=max(peaks) if peaks else None)


def parameters(a, adapter):
    return dict(adapter=adapter, stream=str(a.folder / "stream.yaml"), source="local",
        data_dir=str(a.folder / "data"), cache_dir=str(a.folder / "cache"),
        results_dir=str(a.folder / "runs"), training=dict(max_train_rows=a.rows, max_steps=a.steps,
            per_device_train_batch_size=a.batch), evaluation=dict(max_eval_rows=a.eval_rows,
                per_device_eval_batch_size=16, latency_pairs=0, after_tasks=[a.tasks]))


def data_stage(a):
    "Every split tokenised and every loader read, then the digest of the world."
    from himalaya_hest.streams.batching import Collator, TaskLoader
    from himalaya_hest.running.backbone import load_backbone
    from himalaya_hest.streams.sources import LocalSource
    from himalaya_hest.streams.tokenised import materialise, world_digest
    from himalaya_hest.streams.stream import load_stream
    _, tokenizer, backbone = load_backbone("mini")
    stream, source, points, kept, began = (load_stream(a.folder / "stream.yaml"),
        LocalSource(a.folder / "data"), [], [], time.perf_counter())
    memory()
    for k, task in enumerate(stream.tasks, 1):
        rows = materialise(task, source, "train", tokenizer, 512, a.folder / "cache",
            max_rows=a.rows)
        kept += [rows, materialise(task, source, "validation", tokenizer, 512, a.folder / "cache",
            max_rows=a.eval_rows)]
        for batch in TaskLoader(rows, Collator(tokenizer), 8, seed=0): pass
        rows.close(); del batch; gc.collect()
        points.append(memory())
        told(
            f"data {k}/{a.tasks}, {points[-1]['RssAnon']:.0f} MB held; about "
            f"{(time.perf_counter() - began) * (a.tasks - k) / k / 60:.0f} minutes to go"
        )
    settings = dict(max_train_rows=a.rows, max_eval_rows=a.eval_rows)
    cached, digest_from = time.process_time(), world_digest(stream, source, backbone, settings,
        a.folder / "cache")
    read = time.process_time()
    again = world_digest(stream, source, backbone, settings)
    done = time.process_time()
    assert digest_from == again
    return points, dict(digest_from_cache_s=read - cached, digest_from_rows_s=done - read,
        after_digest=memory())


def training_stage(a, adapter):
    "The real loop on what the data stage left."
    from himalaya_hest.jobs.run import run_continual
    from himalaya_hest.ground.hooks import StreamHooks
    points, began = [], time.perf_counter()

    class Meter(StreamHooks):
        "Reads the memory when a task ends."
        def on_task_end(self, loader):
            gc.collect()
            points.append(memory())
            told(
                f"{adapter} {len(points)}/{a.tasks}, {points[-1]['RssAnon']:.0f} MB held; "
                "about "
                f"{(time.perf_counter() - began) * (a.tasks - len(points)) / len(points) / 60:.0f} "
                "minutes to go"
            )

    record = run_continual(parameters(a, adapter), quiet=True, hooks=[Meter()])
    return points, dict(steps=record["history"][-1]["step"], versions=record["versions"])


def stage_of(a, stage):
    "One stage in a process of its own."
    out = a.folder / f"{stage}.json"
    command = [sys.executable, __file__,
        *(f"--{k}={getattr(a, k)}" for k in ("rows", "tasks", "steps", "batch", "seed")),
        f"--eval-rows={a.eval_rows}", f"--stage={stage}", f"--folder={a.folder}"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return json.loads(out.read_text())


def write_record(a, stages):
    "Put a run beside those of other sizes."
    before = json.loads(RECORD.read_text()) if RECORD.exists() else dict(runs=[])
    command = "python bench/memory.py " + " ".join(x for x in sys.argv[1:]
        if not x.startswith("--folder"))
    sizes = {k: getattr(a, k) for k in ("rows", "tasks", "steps", "batch", "eval_rows", "seed")}
    data = [p for p in (a.folder / "data").rglob("*.jsonl")]
    run = dict(command=command.strip(), **sizes, data_mb=sum(p.stat().st_size for p in data) / MB,
        cache_mb=sum(p.stat().st_size for p in (a.folder / "cache").rglob("*.arrow")) / MB,
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        stages=stages)
    write_runs([r for r in before["runs"] if r["rows"] != a.rows] + [run])


def write_runs(runs):
    "The record, one point a line."
    for stage in (s for r in runs for s in r["stages"].values()):
        stage["summary"] = summary(stage["points"])
    rounded = json.loads(
        json.dumps(dict(unit="MB", runs=sorted(runs, key=lambda r: r["rows"])), allow_nan=False),
        parse_float=lambda x: round(float(x), 3))
    RECORD.write_text(re.sub(r'\{\s+("RssAnon": [^{}]*?)\s+\}',
        lambda m: "{" + re.sub(r"\s+", " ", m[1]) + "}", json.dumps(rounded, indent=1)) + "\n")
    told(f"written to {RECORD}")


def main(a):
    if a.again: return write_runs(json.loads(RECORD.read_text())["runs"])
    if a.stage:
        points, more = data_stage(a) if a.stage == "data" else training_stage(a, a.stage)
        (a.folder / f"{a.stage}.json").write_text(
            json.dumps(dict(summary=summary(points), points=points) | more))
        return
    with tempfile.TemporaryDirectory(dir=a.folder, prefix="memory-") as folder:
        a.folder = Path(folder)
        make_world(a.folder, a.tasks, a.rows, max(a.eval_rows, 16), a.seed)
        stages = {stage: stage_of(a, stage) for stage in ("data", *a.adapters)}
        for stage, s in stages.items():
            slopes = ", ".join(f"{name} {v['slope']['mb_per_task']:+.3f} ± "
                f"{v['slope']['half_width']:.3f}" for name, v in s["summary"].items()
                if name != "peak_mb")
            told(
                f"{stage}: MB a task: {slopes}; at most "
                f"{s['summary']['RssAnon']['largest']:.0f} MB held, peak with mapped files "
                f"{s['summary']['peak_mb'] or 0:.0f} MB"
            )
        if a.record != "-": write_record(a, stages)


STARTED = time.perf_counter()
if __name__ == "__main__":
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, default=50_000)
    p.add_argument("--tasks", type=int, default=25)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--eval-rows", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--adapters", nargs="*", default=["lora", "himalaya"])
    p.add_argument("--folder", type=Path, default=None,
        help="where the temporary folder goes; 25 tasks of 50 000 rows take about 8 GB")
    p.add_argument("--record", default="", help="- writes none")
    p.add_argument("--again", action="store_true", help="work the record's points out again")
    p.add_argument("--stage", default="", help=argparse.SUPPRESS)
    main(p.parse_args())
