"""Answers in a format: a JSON schema holds at every drafted token. Needs the extra ``grammar``.

python examples/json_answer.py
"""

import json

import draftwing as dw

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}

lm = dw.load()
prompt = [{"role": "user", "content": "Name a city in Europe, its population, and whether it is a capital, as JSON."}]
for seed in (1, 2, 3):
    answer = lm.generate(prompt, grammar=SCHEMA, temperature=0.8, seed=seed, max_tokens=100)[0]
    if answer.finish_reason == "length":
        print("too long:", answer.text)
        continue
    city = json.loads(answer.text)
    print(f"{city['city']!r}, {city['population']:,}, capital: {city['capital']} (tau {answer.tau:.2f})")

date = dw.Grammar.regex(r"(19|20)\d\d-(0[1-9]|1[0-2])")
print("a date:", lm.generate("The first moon landing: ", grammar=date, max_tokens=16)[0].text)
