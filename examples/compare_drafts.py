"""Compare draft methods on a few questions: the speed differs, the text does not.

python examples/compare_drafts.py
"""

import draftwing as dw

QUESTIONS = ["What is rain?", "Write a Python class for a stack.", "Tell me a story about a fox."]
DRAFTS = ["none", "lookup", "suffix", "eagle3", "eagle3+lookup"]

prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
texts = {}
print(f"{'draft':15}{'tokens/s':>10}{'tau':>7}  same text")
for draft in DRAFTS:
    lm = dw.load(draft=draft)
    lm.generate(prompts[0], max_tokens=8)  # warm-up
    lm.forget()  # or suffix would remember it
    answers = [lm.generate(prompt, max_tokens=48)[0] for prompt in prompts]
    stats = dw.Stats.sum(answer.stats for answer in answers)
    texts[draft] = [answer.token_ids for answer in answers]
    print(f"{draft:15}{stats.tokens_per_s:10.0f}{stats.tau:7.2f}  {texts[draft] == texts['none']}")
