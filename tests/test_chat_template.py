"""The chat template, from several threads."""

import subprocess
import sys

from conftest import add_tokenizer

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
AT_ONCE = """
import sys, threading
from pathlib import Path
from draftwing.text.tokenizer import Tokenizer
tokenizer, begin, found = Tokenizer(Path(sys.argv[1])), threading.Barrier(12), []
def ask():
    begin.wait()
    try:
        found.append(len(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) > 0)
    except Exception as error:
        found.append(error)
threads = [threading.Thread(target=ask) for _ in range(12)]
[each.start() for each in threads], [each.join() for each in threads]
print(found.count(True), [each for each in found if each is not True][:1])
"""


def test_the_first_dialogues_may_come_all_at_once(tmp_path):
    """In a Python of its own: what is imported once is never imported by two threads again."""
    folder = add_tokenizer(tmp_path, chat_template=TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
    done = subprocess.run([sys.executable, "-c", AT_ONCE, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("12 []"), done.stdout + done.stderr[-2000:]
