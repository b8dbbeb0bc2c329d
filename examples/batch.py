"""Decode several prompts together, each with its own sampling, and several answers to one.

python examples/batch.py
"""

import draftwing as dw

QUESTIONS = {
    "What is the capital of Germany?": dw.Sampling(max_tokens=32),  # greedy
    "Invent a name for a cat.": dw.Sampling(max_tokens=32, temperature=0.8, top_p=0.95, seed=1),
    "Count from one to twenty.": dw.Sampling(max_tokens=32, stop=("seven", "7")),
}
prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]

lm = dw.load()
num_steps = [0] * len(prompts)


def count(index: int, step: dw.StreamStep) -> None:
    num_steps[index] += 1


answers = lm.generate(prompts, list(QUESTIONS.values()), max_batch=3, on_step=count)
for question, answer, steps in zip(QUESTIONS, answers, num_steps, strict=True):
    print(f"> {question}\n{answer.text}")
    print(f"[{len(answer.token_ids)} tokens in {steps} steps, ended by {answer.finish_reason}]\n")

print("Three answers to one question; the seed of each gives it again:")
for answer in lm.generate(prompts[1], n=3, temperature=1.0, seed=7, max_tokens=12):
    again = lm.generate(prompts[1], temperature=1.0, seed=answer.seed, max_tokens=12)[0]
    print(f"{answer.text!r}, seed {answer.seed}, again: {again.token_ids == answer.token_ids}")
