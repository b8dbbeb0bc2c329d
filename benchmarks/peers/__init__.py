"""How fast do peers decode the very same checkpoint? ``benchmarks/peers.py`` is the command.

One file for each peer (``ours``, ``hugging``, ``genai``, ``llamacpp``, ``vllm_cpu``) is imported in that peer's own
environment, where there is nothing of ours: these files, and ``channel``, import nothing else at their top.
"""
