r"""Generation with fewer passes over the weights, studied on a real model: each arm answers the
same prompts, in turns at each prompt, and its process time is divided by plain generation's.

    OMP_NUM_THREADS=1 python bench/passes.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16 training.max_length=928 --tasks cnn_dailymail xsum ag_news squad_v2
    OMP_NUM_THREADS=1 python bench/passes.py model=FOLDER source=local data_dir=FOLDER \
        dtype=bfloat16 --steps 0 --seeds 1 --prompts 16 --out records/bench/passes-bare.json
    OMP_NUM_THREADS=1 python bench/passes.py scale=mini source=mini --stream mini_cnndm \
        --tasks cnn_articles --steps 122 --batch 8 --rates .01 .02 .04 \
        --out records/bench/passes-mini.json

For each of --seeds seeds and each of --tasks a LoRA (r = 8 on q and v) learns --steps steps of
--batch training rows, in rounds where there are fewer, and is merged; its rate is that of --rates
whose first seed has the least loss on --answers further training rows. On greedy answers to these
the controller is fitted and fixed rules are replayed, so many tokens each time of a copy or else of
what the table says, of a copy, or of the table; the cheapest of all is the rival, and that of each
other kind is measured too. Transformers' lookup copies as many tokens at most as took it the least
time there, and what a lossy answer costs is learned there as well, to be held against the
validation rows. Tables are of the references of all other training rows.
The first --prompts validation rows are dealt to the seeds in turn; arms that are no plain
generation, lookup, rule or `passes` have only --few of them. The mask is one of blocks that the
backbone misses least on four batches, and a LoRA learned with it; HEST gates blocks by token at its
default budget. Both learned the same rows at each seed, at rates found as the LoRA's (HEST's of
--hest-rates). All arms attend by groups (`grouped_attention`) but for one, plain generation as
Transformers attends by itself.
Answers have at most as many tokens as the task allows and --new-tokens, and end as the task says,
but for `no end`: --new-tokens tokens whatever they are, of which those of plain generation count.
What a killed call has measured stays in --work, and the same call goes on; the record is of all
that is there. `--again` measures nothing and writes the record of it. `--only TASK` measures one of
the tasks, with tables of all, and has a record of its own: calls may stand beside one another, or
on other machines.

Ratios are medians over prompts, with the 95 % interval of a bootstrap over prompts: `time` of whole
answers, `token_time` of a whole answer for each of its tokens, since answers may be of other
lengths, `decode_time` of a token behind the prompt's pass. An arm that a prompt lacks is measured
there later, beside those that each is measured beside. `same` is the share of
plain generation's text; where it is another, `gap` is by how much the logits of the token of
the plain text at the first difference and its own differ, in spacings of bfloat16 (or of the type
the model is held in) between numbers as large as its logits, by one pass over the text.
`s_per_right` is time over the answers of full score, `nll` what the model itself thinks of the
text, `each` the answers one by one: row, seconds, those of the prompt's pass, tokens.
"""
import contextlib
import copy
import json
import math
import random
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
from acceptance import arguments, begun, joined
from peft import (
    get_peft_model, get_peft_model_state_dict, PeftModel, set_peft_model_state_dict)
from safetensors.torch import load_file, save_file
from shallow_prompt import learn, losses, own_loss, trained

from himalaya_hest.ground.clock import clock_of
from himalaya_hest.ground.loss import target_logits, target_loss
from himalaya_hest.hest.acceptance import (
    Acceptance, acceptance_of, chosen_draft, learn_acceptance, n_standing)
from himalaya_hest.hest.drafter import Drafted
from himalaya_hest.hest.drafts import Lookup, both_guesses, learn_table
from himalaya_hest.hest.eight_bits import in_eight_bits
from himalaya_hest.hest.head_groups import grouped_attention
from himalaya_hest.hest.own_controller import examples, own_answers
from himalaya_hest.hest.pass_budget import PassCosts, pass_costs
from himalaya_hest.hest.passes import fewer_passes, in_place_of
from himalaya_hest.hest.tuner import HestConfig
from himalaya_hest.measures.rows import row_values
from himalaya_hest.measures.text import get_metric
from himalaya_hest.running.checkpoint import write_atomic
from himalaya_hest.running.evaluation import first_line, stopping
from himalaya_hest.running.loop import final_tasks
from himalaya_hest.streams.batching import Collator, TaskLoader, prompt_row, stop_ids
from himalaya_hest.workshop.measuring import (
    called, circumstances, mean_interval, ratio, write_record)

PLAIN, LOOKUP, RULE, PASSES = "plain", "prompt_lookup_num_tokens", "fixed rule", "passes"
UNGROUPED = "plain, Transformers' attention"
BESIDE = PLAIN, LOOKUP, RULE, UNGROUPED # what each arm is measured beside
# what a fixed rule drafts: a copy or else what the table says, copies, what the table says
BOTH, COPIES, TABLE = "copies, else table", "copies alone", "table alone"
OTHER = "fixed rule, another task's table"
SHIPPED, AS_IT_COMES = "passes, the controller that ships", "passes, no table, nothing measured"
INT8, INT8_PASSES = "plain, int8 (W8A8)", "passes, int8 (W8A8)"
INT8_RULE = "fixed rule, int8 (W8A8)"
IN_INT8 = INT8, INT8_RULE, INT8_PASSES
MASK, HEST = "a fifth of the blocks skipped, trained so", "HEST, gated blocks"
LOSSY = {f"lossy, ε = {e}": e for e in (.5, .2, .05)}
RULES = {f"fixed rule, {kind}": kind for kind in (BOTH, COPIES, TABLE)}
FLOAT32, NO_END = "plain, float32", "plain, no end"
ALL_ROWS = *BESIDE, PASSES, INT8
IN_ORDER = [*BESIDE, PASSES, *RULES, OTHER, SHIPPED, AS_IT_COMES, *LOSSY, FLOAT32, NO_END, INT8,
            INT8_RULE, INT8_PASSES, MASK, HEST]
WIDTHS, UNBOUNDED = range(1, 7), 1e9
LOOKUPS = 2, 4, 6, 10 # tokens that Transformers' lookup copies at most


def references(rows):
    "Token ids of training answers, each behind the last three tokens of its prompt."
    return [[i for i, l in zip(r["input_ids"], r["labels"]) if l == -100][-3:]
        + [l for l in r["labels"] if l != -100] for r in rows]


def certain(kind):
    "A controller that is sure of every draft: the longest is checked, of two the copy."
    acceptance = Acceptance().requires_grad_(False)
    acceptance.hidden.weight.zero_(), acceptance.hidden.bias.zero_(), acceptance.out.bias.fill_(99.)
    # the first mark is that of a copy: it takes away more than there is
    if kind == TABLE: acceptance.hidden.weight[:, 0], acceptance.out.weight[:] = 1., -99.
    return acceptance


def rule(kind, k, table): # with free tokens the longest draft is best
    return dict(table=None if kind == COPIES else table, acceptance=certain(kind),
        costs=(1.,) * (k + 1), energy_budget=UNBOUNDED)


def replayed(answers, table, kind, k, costs):
    "What a fixed rule spends on answers that are known, in passes a token."
    drafts, spent = rule(kind, k, table), 0.
    for prompt, answer, _ in answers:
        text, i = Lookup(), 1
        text.extend(prompt + answer[:1])
        while i < len(answer):
            guesses = both_guesses(text, drafts["table"], k)
            guess = chosen_draft(guesses, drafts["acceptance"], drafts["costs"], (.5, .4), False)
            stood = n_standing(guess, answer[i:])
            spent += costs.at(len(text.ids))[len(guess)]
            text.extend(answer[i:i + stood + 1])
            i += stood + 1
    return spent / sum(len(a) - 1 for _, a, _ in answers)


def loss_of(model, batch):
    "The head runs before target tokens alone."
    inputs = {n: batch[n] for n in ("input_ids", "attention_mask")}
    return target_loss(*target_logits(model, batch["labels"], **inputs))


@contextlib.contextmanager
def without_blocks(model, blocks):
    "Blocks that hand on what they get."
    layers = [model.get_decoder().layers[i] for i in blocks]
    with contextlib.ExitStack() as stack:
        for layer in layers: stack.enter_context(in_place_of(layer, forward=lambda x, **kw: x))
        yield


@torch.no_grad()
def least_needed(model, batches):
    "A fifth of the blocks: those without which the loss of right answers is least, one at a time."
    found, n = {}, len(model.get_decoder().layers)
    # the first one keeps the cache's length
    for i in range(1, n):
        with without_blocks(model, [i]):
            found[i] = sum(float(loss_of(model, batch)) for batch in batches)
    return sorted(sorted(found, key=found.get)[:max(n // 5, 1)])


def tuned_part(model): # of its state
    return {n: p for n, p in model.state_dict().items() if "q_proj" in n or "v_proj" in n}


def learned_rows(a, run, name): # the rows behind them are the controller's
    return min(a.steps * a.batch, len(run.data[name].train) - a.answers)


def learned_batches(a, run, name, seed): # of --steps steps
    rows, batches = run.data[name].train.to_list()[:learned_rows(a, run, name)], []
    while len(batches) < a.steps:
        batches += TaskLoader(rows, Collator(run.tokenizer), a.batch, seed, epoch=len(batches))
    return batches[:a.steps]


def kept_back(a, run, name): # training rows that no LoRA learned
    return run.data[name].train.to_list()[learned_rows(a, run, name):][:a.answers]


def table_of(a, run, name): # without the rows on which the controller is fitted
    rows, n = run.data[name].train.to_list(), learned_rows(a, run, name)
    return learn_table(references(rows[:n] + rows[n + a.answers:]))


def learned(a, run, model, name, seed, rate, skipped=()):
    "The backbone with a LoRA merged that has learned the task, without some blocks or with all."
    def loss_without(model, batch):
        with without_blocks(model, skipped): return loss_of(model, batch)
    batches = learned_batches(a, run, name, seed)
    return trained(model, batches, loss_without, seed, rate).merge_and_unload()


@contextlib.contextmanager
def weights_in(model, state):
    "Inside, weights of `tuned_part` are the model's."
    own = {n: p.clone() for n, p in tuned_part(model).items()}
    model.load_state_dict(state, strict=False)
    yield
    model.load_state_dict(own, strict=False)


def gated(model, state=None): # HEST over the backbone's blocks
    hest = get_peft_model(copy.deepcopy(model), HestConfig(task_type="CAUSAL_LM"))
    if state: set_peft_model_state_dict(hest, state)
    return hest.eval()


def found_at(work, part, kind, tried, teach, loss):
    """A seed's state by `teach(seed, rate)`, at that of the rates tried whose state of the first
    seed has the least loss; from files, where it was learned."""
    name, seed = part
    first, file = work/f"{name}-s0", work/f"{name}-s{seed}"/f"{kind}.safetensors"
    first.mkdir(exist_ok=True)
    rates, best = first/f"{kind}-rates.json", first/file.name
    found = json.loads(rates.read_text()) if rates.exists() else {}
    def kept(state, file): # whole or absent
        half = file.with_suffix(".part")
        save_file({n: p.contiguous() for n, p in state.items()}, half)
        half.replace(file)
    for rate in (r for r in tried if str(r) not in found):
        state = teach(0, rate)
        # one that diverges is none
        got = x if not math.isnan(x := loss(state)) else math.inf
        if got < min(found.values(), default=math.inf): kept(state, best)
        write_atomic(rates, json.dumps(found := found | {str(rate): got}))
    if math.isinf(min(found.values())):
        raise SystemExit(f"{name}, {kind}: no rate of {tried} learns it, got losses {found}")
    if not file.exists(): kept(teach(seed, float(min(found, key=found.get))), file)
    return load_file(file)


def adapted(a, run, model, name, seed, work):
    "Of a seed: weights of the LoRA; blocks to skip with weights learned without them; HEST."
    place, rows, part = work/f"{name}-s{seed}", kept_back(a, run, name), (name, seed)
    def lora(kind, skipped):
        def teach(seed, rate):
            return tuned_part(learned(a, run, model, name, seed, rate, skipped))
        def loss(state):
            with weights_in(model, state), without_blocks(model, skipped):
                return float(losses(model, 0, rows).mean())
        return found_at(work, part, kind, a.rates, teach, loss)
    # arms that no prompt has are not learned
    if not a.few: return lora("lora", ()), None, None
    if not (file := place/"blocks.json").exists():
        batches = learned_batches(a, run, name, seed)[:4]
        write_atomic(file, json.dumps(least_needed(model, batches)))
    skipped = json.loads(file.read_text())
    def teach(seed, rate):
        torch.manual_seed(seed)
        hest = gated(model)
        optimizer = torch.optim.AdamW(hest.base_model.optimizer_groups(rate))
        # the price of energy is in its own loss
        learn(hest, optimizer, learned_batches(a, run, name, seed), own_loss)
        return get_peft_model_state_dict(hest)
    def loss(state): return float(losses(gated(model, state), 0, rows).mean())
    return (lora("lora", ()), dict(blocks=skipped, weights=lora("mask", skipped)),
            gated(model, found_at(work, part, "hest", a.hest_rates, teach, loss)))


def fitted(a, run, model, name, seed, table, costs, place):
    "Controller, rules, lookup's length and what leniency saves, on rows that nothing learned."
    file = place/"fitted.json"
    if not file.exists():
        asked = asked_of(run, name)
        n, given = min(a.new_tokens, asked.max_new_tokens), (run.tokenizer, asked.stop)
        ids = [torch.tensor([prompt_row(r)["input_ids"]], device=model.device)
               for r in kept_back(a, run, name)]
        answers = [own_answers(model, [x], n, **ending(x, *given))[0] for x in ids]
        answers = [x for x in answers if len(x[1]) > 1]
        controller = learn_acceptance(*joined(examples(answers)), seed=seed) if answers else None
        by = {kind: {k: replayed(answers, table, kind, k, costs) if answers else 1. for k in WIDTHS}
              for kind in RULES.values()}
        rules = {kind: min(found, key=found.get) for kind, found in by.items()}
        best = min(rules, key=lambda kind: by[kind][rules[kind]])
        lookup, leniency = dict.fromkeys(LOOKUPS, 0.), {}
        for x in ids: # in turns at each prompt
            for k in LOOKUPS: lookup[k] += timed(model, x, n, *given, k)[0]
        for e in LOSSY.values():
            told, way = Drafted(), lossy_way(e, table, costs, controller)
            for x in ids: told.add(Drafted(**timed(model, x, n, *given, way)[3]))
            leniency[e] = told.share
        state = {n: w.tolist() for n, w in controller.state_dict().items()} if controller else None
        write_atomic(file, json.dumps(dict(controller=state, replayed=by, rules=rules, best=best,
                                           lookup_s=lookup, leniency=leniency,
                                           table_bytes=table.nbytes)))
    kept = json.loads(file.read_text())
    if kept["controller"]: kept["controller"] = acceptance_of(kept["controller"])
    kept["lookup"] = int(min(kept["lookup_s"], key=kept["lookup_s"].get))
    return kept


def lossy_way(e, table, costs, controller): # what leniency costs is a figure of it alone
    return dict(table=table, costs=costs, acceptance=controller, energy_budget=.5, lossy={e: .5})


def ways_of(table, other, costs, costs_int8, kept):
    "What `fewer_passes` is told by each arm; plain generation and Transformers' own are told else."
    bounded = dict(table=table, costs=costs, acceptance=kept["controller"])
    rules = {kind: rule(kind, k, table) for kind, k in kept["rules"].items()}
    ways = {PLAIN: None, LOOKUP: kept["lookup"], RULE: rules[kept["best"]], PASSES: bounded,
        SHIPPED: dict(table=table, costs=costs), AS_IT_COMES: {}, UNGROUPED: None, FLOAT32: None,
        NO_END: None}
    # the best one is measured already
    ways |= {name: rules[kind] for name, kind in RULES.items() if kind != kept["best"]}
    if other: ways[OTHER] = rule(BOTH, kept["rules"][BOTH], other)
    for name, e in LOSSY.items(): ways[name] = lossy_way(e, table, costs, kept["controller"])
    return ways | {INT8: None, INT8_RULE: rules[kept["best"]],
                   INT8_PASSES: bounded | dict(costs=costs_int8)}


@contextlib.contextmanager
def held_so(model, name, mask, hest):
    "The model as an arm has it."
    if name == FLOAT32: yield copy.deepcopy(model).float() # made anew: the weights are a task's own
    elif name in IN_INT8:
        with in_eight_bits(model): yield model
    elif name == HEST: yield hest
    elif name == UNGROUPED:
        grouped = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        yield model
        model.set_attn_implementation(grouped)
    elif name == MASK:
        with weights_in(model, mask["weights"]), without_blocks(model, mask["blocks"]): yield model
    else: yield model


def ending(ids, tokenizer, stop): # of `generate`: where a task's answer ends
    return dict(eos_token_id=stop_ids(tokenizer),
        stopping_criteria=stopping(dict(stop=stop, input_ids=ids), tokenizer) or None)


def timed(model, ids, n, tokenizer, stop, way):
    """Time of an answer and of its prompt's pass (`clock_of`), its tokens, and what was drafted.
    Without `stop` nothing ends it."""
    read, clock = [], clock_of(ids.device) # when the first pass ended
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    hook = inner.register_forward_hook(lambda *a: None if read else read.append(clock()))
    kw = dict(prompt_lookup_num_tokens=way) if isinstance(way, int) else {}
    kw |= ending(ids, tokenizer, stop) if stop else dict(eos_token_id=len(tokenizer)) # no token
    drafting = isinstance(way, dict)
    with fewer_passes(model, **way) if drafting else contextlib.nullcontext(Drafted()) as counted:
        start = clock()
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=n, pad_token_id=0, **kw)
        took = clock() - start
    hook.remove()
    return took, read[0] - start, out[0, ids.shape[1]:].tolist(), asdict(counted)


@torch.no_grad()
def judged(model, prompt, text, plain):
    "What the model thinks of a text: nats a token, and how it leaves the plain one."
    ids = torch.tensor([prompt + text], device=model.device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1:-1].float()
    nll = float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt):]))
    i = next((i for i, (x, y) in enumerate(zip(text, plain)) if x != y), None)
    if i is None: return dict(nll=nll)
    at, most = logits[i], float(logits[i].abs().max())
    # the spacing of numbers of that size in the model's type
    step = torch.finfo(model.dtype).eps * 2. ** math.floor(math.log2(most))
    return dict(nll=nll, gap=abs(float(at[plain[i]] - at[text[i]])) / step)


def asked_of(run, name): # all validation rows
    return next(t for t in final_tasks(run) if t.name == name)


def measured(a, run, model, part, ways, others, file):
    "A line for each prompt that lacks an arm, with all that it lacks."
    name, seed = part
    asked = asked_of(run, name)
    text, have = file.read_text() if file.exists() else "", {}
    for line in text.splitlines():
        known = json.loads(line)
        have.setdefault(known["row"], set()).update(known["arms"])
    prompts, dice = asked.prompts, random.Random(seed)
    capped = min(a.new_tokens, asked.max_new_tokens), run.tokenizer, asked.stop
    endless = a.new_tokens, run.tokenizer, None
    rows = list(range(seed, min(a.prompts, len(prompts)), a.seeds))
    few = rows[:math.ceil(a.few / a.seeds)]
    lacks = {k: {w for w in ways if k in few or w in ALL_ROWS} - have.get(k, set()) for k in rows}
    todo = [k for k in rows if lacks[k]]
    for first, k in [(True, k) for k in todo[:1]] + [(False, k) for k in todo]:
        beside = (*BESIDE, INT8) if lacks[k] & {INT8_RULE, INT8_PASSES} else BESIDE
        arms = [w for w in ways if w in lacks[k] or w in beside]
        prompt, found = prompts[k]["input_ids"], {}
        for w in dice.sample(arms, len(arms)):
            with held_so(model, w, *others) as held:
                ids = torch.tensor([prompt], device=held.device)
                found[w] = dict(zip(("s", "prompt_s", "text", "told"), timed(
                    held, ids, *(endless if w == NO_END else capped), ways[w])))
        # nothing is counted at the first prompt of a process
        if first: continue
        # what comes behind the end is paid, and no answer
        if NO_END in found: del found[NO_END]["text"][len(found[PLAIN]["text"]):]
        for w in arms: found[w] |= judged(model, prompt, found[w]["text"], found[PLAIN]["text"])
        text += json.dumps(dict(row=k, prompt=len(prompt), arms=found)) + "\n"
        write_atomic(file, text)
        print(f"{name}, seed {seed}: prompt {k}", end="\r", flush=True)


def costs_kept(file, model, held=contextlib.nullcontext): # of passes, measured once
    if not file.exists():
        with held(model): costs = pass_costs(model)
        # of calls beside one another the first counts
        if not file.exists(): write_atomic(file, json.dumps(asdict(costs)))
    costs = json.loads(file.read_text())
    return PassCosts(**costs | dict(passes=tuple(map(tuple, costs["passes"]))))


def told_of(rows, w):
    "What was drafted over all rows of an arm."
    told = Drafted()
    for r in rows: told.add(Drafted(**r["arms"][w]["told"]))
    return {f.name: getattr(told, f.name) for f in fields(told)} if told.passes else {}


def decoded(arm, other):
    "Time of a token behind the prompt's pass over another arm's; None without such tokens."
    pairs = [(a, p) for a, p in zip(arm, other) if min(len(a["text"]), len(p["text"])) > 1]
    def a_token(o): return (o["s"] - o["prompt_s"]) / (len(o["text"]) - 1)
    return ratio(*zip(*((a_token(a), a_token(p)) for a, p in pairs))) if pairs else None


def arm(run, asked, rows, w):
    "One arm beside plain generation and the fixed rule, over the rows that have it."
    # of a prompt that was asked again for another arm the first time counts
    rows = [*{r["row"]: r for r in rows[::-1] if w in r["arms"]}.values()][::-1]
    of = {x: [r["arms"][x] for r in rows] for x in (w, *BESIDE)}
    cut = first_line if asked.stop == "line" else str
    said = {x: [cut(t) for t in run.tokenizer.batch_decode(
        [o["text"] for o in of[x]], skip_special_tokens=True)] for x in (w, PLAIN)}
    s = {x: np.array([o["s"] for o in of[x]]) for x in of}
    def a_token(x): return [t / len(o["text"]) for t, o in zip(s[x], of[x])]
    references = [asked.references[r["row"]] for r in rows]
    score, plain = (get_metric(asked.metric)(said[x], references)["score"] for x in (w, PLAIN))
    mine, plains = (np.array(row_values(asked.metric, said[x], references, asked.labels))
                    for x in (w, PLAIN))
    right = int((mine > 1 - 1e-9).sum()) # answers with the full score
    other = [o["gap"] for o in of[w] if "gap" in o]
    # in eight bits the unit is a pass in eight bits
    kinds = [(r["arms"][w], r["arms"][INT8]) for r in rows if w in (INT8_RULE, INT8_PASSES)]
    return dict(
        rows=len(rows), time=ratio(s[w], s[PLAIN]), token_time=ratio(a_token(w), a_token(PLAIN)),
        decode_time=decoded(of[w], of[PLAIN]),
        against_rule=ratio(s[w], s[RULE]), against_lookup=ratio(s[w], s[LOOKUP]),
        token_against_rule=ratio(a_token(w), a_token(RULE)),
        token_against_lookup=ratio(a_token(w), a_token(LOOKUP)),
        token_against_ungrouped=ratio(a_token(w), a_token(UNGROUPED)),
        decode_against_rule=decoded(of[w], of[RULE]),
        **dict(against_int8=ratio(*zip(*((a["s"], p["s"]) for a, p in kinds)))) if kinds else {},
        s=float(s[w].sum()), less_plain=mean_interval(mine - plains),
        nll_less_plain=mean_interval([o["nll"] - p["nll"] for o, p in zip(of[w], of[PLAIN])]),
        percentiles_s=dict(zip(("p50", "p95", "p99"), np.percentile(s[w], (50, 95, 99)).tolist())),
        score=score, plain_score=plain,
        s_per_right=float(s[w].sum()) / right if right else None,
        to_plain=get_metric("rouge_l")(said[w], [(t,) for t in said[PLAIN]])["score"],
        same=float(np.mean([o["text"] == p["text"] for o, p in zip(of[w], of[PLAIN])])),
        nll=float(np.mean([o["nll"] for o in of[w]])),
        gap=dict(differ=len(other), most=max(other, default=0.),
                 within_one=sum(g <= 1 for g in other)),
        **told_of(rows, w),
        each=[f"{r['row']} {o['s']:.4f} {o['prompt_s']:.4f} {len(o['text'])}"
              for r, o in zip(rows, of[w])])


def summary(a, run, work):
    "The record of what has been measured."
    out = {}
    for name in run.order:
        places = [p for s in range(a.seeds) if (p := work/f"{name}-s{s}"/"rows.jsonl").exists()]
        rows = [json.loads(line) for p in places for line in p.open()]
        if not rows: continue
        ways = [w for w in IN_ORDER if any(w in r["arms"] for r in rows)]
        kept = [json.loads((p.parent/"fitted.json").read_text()) for p in places]
        rules = [dict(best=k["best"]) | k["rules"] for k in kept]
        asked, rates = asked_of(run, name), (work/f"{name}-s0").glob("*-rates.json")
        out[name] = dict(metric=asked.metric, seeds=len(places), rules=rules,
            lookup_s=[k["lookup_s"] for k in kept], table_bytes=kept[0]["table_bytes"],
            loss_by_rate={p.name.removesuffix("-rates.json"): json.loads(p.read_text())
                          for p in sorted(rates)},
            cost_by_leniency=[k["leniency"] for k in kept],
            prompt_tokens=float(np.median([r["prompt"] for r in rows])),
            arms={w: arm(run, asked, rows, w) for w in ways})
    return out


def recorded(a, run, work, out, told):
    "Write the record of what has been measured."
    found, command = summary(a, run, work), called(__file__, ("--again",))
    write_record(out, circumstances(command, "cpu") | told | dict(tasks=found))
    return found


def check_same(a, file):
    "A study goes on only as it was begun; rows may come to it."
    asked = {n: v for n, v in vars(a).items()
             if n not in ("prompts", "few", "work", "again", "only", "out")}
    if not file.exists():
        if any(file.parent.glob("*/*")):
            raise SystemExit(f"{file.parent} holds a study that does not say how it was begun: "
                             "take another folder for --work")
        write_atomic(file, json.dumps(asked))
    for name, begun_so in json.loads(file.read_text()).items():
        if asked[name] != begun_so:
            raise SystemExit(f"{file.parent} was begun with {name} = {begun_so}, got "
                             f"{asked[name]}: take another folder for --work")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=45, help="0: the bare backbone")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--hest-rates", type=float, nargs="+", default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--answers", type=int, default=24, help="of training rows, not learned")
    parser.add_argument("--prompts", type=int, default=150, help="of each task, over all seeds")
    parser.add_argument("--few", type=int, default=60, help="of each task, for the other arms")
    parser.add_argument("--work", type=Path, default="runs/passes")
    parser.add_argument("--only", help="of the tasks, the one that this call measures")
    parser.add_argument("--again", action="store_true", help="the record alone")
    parser.add_argument("--out", type=Path, help="records/bench/passes-DTYPE[-TASK].json")
    a = parser.parse_args()
    if a.only and a.only not in a.tasks: parser.error(f"--only: got {a.only}, of {a.tasks}")
    torch.set_num_threads(1)
    with contextlib.ExitStack() as until:
        run, model = begun(a)
        until.enter_context(grouped_attention(model))
        dtype = str(model.dtype).removeprefix("torch.")
        out = a.out or Path("records/bench")/f"passes-{'-'.join(filter(None, (dtype, a.only)))}.json"
        work = a.work/out.stem.removeprefix("passes-")
        work.mkdir(parents=True, exist_ok=True)
        check_same(a, work/"settings.json")
        costs = costs_kept(work/"costs.json", model)
        costs_int8 = costs_kept(work/"costs_int8.json", model, in_eight_bits)
        told = dict(model=Path(run.config.model).name, dtype=dtype, steps=a.steps,
            new_tokens=a.new_tokens, pass_costs=asdict(costs))
        tables = {n: table_of(a, run, n) for n in run.order}
        bare = {n: p.clone() for n, p in tuned_part(model).items()}
        names = [] if a.again else [a.only] if a.only else run.order
        # the last seed has all arms: a study that ends early has some rows of each
        for seed, name in [(s, n) for s in reversed(range(a.seeds)) for n in names]:
            place = work/f"{name}-s{seed}"
            place.mkdir(exist_ok=True)
            model.load_state_dict(bare, strict=False)
            mask = hest = None
            if a.steps:
                weights, mask, hest = adapted(a, run, model, name, seed, work)
                model.load_state_dict(weights, strict=False)
            table, other = tables[name], next((t for n, t in tables.items() if n != name), None)
            kept = fitted(a, run, model, name, seed, table, costs, place)
            ways = ways_of(table, other, costs, costs_int8, kept)
            if dtype == "float32": del ways[FLOAT32] # it is plain generation's
            if a.steps: ways |= {MASK: None, HEST: None}
            measured(a, run, model, (name, seed), ways, (mask, hest), place/"rows.jsonl")
            for w, r in recorded(a, run, work, out, told)[name]["arms"].items():
                print(name, w, r["rows"], r["token_time"], r["same"], flush=True)
        recorded(a, run, work, out, told)


if __name__ == "__main__": main()
