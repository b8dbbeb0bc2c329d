"""The workers and the measurement of ``benchmarks/peers.py``, which compares how fast peers decode a checkpoint.

One file for each peer (``ours``, ``hugging``, ``genai``, ``llamacpp``, ``vllm_cpu``) is imported in that peer's
environment, which does not have Draftwing: these files, and ``channel``, import nothing else at module level.
"""
