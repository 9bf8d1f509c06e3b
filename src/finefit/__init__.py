"""finefit: fine-tune the LLM you want on the GPU you have. It predicts peak memory, plans what fits, and trains."""

__version__ = "0.1.0"
