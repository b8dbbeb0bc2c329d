"""Start a server, and talk to it with the OpenAI client. Needs the extra ``serve``, and ``pip install openai``.

python examples/openai_client.py
"""

import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import openai

PORT = sys.argv[1] if len(sys.argv) > 1 else "8123"
MESSAGES = [{"role": "user", "content": "What is rain?"}]
URL = f"http://127.0.0.1:{PORT}"

command = [sys.executable, "-m", "draftwing", "serve", "--port", PORT, "--name", "local"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    while True:  # it loads the model
        with suppress(OSError), urllib.request.urlopen(f"{URL}/health"):
            break
        if server.poll() is not None:
            sys.exit("the server has ended: run draftwing serve to see why")
        time.sleep(0.2)
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    for speculation in ({"draft": "none"}, {"tree": "chain:3"}):  # chosen by request; the text is the same
        print(f"--- {speculation}")
        request = {"model": "local", "messages": MESSAGES, "seed": 1, "max_tokens": 48, "stream": True}
        for chunk in client.chat.completions.create(**request, extra_body={"speculation": speculation}):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
finally:
    server.terminate()
    server.wait()
