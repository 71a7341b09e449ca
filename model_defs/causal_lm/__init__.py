"""Any causal language model of Hugging Face's: fine-tuned whole or by LoRA, on packed text."""
