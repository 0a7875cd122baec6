"""What the claims page of Study 2 needs beside runs: lines of HEST's code, and the property test of
the token bucket with its count.

    python bench/energy_claims.py            # writes records/bench/energy_claims.json; some minutes

lines    lines of code without docstrings, comments, blank lines and signatures
         (equations.method_lines), the PEFT shells apart: of what gates over directions need, and of
         what gates over blocks need beside it.
bound    the code cells of nbs/hest/10_bucket.ipynb in their order, the slow one too, whose counts
         of sequences and largest use of a bound are kept; a bound that is broken ends it with an
         error.
"""
import argparse
import contextlib
import io
import json
import re
import time
from pathlib import Path

from himalaya_hest.workshop.equations import method_lines
from himalaya_hest.workshop.measuring import called, write_record

DIRECTIONS = ("gates", "controller", "budget", "directions")
BLOCKS = (*DIRECTIONS, "gate_costs", "int8", "blocks", "bucket", "bucket_cache", "energy_budget")


def lines_of(modules): return {m: n.code for m, n in method_lines(modules).items()}


def bound(notebook):
    "{sequences, largest_use} of the slow property test."
    cells = ["".join(c["source"]) for c in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        if c["cell_type"] == "code"]
    space, out = {"__name__": notebook.stem}, io.StringIO()
    for source in cells:
        if "eval: false" in source: continue
        with contextlib.redirect_stdout(out): exec(compile(source, notebook.name, "exec"), space)
        if "#| slow" in source: break
    found = re.search(r"([\d,]+) sequences, largest use of a bound ([\d.]+)", out.getvalue())
    if not found:
        raise SystemExit(f"{notebook}: its slow cell printed no count of sequences; it printed "
            f"{out.getvalue()[-300:]!r}")
    return dict(sequences=int(found[1].replace(",", "")), largest_use=float(found[2]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--notebook", type=Path, default=Path("nbs/hest/10_bucket.ipynb"))
    parser.add_argument("--out", type=Path, default=Path("records/bench/energy_claims.json"))
    args = parser.parse_args()
    start = time.process_time()
    record = dict(command=called(__file__), lines=dict(directions=lines_of(DIRECTIONS),
        blocks=lines_of(BLOCKS)), bound=bound(args.notebook) | dict(notebook=str(args.notebook)))
    print({k: sum(v.values()) for k, v in record["lines"].items()}, record["bound"],
        f"{time.process_time() - start:.0f} s")
    write_record(args.out, record)


if __name__ == "__main__": main()
