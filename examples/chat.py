"""A conversation: its KV cache is kept, so that every turn reads only what is new.

python examples/chat.py
"""

import draftwing as dw

QUESTIONS = ["Name three rivers.", "Which of them is the longest?", "Write one line of a poem about it."]

lm = dw.load()
engine = lm.engine(max_batch=1, kv_memory=256 << 20)  # 256 MiB for keys and values
messages = [{"role": "system", "content": "Answer in one sentence."}]

for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    cached = engine.stats.num_prefix_hits
    answer = ""
    print(f"> {question}")
    for step in lm.stream(messages, temperature=0.7, seed=1, max_tokens=48, engine=engine):
        print(step.text, end="", flush=True)
        answer += step.text
    messages.append({"role": "assistant", "content": answer})
    num_prompt_tokens = len(lm.encode(messages[:-1]))
    print(f"\n[{engine.stats.num_prefix_hits - cached} of {num_prompt_tokens} prompt tokens were cached]\n")
