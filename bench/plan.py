"""The cost formula of himalaya_hest.running.plan: measure what it needs, and check it on runs that
it has not seen.

    python bench/plan.py calibrate          # small steps of random models -> himalaya_hest/data/cpu_costs.json
    python bench/plan.py rates              # products and memory at larger widths -> the same file
    python bench/plan.py check                        # whole runs, predicted and measured -> records/bench/plan.json
    python bench/plan.py lengths DATA_DIR   # characters a row of local data -> himalaya_hest/data/lengths.json

Times are processor seconds of one thread (OMP_NUM_THREADS=1), which a busy machine hardly changes.
`calibrate` fits eight costs to parts of small runs on random Llamas of widths 64, 192 and 256;
`check` runs the shipped backbone (width 128) and a random Llama of width 512 over other numbers of
tasks and rows, so no point that is checked was fitted.
"""
import os

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import argparse
import json
import platform
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT/"himalaya_hest"/"data"
ADAPTERS = ("lora", "himalaya")
# a hub task by data of its kind
SIMILAR = {"wmt14": "wmt14_de_en", "tydiqa": "tydiqa_goldp_fi", "opus_books": "ntrex_en_fr",
    "flores": "ntrex_en_sw", "iwslt2017": "iwslt2017_en_de", "gigaword": "aeslc",
    "yelp_polarity": "imdb", "xnli": "xnli_es", "conll2003": "turku_ner_fi"}
KINDS = dict(translation="wmt14", summarisation="xsum", qa="squad_v2", code="code_alpaca",
    pair="mnli", classification="ag_news", entities="conll2003")


def random_model(folder, width, layers):
    "A random Llama with the shipped tokenizer, which never ends an answer."
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from himalaya_hest.streams.backbone import mini_backbone_dir
    tokenizer = AutoTokenizer.from_pretrained(mini_backbone_dir())
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=width, intermediate_size=int(2.6875 * width),
            num_hidden_layers=layers, num_attention_heads=max(1, width // 32),
            num_key_value_heads=max(1, width // 32), vocab_size=2048, max_position_embeddings=512,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    with torch.no_grad():
        # the end token never has the largest logit: every answer is as long as its cap
        model.model.embed_tokens.weight[2] = 0
    path = Path(folder)/f"llama-{width}-{layers}"
    model.save_pretrained(path); tokenizer.save_pretrained(path)
    return str(path)


def timed_run(parameters):
    """Processor seconds of a run by parts: training (steps), evaluation, rest; the loads, and the
    tokens that were really generated."""
    from himalaya_hest.jobs.run import run_continual
    from himalaya_hest.running import lessons, loop, training
    spent, kept = dict(training=0., evaluation=0.), (training.train_task, loop.evaluate)
    def clock(part, function, *args, **kw):
        start = time.process_time()
        try: return function(*args, **kw)
        finally: spent[part] += time.process_time() - start
    training.train_task = partial(clock, "training", kept[0])
    loop.evaluate = lessons.evaluate = partial(clock, "evaluation", kept[1])
    start = time.process_time()
    try: record = run_continual(parameters, quiet=True)
    finally:
        training.train_task, loop.evaluate = kept
        lessons.evaluate = kept[1]
    return spent | dict(rest=time.process_time() - start - sum(spent.values())), record


def parameters(folder, **kw):
    return (dict(results_dir=str(Path(folder) / "runs"), cache_dir=str(Path(folder) / "cache"),
        stream="mini25", overwrite=True) | kw)


def unit_plan(given, **unit):
    "Seconds of a run's parts on a device with the given costs and no others."
    from himalaya_hest.running.costs import Device, seconds
    from himalaya_hest.running.plan import make_plan
    zero = dict(flops=1e30, bandwidth=1e30, layer_s=0.0, step_s=0.0, token_s=0.0, row_s=0.0,
        task_s=0.0, task_steps=0.0, start_s=0.0)
    device = Device("unit", cpu=True, **(zero | unit))
    plan = make_plan({k: v for k, v in given.items() if k != "overwrite"}, on=[device])
    at_most = plan.config.model != "mini" # a random model writes until its cap
    from himalaya_hest.running.costs import evaluation_seconds
    from himalaya_hest.running.loads import evaluations
    evaluated = evaluations(plan.config, plan.loads, fresh=plan.of.adapter.keeps_answers)
    return (seconds(plan.of, plan.loads, device)
        | dict(evaluation=evaluation_seconds(plan.of, evaluated, device, at_most)), plan)


def least(columns, wanted):
    "Costs of at least 0 with the smallest relative errors."
    from scipy.optimize import nnls
    a = (torch.tensor(columns, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64)[:,
        None])
    scale = a.amax(0).clamp_min(1e-30)
    return (torch.from_numpy(nnls((a / scale).numpy(), torch.ones(len(wanted)).numpy())[0])
        / scale).tolist()


def product_rate(width=256, seconds=2.):
    "Operations a second of float32 matrix products as a layer of that width has them."
    x, w = torch.randn(800, width), torch.randn(int(2.6875 * width), width)
    for _ in range(5): x @ w.T
    start, n = time.process_time(), 0
    while time.process_time() - start < seconds: x @ w.T; n += 1
    return 2 * x.numel() * len(w) * n / (time.process_time() - start)


def fitted(seen):
    """The costs of a device: products measured alone, the host's costs from evaluation and the rate
    of memory from training, in turns; then what a task costs beside its steps."""
    known = dict(flops=1 / product_rate(), bandwidth=0., layer_s=0.)
    for _ in range(20):
        left = [max(s["evaluation"] - sum(known[k] * t[k]["evaluation"]
            for k in ("flops", "bandwidth")), 0.1 * s["evaluation"]) for s, t, *_ in seen]
        token_s, known["layer_s"], row_s = least([[t[k]["evaluation"] for k in (
            "token_s", "layer_s", "row_s")] for _, t, *_ in seen], left)
        left = [max(s["training"] - sum(known[k] * t[k]["training"] for k in ("layer_s", "flops")),
            0.1 * s["training"]) for s, t, *_ in seen]
        step_s, known["bandwidth"], first_s = least([[*(t[k]["training"]
            for k in ("step_s", "bandwidth")), n] for _, t, n, _ in seen], left)
    start_s, task_s, task_steps = least(
        [[1.0, n, n * s["training"] / steps] for s, _, n, steps in seen],
        [s["rest"] for s, *_ in seen])
    return dict(flops=1 / max(known["flops"], 1e-15), bandwidth=1 / max(known["bandwidth"], 1e-13),
        layer_s=known["layer_s"], step_s=step_s, token_s=token_s, row_s=row_s,
        task_s=task_s + first_s, task_steps=task_steps, start_s=start_s)


def calibrate(args):
    costs, points = {}, []
    with tempfile.TemporaryDirectory() as d:
        random_model(d, 64, 2)
        for adapter in ADAPTERS:
            # imports and first calls
            timed_run(parameters(d, adapter=adapter, model=random_model(d, 64, 2), n_tasks=1,
                mode="trial"))
            seen = []
            for width, layers, tasks, n_rows in (
                (64, 2, 2, 96),
                (64, 6, 1, 160),
                (192, 4, 2, 96),
                (256, 2, 1, 96),
                (256, 6, 2, 96),
                (64, 2, 5, 40),
                (192, 2, 4, 48),
                (96, 4, 2, 320),
            ):
                given = parameters(d, adapter=adapter, model=random_model(d, width, layers),
                    n_tasks=tasks, training=dict(max_train_rows=n_rows),
                    evaluation=dict(max_eval_rows=24, latency_pairs=0))
                spent, _ = timed_run(given)
                plan = unit_plan(given)[1]
                seen.append((spent, {k: unit_plan(given, **{k: 1.0})[0]
                    for k in ("step_s", "layer_s", "flops", "bandwidth", "token_s", "row_s")},
                    tasks, plan.steps))
                points.append(dict(adapter=adapter, width=width, layers=layers, tasks=tasks,
                    rows=n_rows) | {k: round(v, 3) for k, v in spent.items()})
                print(points[-1], flush=True)
            costs[adapter] = fitted(seen)
            print(adapter, costs[adapter], flush=True)
    known = json.loads((DATA/"cpu_costs.json").read_text(encoding="utf-8"))
    # rates of larger backbones have a command of their own
    out = dict(rates=known["rates"], command="OMP_NUM_THREADS=1 python bench/plan.py calibrate",
        machine=platform.machine(), torch=torch.__version__,
        costs={a: {k: float(f"{v:.4g}") for k, v in c.items()} for a, c in costs.items()},
        points=points)
    (DATA/"cpu_costs.json").write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def check(args):
    from himalaya_hest.running.costs import cpu_device, evaluation_seconds, seconds
    from himalaya_hest.running.loads import evaluations
    from himalaya_hest.running.plan import make_plan
    points = []
    with tempfile.TemporaryDirectory() as d:
        wide = random_model(d, 512, 4)
        for adapter in ADAPTERS:
            timed_run(parameters(d, adapter=adapter, n_tasks=1, mode="trial"))
            for model, tasks, n_rows, eval_rows in (
                ("mini", 3, 400, 50),
                ("mini", 8, 120, 50),
                ("mini", 15, 60, 20),
                (wide, 2, 48, 16),
                (wide, 4, 80, 8),
            ):
                given = parameters(d, adapter=adapter, model=model, n_tasks=tasks,
                    training=dict(max_train_rows=n_rows), evaluation=dict(max_eval_rows=eval_rows,
                        latency_pairs=0))
                device = cpu_device(adapter)
                plan = make_plan({k: v for k, v in given.items() if k != "overwrite"}, on=[device])
                low = seconds(plan.of, plan.loads, device)
                high = low | dict(evaluation=evaluation_seconds(plan.of,
                    evaluations(plan.config, plan.loads), device, True))
                long = low | dict(evaluation=evaluation_seconds(plan.of,
                    evaluations(plan.config, plan.loads, plan.of.adapter.keeps_answers), device,
                    True))
                spent, record = timed_run(given)
                said = long if model != "mini" else low # a random model writes until its cap
                points.append(dict(adapter=adapter, model="mini" if model == "mini"
                    else "random Llama of width 512", tasks=tasks, rows=n_rows, eval_rows=eval_rows,
                    steps=plan.steps, steps_run=sum(t["steps"] for t in record["task_info"]),
                    predicted_s=round(sum(said.values()), 2),
                    predicted_at_most_s=round(sum(high.values()), 2),
                    measured_s=round(sum(spent.values()), 2),
                    ratio=round(sum(said.values()) / sum(spent.values()), 3),
                    predicted={k: round(v, 2) for k, v in said.items()},
                    measured={k: round(v, 2) for k, v in spent.items()}))
                print(points[-1], flush=True)
                shutil.rmtree(Path(d)/"runs")
    ratios = [p["ratio"] for p in points]
    out = dict(command="OMP_NUM_THREADS=1 python bench/plan.py check",
        costs="himalaya_hest/data/cpu_costs.json", versions=dict(python=platform.python_version(),
            torch=torch.__version__), machine=platform.machine(),
        unit="processor seconds of one thread", worst_ratio=[min(ratios), max(ratios)],
        points=points, founding=founding())
    (ROOT / "records" / "bench" / "plan.json").write_text(json.dumps(out, indent=1) + "\n",
        encoding="utf-8")


def founding():
    "The founding numbers of study 1 beside the formula's."
    from himalaya_hest.running.plan import make_plan
    out = dict(steps_expected=99_000, hours_expected=[25, 40])
    for name, given in (
        ("full", dict(scale="full")),
        (
            "full, evaluation batch 4",
            dict(scale="full", evaluation=dict(per_device_eval_batch_size=4)),
        ),
        ("medium", dict(scale="medium")),
    ):
        p = make_plan(given)
        out[name] = dict(steps=p.steps, generations=p.generations,
            training_tokens=round(p.tokens["training"]),
            memory_gb=round(sum(p.memory.values()) / 1e9, 2), hours={d: [round(h, 2) for h in hs]
                for d, hs in p.hours.items()}, notes=p.notes)
    return out


def lengths(args):
    from himalaya_hest.streams.stream import load_stream
    from himalaya_hest.streams.hub import get_source
    from dataclasses import replace
    source, tasks = get_source("local", str(args.data_dir), None, None), {}
    known = {t.name: t for t in load_stream("continual25").tasks} | {t.name: t
        for t in load_stream("local25").tasks}
    for name, task in known.items():
        if not (args.data_dir/name).is_dir(): continue
        rows = source.numbered_rows(
            replace(task, splits=dict(train="train", validation="validation")), "train", 200)
        examples = [task.format(rows[i][1]) for i in range(len(rows))]
        deciles = lambda sizes: [sorted(sizes)[int((k + .5) / 10 * len(sizes))] for k in range(10)]
        tasks[name] = dict(rows=deciles([len(e.instruction) + len(e.prompt) + len(e.target)
            for e in examples]), targets=deciles([len(e.target) for e in examples]))
    for name, other in SIMILAR.items(): tasks[name] = tasks[other] | dict(like=other)
    lines = ",\n  ".join(f"{json.dumps(n)}: {json.dumps(t)}" for n, t in sorted(tasks.items()))
    (DATA / "lengths.json").write_text(
        f'{{"command": "python bench/plan.py lengths DATA_DIR", "unit": "characters; ten '
        'deciles of a sample of training rows (instruction, prompt and target) and of '
        'their targets",\n'
        f' "kinds": {json.dumps(KINDS)},\n "tasks": {{\n  {lines}}}}}\n',
        encoding="utf-8",
    )


def rates(args):
    "Rates of a large backbone's products and memory, as a plan measures them on its own machine."
    from himalaya_hest.running.costs import measured_rates
    from himalaya_hest.running.shapes import model_config, shape_of
    shape, path = shape_of(model_config("Qwen/Qwen2.5-0.5B")), DATA/"cpu_costs.json"
    found = {}
    for dtype in ("float32", "bfloat16"):
        r = measured_rates(shape, dtype, 512)
        found[dtype] = {k: float(f"{getattr(r, k):.3g}") for k in ("flops", "bandwidth")}
    costs = json.loads(path.read_text(encoding="utf-8")) | dict(rates=found)
    path.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    print(found)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(required=True)
    for name, function in (("calibrate", calibrate), ("rates", rates), ("check", check),
            ("lengths", lengths)):
        p = sub.add_parser(name); p.set_defaults(run=function)
        if name == "lengths": p.add_argument("data_dir", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__": main()
