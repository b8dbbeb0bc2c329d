"""Check that drafts change nothing: every draft, tree, temperature and batch gives the text of decoding without drafts.

python examples/verify.py
"""

import itertools

import draftwing as dw

QUESTIONS = ["What is rain?", "Write a Python class for a stack."]
DRAFTS = ["lookup", "eagle3"]
BUDGETS = {"automatic": None, "chain of 5": dw.Budget(5), "tree of 16 nodes": dw.Budget(depth=4, width=4, nodes=16)}

prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
baseline = dw.load(draft="none")
num_checked = 0
for draft, temperature in itertools.product(DRAFTS, (0.0, 1.0)):
    options = {"temperature": temperature, "seed": 3, "max_tokens": 32}
    expected = [baseline.generate(prompt, **options)[0].token_ids for prompt in prompts]
    lm = dw.load(draft=draft)
    for (name, budget), max_batch in itertools.product(BUDGETS.items(), (1, len(prompts))):
        answers = lm.generate(prompts, speculation=budget, max_batch=max_batch, **options)
        assert [answer.token_ids for answer in answers] == expected, (draft, name, temperature)
        num_checked += len(answers)
    print(f"{draft}, temperature {temperature}: {len(BUDGETS)} trees, batches of 1 and {len(prompts)}: identical")
print(f"{num_checked} texts are the same as without drafts")
