"""Answer batch requests with Ray Data LLM: ``python ray_answers.py requests.jsonl replies MODEL [replicas]``.

The replies are files in the format of OpenAI's batch API, for ``draftwing data regenerate --read-batch``.
"""

from __future__ import annotations

import sys
from typing import Any


def prepare(row: dict[str, Any]) -> dict[str, Any]:
    """Return messages and sampling parameters of a request to ``/v1/chat/completions``."""
    body = row["body"]
    names = ("temperature", "top_p", "max_tokens", "seed", "stop", "top_k", "min_p")
    sampling = {name: body[name] for name in names if body.get(name) is not None}
    messages = [{"role": message["role"], "content": message["content"]} for message in body["messages"]]
    return {"custom_id": row["custom_id"], "messages": messages, "sampling_params": sampling}


def to_reply(row: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a file of replies. Ray reports no finish reason: an answer of the full length was cut off."""
    num_tokens = int(row["num_generated_tokens"])
    reason = "length" if num_tokens >= row["sampling_params"]["max_tokens"] else "stop"
    choice = {"message": {"role": "assistant", "content": row["generated_text"]}, "finish_reason": reason}
    body = {"choices": [choice], "usage": {"completion_tokens": num_tokens}}
    return {"custom_id": row["custom_id"], "response": {"status_code": 200, "body": body}}


def main() -> None:
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    requests, replies, model, *replicas = sys.argv[1:]
    config = vLLMEngineProcessorConfig(model_source=model, concurrency=int(replicas[0]) if replicas else 1)
    processor = build_processor(config, preprocess=prepare, postprocess=to_reply)
    processor(ray.data.read_json(requests, lines=True)).write_json(replies)


if __name__ == "__main__":
    main()
