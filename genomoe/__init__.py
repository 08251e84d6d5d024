"""GenoMoE: long-context mixture-of-experts DNA language models."""
