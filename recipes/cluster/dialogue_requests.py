"""Write requests that have a server read whole dialogues: ``python dialogue_requests.py ANSWERS MODEL > REQUESTS``.

A server that stores hidden states then stores those of the answers, too. It must write one token, which has no states.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def request_of(record: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the request for a record of ``draftwing data regenerate``: a dialogue, or a document."""
    body = {"model": model, "max_tokens": 1, "temperature": 0.0}
    if "messages" in record:
        messages = [{"role": message["role"], "content": message["content"]} for message in record["messages"]]
        url = "/v1/chat/completions"
        body |= {"messages": messages, "add_generation_prompt": False}
    else:
        url, body = "/v1/completions", {**body, "prompt": record["text"]}
    return {"custom_id": record["id"], "method": "POST", "url": url, "body": body}


def main() -> None:
    answers, model = sys.argv[1:]
    for line in Path(answers).read_text(encoding="utf-8").split("\n"):
        if line:
            print(json.dumps(request_of(json.loads(line), model)))


if __name__ == "__main__":
    main()
