"""What SGLang 0.5.23 calls on a CPU without AMX and cannot find, in PyTorch."""
