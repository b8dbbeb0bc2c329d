"""Stream an answer: text that one forward pass produced together has one colour.

python examples/stream.py "What is rain?"
"""

import sys

import draftwing as dw

COLOURS = ["37", "36", "32", "33", "35"]  # 1, 2, 3, 4, more tokens at once

question = sys.argv[1] if len(sys.argv) > 1 else "Write a Python function that adds up the even numbers of a list."
lm = dw.load()  # the chat model, or DRAFTWING_MODEL

stats = dw.Stats()
for step in lm.stream([{"role": "user", "content": question}], max_tokens=96):
    colour = COLOURS[min(len(step.token_ids), len(COLOURS)) - 1]
    print(f"\x1b[{colour}m{step.text}\x1b[0m", end="", flush=True)
    stats.add(step.step)

print(f"\n\n{stats.num_tokens} tokens in {stats.num_forwards} forwards: tau {stats.tau:.2f}, {lm.drafter_name}")
