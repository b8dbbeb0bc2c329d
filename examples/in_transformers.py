"""Decode a model of transformers with drafts, inside its own ``generate``.

python examples/in_transformers.py MODEL     # a folder or a hub id; without one, a tiny model of Python code
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import draftwing as dw
from draftwing.models.resolve import resolve

folder = resolve(sys.argv[1] if len(sys.argv) > 1 else "toy")
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("class Stack:\n    def __init__(self):\n", return_tensors="pt")
options = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7}

fast = dw.custom_generate("lookup", tokenizer=tokenizer, seed=1)  # or the folder of a head or a draft model
output = model.generate(**inputs, **options, custom_generate=fast, streamer=TextStreamer(tokenizer))
print(f"tau {fast.stats.tau:.2f}, {fast.stats.num_tokens} tokens")

plain = dw.custom_generate("none", tokenizer=tokenizer, seed=1)
assert output.tolist() == model.generate(**inputs, **options, custom_generate=plain).tolist()
print("the same text without drafts")
