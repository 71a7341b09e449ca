"""GPT-2, language modelling on text: the published architecture, whole or cut into pipeline layers."""
