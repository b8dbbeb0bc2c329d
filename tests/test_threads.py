"""Several threads on one ``LM``: every text is that of one thread alone."""

import threading

import pytest

import draftwing as dw

PROMPTS = ["def quicksort(", "class Stack:\n    def", "import os\n\ndef walk(", "for row in rows:\n    print(row)\n"]


@pytest.mark.parametrize(
    ("dtype", "draft", "budget"),
    [
        ("float64", "eagle3", dw.Budget(4, 3, 12)),
        ("float32", "none", None),
        ("float32", "eagle3", dw.Budget(4, 3, 12)),
        ("float32", "eagle3", None),
    ],
    ids=["torch-tree", "kernel-plain", "kernel-tree", "kernel-auto"],
)
def test_four_threads_write_what_one_writes(dtype, draft, budget):
    lm = dw.load(draft=draft, device="cpu", budget=budget, dtype=dtype)
    options = {"max_tokens": 8 if dtype == "float64" else 16, "temperature": 1.0, "ignore_eos": True}
    wanted = [lm.generate(text, seed=seed, **options)[0].text for seed, text in enumerate(PROMPTS)]
    found: dict[tuple[int, int], str] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(PROMPTS))

    def work(number: int) -> None:
        try:
            start.wait()
            for turn in range(3):
                which = (number + turn) % len(PROMPTS)
                if turn % 2:
                    steps = lm.stream(PROMPTS[which], seed=which, **options)
                    found[number, which] = "".join(step.text for step in steps)
                else:
                    found[number, which] = lm.generate(PROMPTS[which], seed=which, **options)[0].text
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(found) == 3 * len(PROMPTS)
    assert all(text == wanted[which] for (_, which), text in found.items())
