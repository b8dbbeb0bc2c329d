"""Train a tiny EAGLE-1 head on a folder of text, and draft with it. Needs the extra ``train``.

python examples/train_head.py FOLDER      # without one, Python's own json package; the target is the tiny code model
"""

import json
import sys
import tempfile
from pathlib import Path

import draftwing as dw
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare

data = sys.argv[1] if len(sys.argv) > 1 else Path(json.__file__).parent
sizes = {"iterations": 24, "tokens_per_batch": 512, "max_length": 128}
options = TrainOptions("eagle1", **sizes, eval_every=12, eval_prompts=2, precision="no")
prompts = ["def area(", "class Stack:\n", "import os\n"]

with tempfile.TemporaryDirectory() as folder:
    session = prepare(RunFiles("toy", [data]), options, Path(folder), dtype="float32", device="cpu")
    print(session.describe())
    session.run()
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "val_loss" in metrics:
            print(f"update {metrics['iteration']}: held-out loss {metrics['val_loss']:.2f}, tau {metrics['tau']:.2f}")
    drafts = {"the new head": Path(folder) / "head", "the head that ships, trained for longer": "eagle1"}
    for name, draft in drafts.items():
        answers = dw.load("toy", draft, budget=dw.Budget(4)).generate(prompts, max_tokens=48)
        print(f"{name}: tau {dw.Stats.sum(answer.stats for answer in answers).tau:.2f}")
