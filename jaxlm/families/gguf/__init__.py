"""GGUF files of llama.cpp: read, dequantized, and translated into the names and keys of a Hugging Face directory."""
