"""Export of directories of KV objects to a safetensors file, and import."""
