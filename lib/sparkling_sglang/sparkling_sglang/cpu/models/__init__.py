"""The two model classes of this lane, as a package for ``SGLANG_EXTERNAL_MODEL_PACKAGE``.

With that variable SGLang imports the models of the named package and leaves its own 200 model files
alone until one of them is asked for, which saves the scheduler seconds at every start.
"""
